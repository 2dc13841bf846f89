"""RNN, GRU and LSTM against onnxruntime: all forms, the products of the inputs outside of the loop, open sizes."""

import itertools

import numpy as np
import onnx.helper as h
import pytest
from onnx import numpy_helper

import mithril as ml

ort = pytest.importorskip("onnxruntime")

GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
INPUT, HIDDEN, TIME, BATCH = 3, 5, 4, 2


def network(kind, direction="forward", *, biases=True, states=None, open_batch=False, peepholes=False, **attributes):
    """Return a file with a recurrent operator; ``states`` is the batch of the constant first states."""
    rng = np.random.default_rng(0)
    directions, gates = 1 + (direction == "bidirectional"), GATES[kind]
    values = {"w": (directions, gates * HIDDEN, INPUT), "r": (directions, gates * HIDDEN, HIDDEN)}
    names = ["x", "w", "r", "", "", "", "", ""]
    if biases:
        values["b"] = (directions, 2 * gates * HIDDEN)
        names[3] = "b"
    if states is not None:
        values |= dict.fromkeys(("h", "c")[: 1 + (kind == "LSTM")], (directions, states, HIDDEN))
        names[5:7] = ["h", "c" if kind == "LSTM" else ""]
    if peepholes:
        values["p"] = (directions, 3 * HIDDEN)
        names[7] = "p"
    tensors = [numpy_helper.from_array(rng.normal(size=s).astype(np.float32), n) for n, s in values.items()]
    names = names[: 8 if kind == "LSTM" else 6]
    outputs = ["y", "last", "cell"][: 3 if kind == "LSTM" else 2]
    node = h.make_node(kind, names, outputs, direction=direction, hidden_size=HIDDEN, **attributes)
    x = h.make_tensor_value_info("x", 1, [TIME, "batch" if open_batch else BATCH, INPUT])
    graph = h.make_graph([node], "g", [x], [h.make_tensor_value_info(n, 1, None) for n in outputs], tensors)
    return h.make_model(graph, opset_imports=[h.make_opsetid("", 17)], ir_version=8)


def check(proto, batch=BATCH):
    x = np.random.default_rng(1).normal(size=(TIME, batch, INPUT)).astype(np.float32)
    expected = ort.InferenceSession(proto.SerializeToString()).run(None, {"x": x})
    results = ml.compile(ml.from_onnx(proto), "numpy", inference=True)({"x": x})
    for y, z in zip(results.values(), expected, strict=True):
        np.testing.assert_allclose(y, z, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", GATES)
def test_all_forms(kind):
    for direction, biases, states in itertools.product(
        ("forward", "reverse", "bidirectional"), (True, False), (None, BATCH)
    ):
        check(network(kind, direction, biases=biases, states=states))


def test_further_attributes():
    check(network("GRU", "bidirectional", linear_before_reset=1))
    check(network("GRU", biases=False, linear_before_reset=1))
    check(network("LSTM", "bidirectional", peepholes=True))
    check(network("LSTM", clip=0.5))


@pytest.mark.parametrize("kind", GATES)
def test_first_states_of_batch_1_have_the_open_batch_of_the_inputs(kind):
    check(network(kind, states=1, open_batch=True), batch=1)


@pytest.mark.parametrize("kind", GATES)
def test_a_loop_multiplies_only_its_states(kind):
    graph = ml.compile(ml.from_onnx(network(kind)), "numpy", inference=True).graph
    scan = next(node for node in graph.nodes if node.regions)
    shapes = [
        x.shape for n in scan.regions[0].nodes if n.op.name in ("matmul", "linear") for x in n.operands if x is not None
    ]
    assert shapes and all(INPUT not in shape for shape in shapes)
