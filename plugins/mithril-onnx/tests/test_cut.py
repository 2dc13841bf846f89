"""Cut networks: the weights of ``outputs=[...]`` are those of the file, and train."""

import numpy as np
import onnx
import onnx.helper as h
import pytest
from onnx import numpy_helper

import mithril as ml

rng = np.random.default_rng(0)
SIZES = {"small": 8, "mapped": 64}  # 64 x 64 floats are 16 KiB, which stay in the file


def network(size):
    """Return a file of two layers and a head, and its weights by name."""
    weights = {f"w{n}": (rng.normal(size=(size, size)) / size**0.5).astype(np.float32) for n in range(3)}
    nodes = []
    for n, name in enumerate(weights):
        nodes.append(h.make_node("MatMul", [f"h{n}", name], [f"z{n}"]))
        nodes.append(h.make_node("Tanh", [f"z{n}"], [f"h{n + 1}"]))
    tensors = [numpy_helper.from_array(w, name) for name, w in weights.items()]
    x, y = h.make_tensor_value_info("h0", 1, ["n", size]), onnx.ValueInfoProto(name="h3")
    graph = h.make_graph(nodes, "g", [x], [y], tensors)
    return h.make_model(graph, opset_imports=[h.make_opsetid("", 20)]), weights


@pytest.mark.parametrize("form", ["path", "bytes", "proto"])
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_a_cut_network_has_the_weights_of_the_file(tmp_path, size, form):
    proto, weights = network(size)
    onnx.save(proto, tmp_path / "m.onnx")
    source = {"path": tmp_path / "m.onnx", "bytes": proto.SerializeToString(), "proto": proto}[form]
    compiled = ml.compile(ml.from_onnx(source, outputs=["h2", "z1", "h1"]), "numpy")
    assert set(compiled.params) == {"w0", "w1"}
    x = rng.normal(size=(3, size)).astype(np.float32)
    h1 = np.tanh(x @ weights["w0"])
    z1 = h1 @ weights["w1"]
    results = compiled({"h0": x})
    for name, expected in {"h1": h1, "z1": z1, "h2": np.tanh(z1)}.items():
        np.testing.assert_allclose(results[name], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_a_cut_network_is_fine_tuned(tmp_path, size):
    proto, weights = network(size)
    onnx.save(proto, tmp_path / "m.onnx")
    compiled = ml.compile(ml.from_onnx(tmp_path / "m.onnx", outputs=["z1"]), "numpy", shapes={"h0": [3, size]})
    x, dy = (rng.normal(size=(3, size)).astype(np.float32) for _ in range(2))
    _, gradients = compiled.evaluate(compiled.params, {"h0": x}, output_gradients={"z1": dy})
    h1 = np.tanh(x @ weights["w0"])
    np.testing.assert_allclose(gradients["w1"], h1.T @ dy, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(gradients["w0"], x.T @ ((1 - h1**2) * (dy @ weights["w1"].T)), rtol=1e-4, atol=1e-5)


def test_a_cut_keeps_statistics_and_sequences():
    """The running mean of a norm stays a state, and an output that is a sequence is one output for each element."""
    nodes = [
        h.make_node("BatchNormalization", ["x", "scale", "shift", "mean", "var"], ["b"], epsilon=0.0),
        h.make_node("SplitToSequence", ["b"], ["parts"], axis=1),
        h.make_node("SequenceLength", ["parts"], ["n"]),
    ]
    values = {"scale": [1, 2], "shift": [0, 1], "mean": [1, 1], "var": [1, 4]}
    tensors = [numpy_helper.from_array(np.asarray(v, np.float32), k) for k, v in values.items()]
    x = h.make_tensor_value_info("x", 1, ["n", 2])
    value_info = [h.make_tensor_sequence_value_info("parts", 1, None)]
    graph = h.make_graph(nodes, "g", [x], [onnx.ValueInfoProto(name="n")], tensors, value_info=value_info)
    proto = h.make_model(graph, opset_imports=[h.make_opsetid("", 20)])
    compiled = ml.compile(ml.from_onnx(proto, outputs=["parts"]), "numpy", inference=True)
    results = compiled({"x": np.asarray([[3, 5]], np.float32)})
    assert {name: np.asarray(y).tolist() for name, y in results.items()} == {"parts_0": [[2.0]], "parts_1": [[5.0]]}
    assert set(ml.compile(ml.from_onnx(proto, outputs=["b"]), "numpy").params) == {"scale", "shift"}
