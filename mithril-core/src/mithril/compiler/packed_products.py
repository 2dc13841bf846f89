"""Products that read the stored elements of a sparse matrix, in place of the dense matrix that they represent.

A value is *packed* if ``sparse_to_dense`` yields it. ``RULES`` has, for each operation that reads stored elements, the
function that computes its result from them. Other operations read the dense matrix, which is recorded. This happens
before the graph is differentiated: gradients are those of the sparse operations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

from mithril import ops
from mithril.backend import Backend
from mithril.graph import Decisions, Editor, Graph, Node, Op, Value, is_matrix_transpose, product


@dataclass(frozen=True)
class Packed:
    """The operands of ``sparse_to_dense``, and whether a value is the transposed matrix."""

    values: Value
    positions: Value
    starts: Value
    columns: Any
    transposed: bool = False

    def swapped(self) -> Packed:
        """Return the transposed matrix."""
        return replace(self, transposed=not self.transposed)

    def product(self, x: Value) -> Value:
        """Return the product of the matrix with x."""
        if self.transposed:
            return ops.sparse_matmul_transposed(self.values, self.positions, self.starts, x, columns=self.columns)
        return ops.sparse_matmul(self.values, self.positions, self.starts, x)


def with_packed_products(graph: Graph, backend: Backend, is_divided: bool, decisions: Decisions) -> Graph:
    """Return the graph in which products read stored elements; ``is_divided`` if it runs on several backends."""
    sources = [node for node in graph.nodes if node.op is ops.sparse_to_dense]
    if not sources:
        return graph
    if is_divided or not backend.multiplies_sparse:
        reason = "a program of several backends" if is_divided else f"backend '{backend.name}'"
        for node in sources:
            decisions.record("downgrade", f"{name_of(node)} is decoded: {reason} has no products of stored elements")
        return graph
    editor = graph.edit()
    for node in editor.nodes():
        rule = RULES.get(node.op)
        if rule is None:
            continue
        with editor.before(node):
            result = rule(node, [None if v is None else packed_of(editor, v) for v in node.operands])
        if result is not None:
            editor.replace_value(node.result, result)
            editor.erase_dead(node)
    changed: Graph = editor.freeze()
    if (packed := len(sources) - sum(node.op is ops.sparse_to_dense for node in changed.nodes)) > 0:
        decisions.record("choice", f"products read the stored elements of {packed} sparse matrices")
    for node in changed.nodes:
        if node.op is ops.sparse_to_dense:
            readers = {n.op.name for n in changed.users.get(node.result, ())} or {"an output"}
            decisions.record("downgrade", f"{name_of(node)} is decoded for {', '.join(sorted(readers))}")
    return changed


def name_of(node: Node) -> str:
    """Return the name of a sparse matrix for messages."""
    value = node.operands[0]
    assert value is not None
    return f"the sparse matrix '{value.name.removesuffix('.values')}'"


def packed_of(editor: Editor, value: Value) -> Packed | None:
    """Return the stored elements of a packed value, or of a transposed one."""
    node = editor.producer(value)
    if node is None:
        return None
    if node.op is ops.sparse_to_dense:
        values, positions, starts = (cast("Value", v) for v in node.operands)
        return Packed(values, positions, starts, node.attributes["columns"])
    if is_matrix_transpose(node) and node.operands[0] is not None:
        inner = packed_of(editor, node.operands[0])
        return None if inner is None else inner.swapped()
    return None


# -- rules ------------------------------------------------------------------------------------------------------------
Rule = Callable[[Node, list[Packed | None]], Value | None]
RULES: dict[Op, Rule] = {}


def rule_of(op: Op) -> Callable[[Rule], Rule]:
    """Register the rule of an operation."""

    def register(rule: Rule) -> Rule:
        RULES[op] = rule
        return rule

    return register


@rule_of(ops.matmul)
def _matmul(node: Node, packed: list[Packed | None]) -> Value | None:
    x, w = node.operands
    assert x is not None
    assert w is not None
    left, right = packed
    if left is not None and w.ndim == 2:
        return left.product(w)
    return None if right is None else _of_rows(x, right.swapped(), lambda y: y)


@rule_of(ops.linear)
def _linear(node: Node, packed: list[Packed | None]) -> Value | None:
    x, w, b = node.operands
    assert x is not None
    assert w is not None
    activation: Callable[[Value], Value] = ops.ANY_ACTIVATION[node.attributes["activation"]]
    left, right = packed[:2]
    if left is not None:
        y = left.product(ops.transpose(w, perm=(1, 0)))
        return activation(y if b is None else y + b)
    # The bias is added before the result is transposed: engines then fuse it into the product.
    column = None if b is None or right is None else ops.reshape(b, shape=(*b.shape, 1))
    return None if right is None else _of_rows(x, right, lambda y: activation(y if column is None else y + column))


def _of_rows(x: Value, matrix: Packed, then: Callable[[Value], Value]) -> Value | None:
    """Return the products of a matrix with all rows of x; ``then`` is applied while each row is a column."""
    if not x.ndim:
        return None
    rows = ops.reshape(x, shape=(product(x.shape[:-1]), x.shape[-1]))
    y = ops.transpose(then(matrix.product(ops.transpose(rows, perm=(1, 0)))), perm=(1, 0))
    result: Value = ops.reshape(y, shape=(*x.shape[:-1], y.shape[1]))
    return result


def _of_zero(op: Op) -> Rule:
    """Return the rule of a function of elements that is 0 at 0: it is applied to the stored ones."""

    def rule(node: Node, packed: list[Packed | None]) -> Value | None:
        (only,) = packed
        if only is None or only.transposed:
            return None
        values = op(only.values, **node.attributes)
        result: Value = ops.sparse_to_dense(values, only.positions, only.starts, columns=only.columns)
        return result

    return rule


for _op in (ops.neg, ops.abs, ops.relu, ops.square, ops.sqrt, ops.sign, ops.tanh, ops.log1p):
    RULES[_op] = _of_zero(_op)
