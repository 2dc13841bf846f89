"""Building, checking and editing graphs."""

from __future__ import annotations

import re

import numpy as np
import pytest

from mithril import ops
from mithril.graph import (
    Builder,
    Graph,
    Input,
    Node,
    Origin,
    Output,
    Value,
    as_results,
    evaluate,
    iterate,
    structural_hash,
    structurally_equal,
    trace,
    verify,
)
from mithril.graph.dims import Dim, TensorType
from mithril.graph.dtypes import float32
from mithril.graph.errors import DTypeError, GraphError, MithrilError, OperationError, VerificationError
from mithril.graph.registry import operation
from mithril.ops import cond, equal, exp, neg, relu, sum, where


def small():
    with Builder() as b:
        x, w = b.input("x", (2, 3)), b.param("w", (3, 4), init="zeros")
        y = relu(x @ w) + 1.0
    return b.build({"y": y})


# -- building -----------------------------------------------------------------------------------------------------
def test_inputs_have_roles_and_outputs_names():
    graph = small()
    assert [(i.name, i.role) for i in graph.inputs] == [("x", "input"), ("w", "param")]
    assert graph.output_names == ("y",)
    assert graph.input("w").tags == {"init": "zeros"}
    assert [n.op.name for n in graph.nodes] == ["matmul", "relu", "constant", "add"]


def test_names_are_unique():
    with Builder() as b:
        x = b.input("x", (2,))
        result = [neg(x) for _ in range(3)]
        again = b.input("x", (2,))
    assert [v.name for v in (*result, again)] == ["neg", "neg_1", "neg_2", "x_1"]


@pytest.mark.parametrize(
    ("number", "dtype", "text"),
    [
        (2**31, "int32", "2147483648 is not a number of int32"),
        (-1, "uint8", "-1 is not a number of uint8"),
        (-129, "int8", "-129 is not a number of int8"),
        (10**400, "float32", "an integer of 1329 bits is not a number of float32"),
    ],
)
def test_a_number_outside_a_dtype_is_rejected(number, dtype, text):
    with Builder() as b, pytest.raises(DTypeError, match=text):
        b.input("x", (2,), dtype) + number


@pytest.mark.parametrize(
    ("number", "dtype"), [(2**31 - 1, "int32"), (-128, "int8"), (255, "uint8"), (2**64 - 1, "uint64")]
)
def test_the_largest_numbers_of_a_dtype_are_constants(number, dtype):
    with Builder() as b:
        graph = b.build({"y": b.constant(number, dtype) + b.input("x", (), dtype)})
    assert evaluate(graph, {"x": np.zeros((), dtype)})["y"] == number


def test_scalars_are_shared():
    with Builder() as b:
        x = b.input("x", (2,))
        y = (x + 1.0) * 1.0 - 2.0
    assert [n.op.name for n in b.build({"y": y}).nodes].count("constant") == 2


def test_constants_cannot_be_changed_from_outside():
    data = np.ones(3, np.float32)
    with Builder() as b:
        y = b.input("x", (3,)) + data
    data[:] = 7
    (constant,) = b.build({"y": y}).with_role("constant")
    assert constant.data.tolist() == [1, 1, 1]
    with pytest.raises(ValueError, match="read-only"):
        constant.data[0] = 5


def test_origin_and_tags_go_to_every_node():
    b = Builder()
    with b, b.at(Origin("encoder.0", "model.py", 3), {"phase": "forward"}):
        y = neg(b.input("x", (2,)))
    node = b.build({"y": y}).nodes[0]
    assert str(node.origin) == "layer 'encoder.0' at model.py:3"
    assert node.tags == {"phase": "forward"}


def test_errors_name_operation_operands_and_origin():
    b = Builder()
    with b, b.at(Origin("head", "model.py", 9)), pytest.raises(OperationError) as caught:
        b.input("x", (2, 3)) @ b.input("y", (4, 5))
    text = str(caught.value)
    for part in ("matmul", "f32[2, 3]", "f32[4, 5]", "layer 'head' at model.py:9"):
        assert part in text


def test_attributes_may_follow_the_operands():
    x = np.arange(6.0).reshape(2, 3)
    for call, expected in [
        (ops.sum(x, 0, True), ops.sum(x, axis=0, keepdims=True)),
        (ops.clip(x, 1, 4), np.clip(x, 1, 4)),
        (ops.reshape(x, (3, 2)), x.reshape(3, 2)),
        (ops.concat([x, x], 1), np.concatenate([x, x], 1)),
        (ops.stack((x, x), -1), np.stack((x, x), -1)),
        (ops.einsum("ij,kj->ik", x, x), x @ x.T),
        (ops.full((2,), 7.0), np.full(2, 7.0)),
        (ops.arange(5), np.arange(5)),
        (ops.arange(1, 5), np.arange(1, 5)),
        (ops.arange(0), np.arange(0)),
        (ops.arange(8, 2, -3), np.arange(8, 2, -3)),
    ]:
        np.testing.assert_array_equal(call, expected)
    builder = Builder()
    with builder:
        value = builder.input("x", (2, 3))
        assert value.sum(0).shape == (3,)
        assert value.softmax(0).shape == (2, 3)
        assert ops.concat([value, value], 0).shape == (4, 3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: ops.sum(x, 0, True, 1), "operation 'sum' takes 3 arguments, got 4\n  arguments: x, axis, keepdims"),
        (lambda x: ops.sum(x, 0, axis=1), "operation 'sum' got the argument 'axis' twice"),
        (lambda x: ops.take(x, x, indices=x), "operation 'take' got the argument 'indices' twice"),
        (lambda x: ops.concat([x, x], 0, axis=1), "operation 'concat' got the argument 'axis' twice"),
        (lambda x: ops.sum(x, x), "operation 'sum': attribute 'axis' cannot be array"),
        (lambda x: ops.arange(), "arange needs a bound"),
    ],
)
def test_the_errors_of_attributes_by_position_name_them(call, message):
    with pytest.raises(OperationError, match=re.escape(message)):
        call(np.ones((2, 3)))


def test_node_without_builder_is_rejected():
    x = Value("x", TensorType(float32, (2,)))
    with pytest.raises(GraphError, match="no graph is being built here"):
        neg(x)


def test_lookups():
    graph = small()
    matmul, relu_node = graph.nodes[0], graph.nodes[1]
    assert graph.producers[matmul.result] is matmul
    assert graph.users[matmul.result] == (relu_node,)
    assert graph.by_name["w"] is graph.inputs[1].value
    with pytest.raises(KeyError):
        graph.input("q")


def test_tensors_compare_by_element_while_a_graph_is_built():
    """Select by the comparison: one that were False would select the other branch of where() in silence."""

    def body(x):
        return where(x == 0.0, 5.0, where(x != 1.0, x * 2.0, 7.0)), equal(1.0 == x, np.array([1.0]) == x)

    graph = trace(body, [TensorType(float32, (3,))])
    first, second = evaluate(graph, {"x0": np.array([0, 1, 2], np.float32)}).values()
    np.testing.assert_array_equal(first, [5, 7, 4])
    np.testing.assert_array_equal(second, [True, True, True])
    with Builder() as b:
        x, y = b.input("x", (2,)), b.input("y", (2,))
        assert (x == None, x != None) == (False, True)  # noqa: E711
        assert x in {x} and x in [x] and x not in {y}
        with pytest.raises(TypeError, match="`is` compares"):
            bool(x == y)
    assert b.nodes.pop().op is equal and not b.nodes
    assert (x == y, x != y, [y, x].index(x)) == (False, True, 1)


def test_symbolic_tensors_have_no_truth_value_and_cannot_be_iterated():
    with Builder() as b:
        x = b.input("x", (2,))
    with pytest.raises(TypeError, match="no truth value"):
        bool(x)
    with pytest.raises(TypeError, match="cannot be iterated"):
        list(x)


def test_regions_are_walked_without_recursion():
    def nest(x, depth):
        return x if not depth else cond(sum(x) > 0.0, lambda: nest(x * 2.0, depth - 1), lambda: x)

    with Builder() as b:
        y = nest(b.input("x", (2,)), 5)
    graph = b.build({"y": y})
    assert [n.op.name for n, _ in iterate(graph)].count("if") == 5


# -- equality -----------------------------------------------------------------------------------------------------
def test_structural_hash_ignores_inner_names():
    def build(name):
        with Builder() as b:
            x = b.input("x", (2,))
            b.unique("neg")
            y = exp(neg(x)) if name else exp(operation("neg")(x))
        return b.build({"y": y})

    assert structurally_equal(build(True), build(False))


@pytest.mark.parametrize(
    ("left", "right"),
    [(0.0, -0.0), (1.0, 1.0 + 1e-7), (float("nan"), 0.0), (2, 3)],
)
def test_structural_hash_depends_on_constants(left, right):
    def build(number):
        with Builder() as b:
            x = b.input("x", (2,), "float64" if isinstance(number, float) else "int32")
            y = x * number
        return b.build({"y": y})

    assert not structurally_equal(build(left), build(right))
    assert structurally_equal(build(left), build(left))


def test_structural_hash_depends_on_attributes_operands_and_types():
    def build(write, shape=(2, 3)):
        with Builder() as b:
            y = write(b.input("x", shape), b.input("z", shape))
        return structural_hash(b.build({"y": y}))

    result = [
        build(lambda x, z: sum(x, axis=0)),
        build(lambda x, z: sum(x, axis=1)),
        build(lambda x, z: sum(z, axis=0)),
        build(lambda x, z: sum(x, axis=0), (2, 4)),
        build(lambda x, z: sum(x, axis=0, keepdims=True)),
    ]
    assert len(set(result)) == len(result)


# -- the verifier -------------------------------------------------------------------------------------------------
def broken(graph, **changes):
    return graph.replaced(**changes)


def test_valid_graph_is_returned():
    graph = small()
    assert verify(graph) is graph


def test_use_before_definition_is_rejected():
    graph = small()
    with pytest.raises(VerificationError, match=r"operand %matmul of 'relu' is used before it is defined") as caught:
        verify(broken(graph, nodes=(graph.nodes[1], graph.nodes[0], *graph.nodes[2:])))
    assert "> %relu: f32[2, 4] = relu(%matmul)" in str(caught.value)


def test_value_defined_twice_is_rejected():
    graph = small()
    with pytest.raises(VerificationError, match="%matmul is defined twice"):
        verify(broken(graph, nodes=(graph.nodes[0], *graph.nodes)))


def test_wrong_result_type_is_rejected():
    graph = small()
    node = graph.nodes[1]
    wrong = node.replaced(results=(Value("relu", TensorType(float32, (9,))),))
    with pytest.raises(VerificationError, match=r"%relu has type f32\[9\], but 'relu' returns f32\[2, 4\]"):
        verify(broken(graph, nodes=(graph.nodes[0], wrong), results=(Output(wrong.result, "y"),)))


def test_mismatched_operands_are_rejected():
    graph = small()
    node = graph.nodes[0]
    wrong = node.replaced(operands=(node.operands[1], node.operands[0]))
    with pytest.raises(VerificationError, match="'matmul' does not accept its operands"):
        verify(broken(graph, nodes=(wrong, *graph.nodes[1:])))


def test_outputs_must_exist_and_have_distinct_names():
    graph = small()
    with pytest.raises(VerificationError, match="which is not defined"):
        verify(broken(graph, results=(Output(Value("q", TensorType(float32, ())), "y"),)))
    with pytest.raises(VerificationError, match="output names must be unique"):
        verify(broken(graph, results=graph.results * 2))


def test_invalid_inputs_are_rejected():
    x = Value("x", TensorType(float32, (2,)))
    with pytest.raises(VerificationError, match="unknown role 'weight'"):
        verify(Graph((Input(x, "weight"),), (), as_results(x)))
    with pytest.raises(VerificationError, match="constants, and only they, have data"):
        verify(Graph((Input(x, "constant"),), (), as_results(x)))
    for data, shown in ((np.zeros(2), r"float64\[2\]"), (np.zeros(3, np.float32), r"float32\[3\]")):
        with pytest.raises(VerificationError, match=rf"holds {shown}, but its type is f32\[2\]"):
            verify(Graph((Input(x, "constant", data),), (), as_results(x)))
    with pytest.raises(VerificationError, match="two inputs are named 'x'"):
        verify(Graph((Input(x), Input(Value("x", x.type))), (), as_results(x)))


def test_errors_inside_a_region_are_found():
    with Builder() as b:
        x = b.input("x", (2,))
        y = cond(sum(x) > 0.0, lambda: neg(x), lambda: x)
    graph = b.build({"y": y})
    node = graph.nodes[-1]
    region = node.regions[0]
    bad = region.replaced(nodes=())
    with pytest.raises(VerificationError, match="which is not defined"):
        verify(graph.replaced(nodes=(*graph.nodes[:-1], node.replaced(regions=(bad, node.regions[1])))))


# -- the editor ---------------------------------------------------------------------------------------------------
def test_unchanged_graph_is_returned_unchanged():
    graph = small()
    assert graph.edit().freeze() is graph


def test_values_are_replaced_everywhere():
    graph = small()
    editor = graph.edit()
    relu_node = graph.nodes[1]
    touched = editor.replace_value(relu_node.result, relu_node.operands[0])
    assert [n.op.name for n in touched] == ["add"]
    editor.erase_dead(relu_node)
    result = verify(editor.freeze())
    assert [n.op.name for n in result.nodes] == ["matmul", "constant", "add"]
    assert [n.op.name for n in graph.nodes] == ["matmul", "relu", "constant", "add"]  # the old graph is unchanged


def test_values_of_another_type_are_rejected():
    graph = small()
    editor = graph.edit()
    with editor.before(graph.nodes[1]):
        column = sum(graph.nodes[0].result, axis=(1,), keepdims=True)
    with pytest.raises(GraphError, match=r"cannot replace %relu: f32\[2, 4\] by %sum: f32\[2, 1\]: the types differ"):
        editor.replace_value(graph.nodes[1].result, column)


def test_outputs_are_replaced_too():
    graph = small()
    editor = graph.edit()
    editor.replace_value(graph.outputs[0], graph.nodes[0].result)
    result = verify(editor.freeze())
    assert result.outputs == (graph.nodes[0].result,)
    assert result.output_names == ("y",)


def test_nodes_are_inserted_before_others():
    graph = small()
    editor = graph.edit()
    node = graph.nodes[1]
    with editor.before(node) as b:
        ones = b.constant(np.ones(4, np.float32))
        new = exp(node.operands[0]) * ones
    assert editor.data_of(ones).tolist() == [1, 1, 1, 1]
    assert len(editor.freeze().nodes) == 6  # an insertion is a change
    editor.replace_value(node.result, new)
    editor.erase_dead(node)
    result = verify(editor.freeze())
    assert [n.op.name for n in result.nodes] == ["matmul", "exp", "mul", "constant", "add"]
    assert len(result.with_role("constant")) == 1


def test_failed_insertion_leaves_graph_unchanged():
    graph = small()
    editor = graph.edit()
    with pytest.raises(OperationError), editor.before(graph.nodes[1]):
        exp(graph.nodes[0].result)
        graph.nodes[0].result @ graph.nodes[0].result
    assert editor.freeze() is graph


def test_used_nodes_cannot_be_erased():
    graph = small()
    with pytest.raises(GraphError, match="%matmul is still used"):
        graph.edit().erase(graph.nodes[0])


def test_dead_chain_is_erased():
    with Builder() as b:
        x = b.input("x", (2,))
        last = exp(neg(exp(neg(x))))
        y = relu(x)
    graph = b.build({"y": y})
    editor = graph.edit()
    editor.erase_dead(graph.producers[last])
    assert [n.op.name for n in editor.freeze().nodes] == ["relu"]


def test_a_node_erased_ahead_is_not_visited():
    with Builder() as b:
        x = b.input("x", (2,))
        exp(x), neg(x)
        y = relu(x)
    graph = b.build({"y": y})
    editor = graph.edit()
    visited = []
    for node in editor.nodes():
        visited.append(node.op.name)
        if node.op is exp:
            editor.erase(graph.nodes[1])
    assert visited == ["exp", "relu"]


def test_use_counts_follow_edits():
    graph = small()
    editor = graph.edit()
    value = graph.nodes[0].result
    assert (editor.use_count(value), editor.is_output(value)) == (1, False)
    assert editor.users(value) == [graph.nodes[1]]
    editor.replace_value(graph.outputs[0], value)
    assert (editor.use_count(value), editor.is_output(value)) == (2, True)


def test_erased_node_is_rejected():
    graph = small()
    editor = graph.edit()
    node = graph.nodes[3]
    editor.replace_value(node.result, graph.nodes[0].result)
    editor.erase(node)
    with pytest.raises(GraphError, match="no longer in the graph"):
        editor.replace_node(node, node)


def test_symbolic_sizes_are_printed():
    with Builder() as b:
        x = b.input("x", (Dim("B", 1, 8), 3))
        y = sum(x, axis=1)
    assert repr(y) == "%sum: f32[B]"
    assert isinstance(b.build({"y": y}).nodes[0], Node)


# -- sizes of inputs -------------------------------------------------------------------------------------------------
def test_text_sizes_of_inputs_are_symbols():
    with Builder() as b:
        x = b.input("x", ("B", 3, "2*B"))
        w = b.param("w", (np.int64(3), 4))
    assert x.type == TensorType(float32, (Dim("B"), 3, 2 * Dim("B")))
    assert type(w.type.shape[0]) is int


@pytest.mark.parametrize("size", [2.0, True, None, -1, "B?", "", (2,)])
def test_invalid_size_of_an_input(size):
    with pytest.raises(MithrilError, match="size"), Builder() as b:
        b.input("x", (size, 3))


def test_a_node_shows_results_and_operands():
    assert [repr(n) for n in small().nodes][:2] == ["%matmul = matmul(%x, %w)", "%relu = relu(%matmul)"]


def test_the_cost_of_open_sizes_is_a_size():
    types = [TensorType(float32, (Dim("B"), 4))]
    assert str(exp.declared_flops(types, types, {})) == "48*B"
    assert exp.declared_flops(types, [TensorType(float32, (2, 4))], {}) == 96
