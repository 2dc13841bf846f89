"""Open sizes against onnxruntime: Resize, Squeeze without axes, branches of different rank, sizes of -1."""

import itertools

import numpy as np
import onnx.helper as h
import pytest
from onnx import TensorProto as T, numpy_helper

import mithril as ml

ort = pytest.importorskip("onnxruntime")
rng = np.random.default_rng(0)


def network(nodes, shape, constants=(), outputs=("y",), dtype=T.FLOAT, **more):
    tensors = [numpy_helper.from_array(np.asarray(a), n) for n, a in dict(constants).items()]
    inputs = [h.make_tensor_value_info("x", dtype, shape)]
    graph = h.make_graph(
        nodes, "g", inputs, [h.make_tensor_value_info(n, dtype, None) for n in outputs], tensors, **more
    )
    return h.make_model(graph, opset_imports=[h.make_opsetid("", 18)], ir_version=8)


def check(proto, *inputs, **options):
    session = ort.InferenceSession(proto.SerializeToString())
    compiled = ml.compile(ml.from_onnx(proto, **options), "numpy", inference=True)
    for x in inputs:
        for y, z in zip(compiled({"x": x}).values(), session.run(None, {"x": x}), strict=True):
            np.testing.assert_allclose(y, z, rtol=1e-4, atol=1e-4, strict=True)


def image(height, width, dtype=np.float32):
    return (rng.normal(size=(1, 2, height, width)) * 50).astype(dtype)


COORDINATES = ("half_pixel", "asymmetric", "pytorch_half_pixel", "half_pixel_symmetric")
OPEN = ["n", 2, "height", "width"]


@pytest.mark.parametrize("factor", [2.0, 3.0, 4.0, 0.5, 0.25])
@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
def test_resize_by_a_factor(factor, mode):
    roundings = ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil") if mode == "nearest" else ("floor",)
    for coordinates, rounding in itertools.product(COORDINATES if factor > 1 else COORDINATES[:2], roundings):
        attributes = {"mode": mode, "coordinate_transformation_mode": coordinates, "nearest_mode": rounding}
        node = h.make_node("Resize", ["x", "", "scales"], ["y"], **attributes)
        proto = network([node], OPEN, {"scales": np.float32([1, 1, factor, factor])})
        check(proto, image(8, 12), image(7, 5))


def test_resize_with_antialiasing_and_of_integers():
    node = h.make_node("Resize", ["x", "", "scales"], ["y"], mode="linear", antialias=1)
    check(network([node], OPEN, {"scales": np.float32([1, 1, 0.5, 2])}), image(8, 12))
    node = h.make_node("Resize", ["x", "", "scales"], ["y"], mode="nearest")
    check(network([node], OPEN, {"scales": np.float32([1, 1, 2, 2])}, dtype=T.INT32), image(8, 12, np.int32))


def test_resize_to_computed_sizes():
    """The sizes are twice those of the operand, as exporters of detectors write it."""
    nodes = [
        h.make_node("Shape", ["x"], ["s"]),
        h.make_node("Slice", ["s", "0", "2"], ["outer"]),
        h.make_node("Slice", ["s", "2", "4"], ["inner"]),
        h.make_node("Mul", ["inner", "2"], ["twice"]),
        h.make_node("Concat", ["outer", "twice"], ["sizes"], axis=0),
        h.make_node("Resize", ["x", "", "", "sizes"], ["y"], mode="nearest", nearest_mode="floor"),
    ]
    check(network(nodes, OPEN, {k: np.int64([k]) for k in "024"}), image(8, 12), image(3, 5))


@pytest.mark.parametrize(
    ("attributes", "scales", "reason"),
    [
        ({"mode": "linear", "coordinate_transformation_mode": "align_corners"}, 2.0, "the coordinates 'align_corners'"),
        ({"mode": "nearest"}, 1.5, "the factor 1.5"),
    ],
)
def test_a_resize_that_requires_static_sizes_says_so(attributes, scales, reason):
    node = h.make_node("Resize", ["x", "", "scales"], ["y"], name="up", **attributes)
    model = ml.from_onnx(network([node], OPEN, {"scales": np.float32([1, 1, scales, scales])}))
    with pytest.raises(ml.UnsupportedError) as caught:
        ml.compile(model, "numpy", inference=True)({"x": image(4, 4)})
    assert f"Resize with {reason} requires a static size, but it is height" in str(caught.value)
    assert "shapes={'INPUT': [...]}" in str(caught.value) and "node 'up' (Resize)" in str(caught.value)
    y = ml.compile(model, "numpy", inference=True, shapes={"x": [1, 2, 4, 4]})({"x": image(4, 4)})["y"]
    assert y.shape == (1, 2, int(4 * scales), int(4 * scales))


def test_squeeze_without_axes_keeps_open_axes_only_if_they_are_not_1():
    proto = network([h.make_node("Squeeze", ["x"], ["y"])], ["batch", 1, 4])
    x = rng.normal(size=(3, 1, 4)).astype(np.float32)
    check(proto, x, x[:2])
    model = ml.from_onnx(proto)
    with pytest.raises(ml.InputError, match="these sizes must satisfy 2 <= batch") as caught:
        ml.compile(model, "numpy", inference=True)({"x": x[:1]})
    assert "shapes={...}" in str(caught.value)
    assert ml.compile(model, "numpy", inference=True, shapes={"x": [1, 1, 4]})({"x": x[:1]})["y"].shape == (4,)


def branch(*nodes, result):
    return h.make_graph(list(nodes), "branch", [], [h.make_tensor_value_info(result, T.FLOAT, None)])


def squeezed_if_1(x="x", y="y", name=""):
    """Return the nodes that PyTorch writes for ``x.squeeze(1)``."""
    then = branch(h.make_node("Squeeze", [x, "axis"], [f"{y}a"]), result=f"{y}a")
    other = branch(h.make_node("Identity", [x], [f"{y}b"]), result=f"{y}b")
    return [
        h.make_node("Shape", [x], [f"{y}s"]),
        h.make_node("Gather", [f"{y}s", "axis0"], [f"{y}n"]),
        h.make_node("Equal", [f"{y}n", "one"], [f"{y}c"]),
        h.make_node("If", [f"{y}c"], [y], then_branch=then, else_branch=other, name=name),
    ]


AXES = {"axis": np.int64([1]), "axis0": np.int64(1), "one": np.int64(1)}


def test_branches_of_different_rank_by_an_open_size():
    """The condition is assumed to hold, and each call checks it."""
    proto = network(squeezed_if_1(), ["n", "m", 4], AXES)
    check(proto, rng.normal(size=(3, 1, 4)).astype(np.float32))
    with pytest.raises(ml.InputError, match="these sizes must satisfy .*m == "):
        ml.compile(ml.from_onnx(proto), "numpy", inference=True)({"x": np.ones((3, 2, 4), np.float32)})


def test_branches_of_different_rank_within_a_branch_name_the_remedy():
    inner = branch(*squeezed_if_1(y="z"), result="z")
    flat = branch(h.make_node("ReduceSum", ["x", "axis"], ["w"], keepdims=0), result="w")
    node = h.make_node("If", ["rate"], ["y"], then_branch=inner, else_branch=flat, name="rates")
    proto = network([node], ["n", "m", 4], AXES)
    proto.graph.input.append(h.make_tensor_value_info("rate", T.BOOL, []))
    with pytest.raises(ml.ShapeError) as caught:
        ml.compile(ml.from_onnx(proto), "numpy", inference=True)({"x": np.ones((3, 1, 4), np.float32), "rate": True})
    assert "ml.from_onnx(path, constants={'rate': ...})" in str(caught.value)
    model = ml.from_onnx(proto, constants={"rate": True})
    y = ml.compile(model, "numpy", inference=True)({"x": np.ones((3, 1, 4), np.float32)})["y"]
    assert y.shape == (3, 4)


def test_a_size_of_minus_1_is_open():
    proto = network([h.make_node("Relu", ["x"], ["y"])], [-1, 3])
    model = ml.from_onnx(proto)
    assert model.inputs_by_name["x"].declared_shape[0] == "x_0"
    assert ml.compile(model, "numpy", inference=True)({"x": np.ones((5, 3), np.float32)})["y"].shape == (5, 3)
