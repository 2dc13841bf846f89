"""Sizes that depend on data: a bound on the rows of results, and samples by the size of a box."""

import numpy as np
import onnx
import onnx.helper as h
import pytest
from onnx import numpy_helper

import mithril as ml
from mithril_onnx.node_tests import cases

SELECTIONS = [c for c in cases() if c.name.startswith("test_nonmaxsuppression")]


@pytest.mark.parametrize("case", SELECTIONS, ids=lambda c: c.name.removeprefix("test_nonmaxsuppression_"))
def test_rows_are_those_of_the_standard(case):
    ((arrays, (expected,)),) = case.data_sets if hasattr(case, "data_sets") else [(case.inputs, case.outputs)]
    names = [i.name for i in case.model.graph.input]
    inputs = dict(zip(names, arrays, strict=True))
    fixed = {n: inputs.pop(n) for n in names[2:]}
    model = ml.from_onnx(case.model, constants=fixed, bounds={"NonMaxSuppression": 7})
    results = ml.compile(model, "numpy", inference=True)(inputs)
    rows, number = results.values()
    assert [*results] == ["selected_indices", "selected_indices_rows"] and int(number) == len(expected)
    np.testing.assert_array_equal(rows[: len(expected)], expected)
    assert (rows[len(expected) :] == -1).all() and rows.shape == (7, 3)


def detector(*tail, outputs):
    """Return a model that selects boxes, as exporters write it, and the nodes that follow."""
    numbers = {"limit": np.int64(4), "overlap": np.float32(0.4), "lowest": np.float32(0.2)}
    constants = {**{n: np.asarray([v]) for n, v in numbers.items()}, "column": np.asarray(2), "axes": np.asarray([0])}
    constants |= {"last": np.asarray([-1]), "first": np.asarray([-100])}  # of slices
    nodes = [
        h.make_node("NonMaxSuppression", ["boxes", "scores", "limit", "overlap", "lowest"], ["rows"], name="select"),
        h.make_node("Gather", ["rows", "column"], ["index"], axis=1),
        h.make_node("Squeeze", ["boxes", "axes"], ["table"]),
        h.make_node("Gather", ["table", "index"], ["chosen"]),
        h.make_node("Mul", ["chosen", "overlap"], ["scaled"]),
        *tail,
    ]
    declared = [h.make_tensor_value_info("boxes", 1, [1, 9, 4]), h.make_tensor_value_info("scores", 1, [1, 2, 9])]
    tensors = [numpy_helper.from_array(v, n) for n, v in constants.items()]
    graph = h.make_graph(nodes, "g", declared, [onnx.ValueInfoProto(name=n) for n in outputs], tensors)
    return h.make_model(graph, opset_imports=[h.make_opsetid("", 20)])


def arrays():
    rng = np.random.default_rng(3)
    corners = rng.uniform(0, 4, (1, 9, 2))
    boxes = np.concatenate([corners, corners + rng.uniform(1, 3, (1, 9, 2))], -1)
    return {"boxes": boxes.astype(np.float32), "scores": rng.uniform(size=(1, 2, 9)).astype(np.float32)}


@pytest.mark.parametrize("bounds", [{"select": 8}, {"NonMaxSuppression": 3}])
def test_gathered_boxes(bounds):
    onnxruntime = pytest.importorskip("onnxruntime")
    model, inputs = detector(outputs=["scaled", "rows"]), arrays()
    session = onnxruntime.InferenceSession(model.SerializeToString())
    scaled, rows = session.run(None, inputs)
    results = ml.compile(ml.from_onnx(model, bounds=bounds), "numpy", inference=True)(inputs)
    size = min(len(rows), *bounds.values())
    assert int(results["rows_rows"]) == len(rows) > 3, "the number tells whether rows are missing"
    np.testing.assert_array_equal(results["rows"][:size], rows[:size])
    np.testing.assert_allclose(results["scaled"][:size], scaled[:size], rtol=1e-6)


@pytest.mark.parametrize(
    "tail",
    [
        [h.make_node("ReduceMax", ["scaled"], ["y"])],
        [h.make_node("Shape", ["scaled"], ["y"])],
        [h.make_node("Softmax", ["index_float"], ["y"], axis=0)],
        [h.make_node("Concat", ["scaled", "scaled"], ["y"], axis=0)],
        [h.make_node("Gather", ["scaled", "limit"], ["y"])],
        [h.make_node("Slice", ["scaled", "last", "first", "axes", "last"], ["y"])],
        [h.make_node("NonZero", ["scaled"], ["y"])],
    ],
    ids=lambda tail: tail[0].op_type,
)
def test_operators_that_would_read_padding_are_refused(tail):
    tail = [h.make_node("Cast", ["index"], ["index_float"], to=1), *tail]
    bounds = {"select": 8, **{n.op_type: 4 for n in tail if n.op_type == "NonZero"}}
    with pytest.raises(ml.UnsupportedError, match=f"'{tail[1].op_type}' combines the rows of 'NonMaxSuppression'"):
        ml.compile(ml.from_onnx(detector(*tail, outputs=["y"]), bounds=bounds), "numpy", inference=True)


def test_slices_that_leave_the_rows_in_place():
    tail = [h.make_node("Slice", ["scaled", "last", "first", "last", "last"], ["y"])]
    model = ml.from_onnx(detector(*tail, outputs=["y", "scaled"]), bounds={"select": 8})
    results = ml.compile(model, "numpy", inference=True)(arrays())
    np.testing.assert_array_equal(results["y"], results["scaled"][:, ::-1])


def test_no_box_is_selected_without_a_limit():
    """Select no box by the standard's default of max_output_boxes_per_class, which is 0."""
    model = detector(outputs=["rows"])
    model.graph.node[0].input[2] = ""
    results = ml.compile(ml.from_onnx(model, bounds={"select": 3}), "numpy", inference=True)(arrays())
    assert int(results["rows_rows"]) == 0 and results["rows"].tolist() == [[-1, -1, -1]] * 3


def test_positions_that_are_not_zero():
    nodes = [
        h.make_node("NonZero", ["x"], ["p"]),
        h.make_node("Transpose", ["p"], ["rows"], perm=[1, 0]),
        h.make_node("GatherND", ["x", "rows"], ["y"]),
    ]
    x = h.make_tensor_value_info("x", 1, ["n", 3])
    graph = h.make_graph(nodes, "g", [x], [onnx.ValueInfoProto(name=n) for n in ("p", "y")])
    model = h.make_model(graph, opset_imports=[h.make_opsetid("", 20)])
    with pytest.raises(ml.UnsupportedError, match="must be known at import"):
        ml.compile(ml.from_onnx(model), "numpy", inference=True)({"x": np.eye(3, dtype=np.float32)})
    compiled = ml.compile(ml.from_onnx(model, bounds={"NonZero": 5}), "numpy", inference=True)
    array = np.asarray([[0, 0.5, 0], [3, 0, 2**32]], np.float32)
    p, y, number = compiled({"x": array}).values()
    assert int(number) == 3 and p.shape == (2, 5)
    np.testing.assert_array_equal(p[:, :3], np.nonzero(array))
    np.testing.assert_array_equal(y[:3], [0.5, 3, 2**32])


def test_bounds_without_a_result():
    with pytest.raises(ml.InputError, match="bounds names 'TopK'"):
        ml.from_onnx(detector(outputs=["rows"]), bounds={"TopK": 3})
    with pytest.raises(ml.InputError, match="must be a positive integer"):
        ml.from_onnx(detector(outputs=["rows"]), bounds={"select": 0})


@pytest.mark.parametrize("mode", ["avg", "max"])
@pytest.mark.parametrize("transformation", ["half_pixel", "output_half_pixel"])
def test_regions_with_samples_by_their_size(mode, transformation):
    """Take as many samples of a box as it covers pixels; one box is empty."""
    onnxruntime = pytest.importorskip("onnxruntime")
    settings = {"mode": mode, "coordinate_transformation_mode": transformation, "spatial_scale": 0.5}
    node = h.make_node("RoiAlign", ["x", "r", "b"], ["y"], output_height=3, output_width=2, **settings)
    declared = [
        h.make_tensor_value_info("x", 1, [2, 3, 9, 11]),
        h.make_tensor_value_info("r", 1, ["k", 4]),
        h.make_tensor_value_info("b", 7, ["k"]),
    ]
    graph = h.make_graph([node], "g", declared, [h.make_tensor_value_info("y", 1, None)])
    model = h.make_model(graph, opset_imports=[h.make_opsetid("", 16)], ir_version=8)
    rng = np.random.default_rng(0)
    corners = rng.uniform(-2, 14, (6, 2))
    boxes = np.concatenate([corners, corners + rng.uniform(0, 15, (6, 2))], 1).astype(np.float32)
    boxes[3, 2:] = boxes[3, :2]
    inputs = {"x": rng.normal(size=(2, 3, 9, 11)).astype(np.float32), "r": boxes, "b": rng.integers(0, 2, 6)}
    (expected,) = onnxruntime.InferenceSession(model.SerializeToString()).run(None, inputs)
    result = ml.compile(ml.from_onnx(model), "numpy", inference=True)(inputs)["y"]
    np.testing.assert_allclose(result, expected, atol=5e-6)
