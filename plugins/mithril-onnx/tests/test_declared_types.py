"""Each result of an imported node is compared with the type that the file declares for it."""

import numpy as np
import onnx.helper as h
import pytest
from onnx import TensorProto as T

import mithril as ml


def network(shape, inner, dtype=T.FLOAT, output=None):
    nodes = [h.make_node("Transpose", ["x"], ["t"], perm=[1, 0], name="turn"), h.make_node("Relu", ["t"], ["y"])]
    info = [h.make_tensor_value_info("t", dtype, inner)]
    x, y = h.make_tensor_value_info("x", T.FLOAT, shape), h.make_tensor_value_info("y", T.FLOAT, output)
    graph = h.make_graph(nodes, "g", [x], [y], value_info=info)
    return h.make_model(graph, opset_imports=[h.make_opsetid("", 18)])


def run(proto, **options):
    model = ml.from_onnx(proto, **options)
    return ml.compile(model, "numpy", inference=True)({"x": np.ones((2, 3), np.float32)})


@pytest.mark.parametrize(
    ("proto", "message"),
    [
        (network([2, 3], [2, 3]), "gives float32[3, 2] for 't'\n  the file declares float32[2, 3]"),
        (network(["n", 3], [3, "n", 1]), "gives float32[3, n] for 't'\n  the file declares float32[3, n, 1]"),
        (network([2, 3], [3, 2], T.FLOAT16), "the file declares float16[3, 2]"),
    ],
)
def test_a_difference_names_node_and_operator(proto, message):
    with pytest.raises(ml.MithrilError) as caught:
        run(proto)
    assert "node 'turn' (Transpose) of" in str(caught.value)
    assert message in str(caught.value)
    with pytest.raises(ml.MithrilError, match="node 'turn'"):
        run(proto, outputs=["t"])


def test_outputs_are_compared():
    with pytest.raises(ml.MithrilError, match="node 'y' \\(Relu\\) of 'g' gives float32\\[3, 2\\] for 'y'"):
        run(network([2, 3], None, output=[2, 3]))


def test_inner_sizes_of_one_example_are_accepted_where_inputs_are_open():
    """Scripts that open the batch of a file leave its other declarations unchanged."""
    assert run(network(["n", 3], [3, 1]))["y"].shape == (3, 2)
    assert run(network([2, 3], [3, "n"]))["y"].shape == (3, 2)
