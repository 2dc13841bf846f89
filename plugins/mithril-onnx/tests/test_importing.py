"""Imported models: names, roles of tensors, open sizes, errors, cuts, fixed inputs, versions."""

from dataclasses import replace

import numpy as np
import onnx
import onnx.helper as h
import pytest
from click.testing import CliRunner
from onnx import TensorProto as T

import mithril as ml
from mithril import ops
from mithril_importing.table import Signature
from mithril_onnx.table import KINDS, OPERATORS
from mithril_tools import cli

pytestmark = pytest.mark.filterwarnings("ignore")
rng = np.random.default_rng(0)


def const(array, name):
    return onnx.numpy_helper.from_array(np.asarray(array), name)


def model(nodes, inputs, outputs, initializers=(), opset=20, **options):
    """Return a model; ``inputs`` are (name, shape) or (name, shape, type), ``outputs`` names."""
    declared = [h.make_tensor_value_info(i[0], i[2] if len(i) > 2 else T.FLOAT, i[1]) for i in inputs]
    graph = h.make_graph(nodes, "g", declared, [onnx.ValueInfoProto(name=n) for n in outputs], list(initializers))
    return h.make_model(graph, opset_imports=[h.make_opsetid("", opset)], **options)


def run(proto, feeds, **options):
    results = ml.compile(ml.from_onnx(proto, **options), "numpy", inference=True)(feeds)
    return {n: np.asarray(y) for n, y in results.items()}


W = rng.normal(size=(4, 8)).astype(np.float32)
B = rng.normal(size=8).astype(np.float32)


def two_layers():
    nodes = [
        h.make_node("MatMul", ["x", "/encoder/dense::weight 0"], ["h"], name="/encoder/MatMul"),
        h.make_node("Add", ["h", "encoder.bias"], ["a"]),
        h.make_node("Relu", ["a"], ["y"]),
    ]
    tensors = [const(W, "/encoder/dense::weight 0"), const(B, "encoder.bias")]
    return model(nodes, [("x", ["batch", 4])], ["y"], tensors)


def test_names_shapes_and_numbers():
    imported = ml.from_onnx(two_layers())
    assert imported.inputs == ("x",)
    assert imported.inputs_by_name["x"].declared_shape == ("batch", 4)
    compiled = ml.compile(imported, "numpy")
    for rows in (1, 3):
        x = rng.normal(size=(rows, 4)).astype(np.float32)
        np.testing.assert_allclose(np.asarray(compiled({"x": x})["y"]), np.maximum(x @ W + B, 0), rtol=1e-5)
    assert set(compiled.params) == {"encoder_dense_weight_0", "encoder.bias"}


def test_names_that_become_equal_are_numbered():
    nodes = [h.make_node("Add", ["in put", "a b"], ["t"]), h.make_node("Add", ["t", "a:b"], ["in.put"])]
    tensors = [const(B, "a b"), const(2 * B, "a:b")]
    imported = ml.from_onnx(model(nodes, [("in put", [8])], ["in.put"], tensors))
    assert imported.inputs == ("in_put",)
    assert imported.outputs == ("in_put_2",)
    compiled = ml.compile(imported, "numpy")
    np.testing.assert_allclose(np.asarray(compiled({"in_put": B})["in_put_2"]), 4 * B, rtol=1e-6)
    assert set(compiled.params) == {"a_b", "a_b_2"}


def test_an_imported_model_is_a_block():
    outer = ml.Model()
    outer |= ml.from_onnx(two_layers())(x="features", y="hidden")
    outer |= ml.models.Linear(2)(input="hidden", output="logits")
    compiled = ml.compile(outer, "numpy", shapes={"features": [3, 4]})
    params = compiled.randomize_params(0)
    inner = [name for name in params if name.endswith("encoder.bias")]
    np.testing.assert_array_equal(np.asarray(params[inner[0]]), B)
    assert compiled.bind(params)({"features": np.ones((3, 4), np.float32)})["logits"].shape == (3, 2)


def test_norms_of_zero_have_the_gradient_zero():
    proto = model([h.make_node("ReduceL2", ["x"], ["y"], keepdims=0, axes=[1])], [("x", [2, 2])], ["y"], opset=13)
    derivative = ml.compile(ml.vjp(ml.from_onnx(proto), ("y",), ("x",)), "numpy")
    x = np.array([[0, 0], [3, -4]], np.float32)
    results = derivative({"x": x, "grad/y": np.ones(2, np.float32)})
    np.testing.assert_allclose(results["grad/x"], [[0, 0], [0.6, -0.8]], rtol=1e-6)


def test_training_changes_the_parameters_of_the_file():
    compiled = ml.compile(ml.from_onnx(two_layers()), "numpy", shapes={"x": [3, 4]})
    x = rng.normal(size=(3, 4)).astype(np.float32)
    _, gradients = compiled.evaluate(compiled.params, {"x": x}, output_gradients={"y": np.ones((3, 8), np.float32)})
    expected = x.T @ (x @ W + B > 0).astype(np.float32)
    np.testing.assert_allclose(np.asarray(gradients["encoder_dense_weight_0"]), expected, rtol=1e-5)


def test_sizes_are_computed_at_import():
    """The usual reshape of exporters: Shape, Gather, Concat, Reshape."""
    nodes = [
        h.make_node("Shape", ["x"], ["s"]),
        h.make_node("Gather", ["s", "zero"], ["n"]),
        h.make_node("Unsqueeze", ["n", "axes"], ["n1"]),
        h.make_node("Concat", ["n1", "rest"], ["t"], axis=0),
        h.make_node("Reshape", ["x", "t"], ["y"]),
        h.make_node("Mul", ["n", "two"], ["m"]),
    ]
    ints = {"zero": 0, "axes": [0], "rest": [2, -1], "two": 2}
    tensors = [const(np.asarray(v, np.int64), k) for k, v in ints.items()]
    proto = model(nodes, [("x", ["n", 6])], ["y", "m"], tensors)
    compiled = ml.compile(ml.from_onnx(proto), "numpy", inference=True)
    for n in (1, 5):
        out = compiled({"x": np.ones((n, 6), np.float32)})
        assert out["y"].shape == (n, 2, 3)
        assert np.asarray(out["m"]) == 2 * n and np.asarray(out["m"]).dtype == np.int64


def test_all_unsupported_operators_are_reported():
    nodes = [
        h.make_node("StringConcat", ["x", "x"], ["a"], name="/text/Concat"),
        *(h.make_node("Fancy", ["x"], [f"b{k}"], name=f"/head/Fancy_{k}", domain="acme") for k in range(4)),
        h.make_node("Relu", ["x"], ["y"]),
    ]
    proto = model(nodes, [("x", [2])], ["y", "a"])
    with pytest.raises(ml.UnsupportedError) as error:
        ml.from_onnx(proto)
    text = str(error.value)
    assert "2 operators have no meaning here" in text
    assert "StringConcat, once: /text/Concat (strings)" in text
    assert "acme.Fancy, 4 times, first: /head/Fancy_0" in text
    x = np.asarray([-1, 2], np.float32)
    np.testing.assert_array_equal(run(proto, {"x": x}, outputs=["y"])["y"], [0, 2])


def test_a_user_supplies_an_operator():
    node = h.make_node("Fancy", ["x"], ["y"], domain="acme", factor=3.0)
    proto = model([node], [("x", [2])], ["y"])
    x = np.asarray([1, 2], np.float32)
    supplied = {"acme.Fancy": lambda x, *, factor: ops.exp(x) * factor}
    np.testing.assert_allclose(run(proto, {"x": x}, operators=supplied)["y"], 3 * np.exp(x), rtol=1e-6)


def test_an_input_that_must_be_known_is_named_and_fixed():
    node = h.make_node("ReduceSum", ["x", "axes"], ["y"])
    proto = model([node], [("x", [2, 3]), ("axes", [1], T.INT64)], ["y"])
    x = np.ones((2, 3), np.float32)
    with pytest.raises(ml.UnsupportedError, match="axes") as error:
        run(proto, {"x": x, "axes": np.asarray([1])})
    assert "constants={'axes': ...}" in str(error.value)
    np.testing.assert_array_equal(run(proto, {"x": x}, constants={"axes": [1]})["y"], [[3], [3]])


def test_inputs_that_are_also_initializers_are_constants_unless_listed():
    proto = model([h.make_node("Add", ["x", "b"], ["y"])], [("x", [8]), ("b", [8])], ["y"], [const(B, "b")])
    assert ml.from_onnx(proto).inputs == ("x",)
    assert ml.from_onnx(proto, inputs=["b"]).inputs == ("x", "b")


def test_a_loop_with_a_condition_of_data():
    body = h.make_graph(
        [
            h.make_node("Add", ["v", "v"], ["w"]),
            h.make_node("ReduceMax", ["w"], ["m"], keepdims=0),
            h.make_node("Less", ["m", "limit"], ["again"]),
        ],
        "body",
        [
            h.make_tensor_value_info("k", T.INT64, []),
            h.make_tensor_value_info("c", T.BOOL, []),
            h.make_tensor_value_info("v", 1, [2]),
        ],
        [h.make_tensor_value_info("again", T.BOOL, []), h.make_tensor_value_info("w", 1, [2])],
    )
    nodes = [h.make_node("Loop", ["", "start", "x"], ["y"], body=body)]
    proto = model(nodes, [("x", [2])], ["y"], [const(np.float32(50), "limit"), const(np.asarray(True), "start")])
    np.testing.assert_array_equal(run(proto, {"x": np.asarray([1, 3], np.float32)})["y"], [32, 96])


def test_float16_weights_stay_float16():
    proto = model(
        [h.make_node("Mul", ["x", "w"], ["y"])], [("x", [8], T.FLOAT16)], ["y"], [const(B.astype(np.float16), "w")]
    )
    compiled = ml.compile(ml.from_onnx(proto), "numpy")
    assert compiled({"x": np.ones(8, np.float16)})["y"].dtype == np.float16
    assert compiled.params["w"].dtype == np.float16


@pytest.mark.parametrize("opset", [7, 9, 11, 12])
def test_older_opsets(opset):
    """Attributes that became operands later: Squeeze, Clip, Slice, Pad."""
    attributes = opset < 10
    tensors = (
        [] if attributes else [const(np.asarray(v, np.int64), k) for k, v in {"b": [0], "e": [2], "a": [1]}.items()]
    )
    nodes = [
        h.make_node("Clip", ["x"], ["c"], min=-1.0, max=1.0)
        if opset < 11
        else h.make_node("Clip", ["x", "lo", "hi"], ["c"]),
        h.make_node("Slice", ["c"], ["s"], starts=[0], ends=[2], axes=[1])
        if attributes
        else h.make_node("Slice", ["c", "b", "e", "a"], ["s"]),
        h.make_node("Unsqueeze", ["s"], ["u"], axes=[0]),
        h.make_node("Squeeze", ["u"], ["q"], axes=[0]),
        h.make_node("Softmax", ["q"], ["y"], axis=0),
    ]
    if opset >= 11:
        tensors += [const(np.float32(-1), "lo"), const(np.float32(1), "hi")]
    x = rng.normal(size=(2, 3)).astype(np.float32) * 2
    part = np.clip(x, -1, 1)[:, :2]
    expected = np.exp(part) / np.exp(part).sum()  # before opset 13, softmax flattens
    np.testing.assert_allclose(
        run(model(nodes, [("x", [2, 3])], ["y"], tensors, opset), {"x": x})["y"], expected, rtol=1e-5
    )


def test_statistics_of_batch_norm_are_states():
    tensors = [const(np.ones(3, np.float32), n) for n in ("scale", "var")] + [
        const(np.zeros(3, np.float32), n) for n in ("b", "mean")
    ]
    node = h.make_node("BatchNormalization", ["x", "scale", "b", "mean", "var"], ["y"], momentum=0.5)
    compiled = ml.compile(ml.from_onnx(model([node], [("x", ["n", 3, 2, 2])], ["y"], tensors)), "numpy")
    x = np.full((2, 3, 2, 2), 4.0, np.float32)
    np.testing.assert_allclose(np.asarray(compiled({"x": x})["y"]), x, rtol=1e-4)
    assert set(compiled.initial_state()) == {"mean", "var"}
    assert set(compiled.params) == {"scale", "b"}


def test_a_model_is_loaded_and_compiled_from_its_path(tmp_path):
    onnx.save(two_layers(), tmp_path / "m.onnx")
    x = np.ones((2, 4), np.float32)
    expected = np.maximum(x @ W + B, 0)
    np.testing.assert_allclose(
        np.asarray(ml.load(tmp_path / "m.onnx", backend="numpy")({"x": x})["y"]), expected, rtol=1e-5
    )
    np.testing.assert_allclose(np.asarray(ml.compile(two_layers(), "numpy")({"x": x})["y"]), expected, rtol=1e-5)
    by_path = ml.compile(str(tmp_path / "m.onnx"), "numpy", inference=True)
    np.testing.assert_allclose(np.asarray(by_path({"x": x})["y"]), expected, rtol=1e-5)


def test_paths_that_cannot_be_compiled_are_errors_with_a_remedy(tmp_path):
    (tmp_path / "m.h5").write_bytes(b"")
    with pytest.raises(ml.MithrilError, match="there is no file '.*missing.onnx'"):
        ml.compile(tmp_path / "missing.onnx", "numpy")
    with pytest.raises(ml.MithrilError, match="rename the file") as unknown_suffix:
        ml.compile(tmp_path / "m.h5", "numpy")
    assert "onnx: .onnx" in str(unknown_suffix.value)
    with pytest.raises(ml.MithrilError, match=r"ml\.from_pretrained\("):
        ml.compile(tmp_path, "numpy")


def test_a_broken_operator_is_named_with_both_values(monkeypatch, tmp_path):
    proto, path, code = two_layers(), tmp_path / "two.onnx", tmp_path / "two_layers.py"
    onnx.save(proto, path)
    code.write_text(f"import mithril as ml\n\nmodel = ml.from_onnx({str(path)!r})\n")
    command = ["diff", f"{code}:model", "--source", str(path), "--shape", "x=2,4", "--backends", "numpy"]
    agreed = CliRunner().invoke(cli.main, command)
    assert agreed.exit_code == 0 and "everything agrees" in agreed.output
    relu = OPERATORS.find("", "Relu", 20)
    monkeypatch.setattr(
        OPERATORS, "_rows", {**OPERATORS._rows, ("", "Relu"): [replace(relu, signature=Signature.of(ops.gelu, KINDS))]}
    )
    broken = CliRunner().invoke(cli.main, command)
    assert broken.exit_code == 1 and "node 'y' of the source: %y = gelu" in broken.output
    monkeypatch.setattr("mithril_onnx.running.find_spec", lambda name: None)  # by the evaluator of onnx
    first = ml.verify(ml.from_onnx(proto), proto, {"x": np.ones((2, 4), np.float32)}).first
    _, expected, actual = first.largest
    assert expected > actual
