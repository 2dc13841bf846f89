"""Cleanup passes: dead code elimination, common subexpression elimination, constant folding."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np

from mithril.graph import Builder, Graph, Input, Node, Value, attributes_key, structural_hash
from mithril.ops import FOLD_LIMIT, conv, fake_quantize, is_foldable, linear, matmul, transpose, without_unread_parts
from mithril.passes import PassContext

NO_CONTEXT = PassContext()
BACKWARD = ("phase", "backward")  # a tag that CSE ignores: gradients may use results of the forward part
PRODUCTS = (linear, matmul, conv)


def dead_code_elimination(graph: Graph) -> Graph:
    """Remove nodes, constants and region results without users."""
    return without_unread_parts(graph)


def common_subexpression(graph: Graph) -> Graph:
    """Compute equal expressions and store equal constants once. Other inputs are equal only to themselves."""
    replacements = _equal_constants(graph)
    seen: dict[Any, Node] = {}
    nodes: list[Node] = []
    for node in graph.nodes:
        current = node
        if replacements:
            operands = tuple(None if v is None else replacements.get(v, v) for v in node.operands)
            current = node if operands == node.operands else node.replaced(operands=operands)
        key = _key(current)
        earlier = seen.setdefault(key, current) if key is not None else current
        if earlier is current:
            nodes.append(current)
        else:
            replacements.update(zip(node.results, earlier.results, strict=True))
    if not replacements:
        return graph
    outputs = tuple(replacements.get(v, v) for v in graph.outputs)
    return graph.replaced(nodes=tuple(nodes), outputs=outputs)


def _equal_constants(graph: Graph) -> dict[Value, Value]:
    """Return the first of equal constants for each later one."""
    groups: dict[Any, list[Input]] = {}
    for i in graph.inputs:
        if i.role == "constant" and i.data is not None:
            groups.setdefault((i.value.type, i.data.dtype), []).append(i)
    replacements: dict[Value, Value] = {}
    for group in groups.values():
        if len(group) > 1:  # the bytes of a constant without a partner are not read
            first: dict[Any, Value] = {}
            for i in group:
                content = np.asarray(i.data, order="C").reshape(-1).view(np.uint8)
                earlier = first.setdefault(hashlib.sha256(content.data).digest(), i.value)
                if earlier is not i.value:
                    replacements[i.value] = earlier
    return replacements


def _key(node: Node) -> Any:
    """Return a key that is equal for equivalent nodes, or None for nodes that must not be merged."""
    if node.op.opaque:
        return None
    operands = node.operands
    if node.op.commutative:
        # Any order that is the same for equal operands will do; values have no other order that costs
        # nothing.
        operands = tuple(sorted(operands, key=id))
    regions = tuple(map(structural_hash, node.regions))
    # Other tags select a backend or a kernel: nodes that differ in them are different programs.
    tags = attributes_key({n: tag for n, tag in node.tags.items() if (n, tag) != BACKWARD}) if node.tags else ()
    return node.op, operands, attributes_key(node.attributes), regions, tags


def constant_folding(graph: Graph, context: PassContext = NO_CONTEXT) -> Graph:
    """Evaluate expressions of constants, up to a limit on the size of results.

    If parameters are embedded, results may be as large as the largest of them.
    """
    limit = FOLD_LIMIT
    if context.option("static_inference"):
        # Embedded parameters are constants: a folded one, such as a transpose, takes the place of the
        # original.
        limit = max([limit, *(i.data.size for i in graph.inputs if i.data is not None)])
    # Folded roundings of training were rounded again to other integers by the quantization pass
    # (commit 73a4f5a9).
    keeps_scales = context.option("quantization") is not None
    constants_by_value: dict[Value, np.ndarray[Any, Any]] = {
        i.value: i.data for i in graph.inputs if i.data is not None and i.data.size <= limit
    }
    folded: dict[Value, np.ndarray[Any, Any]] = {}
    transposed: dict[Value, dict[str, Any]] = {}  # tags of results that are an input with its axes in another order
    by_value: dict[Value | None, Input] = {i.value: i for i in graph.inputs}
    nodes: list[Node] = []
    for node in graph.nodes:
        if node.is_constant:
            constants_by_value[node.result] = np.asarray(node.attributes["value"], node.attributes["dtype"].numpy)
            nodes.append(node)
        elif is_foldable(node, constants_by_value, limit) and not (keeps_scales and _has_trained_scale(graph, node)):
            for value, array in zip(node.results, _compute(node, constants_by_value), strict=True):
                constants_by_value[value] = folded[value] = array
            if node.op is transpose and (source := by_value.get(node.operands[0])) is not None:
                axes = source.tags.get("axes", range(node.result.ndim))
                parameter = source.tags.get("parameter", source.name)
                transposed[node.result] = {
                    "parameter": parameter,
                    "axes": tuple(axes[k] for k in node.attributes["perm"]),
                }
        else:
            nodes.append(node)
    if not folded:
        return graph
    read = _read(nodes, graph.outputs)
    builder = Builder(graph.name)
    for name in (i.name for i in graph.inputs):
        builder.unique(name)
    constants: list[Node] = []
    inputs: list[Input] = []
    for value, array in folded.items():
        if value not in read:
            continue
        if array.ndim == 0:
            constants.append(_scalar(value, array))
        else:
            # Read-only: backends cache packed forms of arrays that never change (see ``ArrayCache``).
            frozen = np.array(array, order="C")
            frozen.setflags(write=False)
            inputs.append(Input(_renamed(value, builder), "constant", frozen, transposed.get(value, {})))
    replaced = {
        value: i.value for value, i in zip([v for v in folded if v in read and folded[v].ndim], inputs, strict=True)
    }
    return _substituted(graph, constants + nodes, inputs, replaced)


def late_constant_folding(graph: Graph, context: PassContext) -> Graph:
    """Fold expressions of weights that fusion introduced, and drop their dead operands."""
    return dead_code_elimination(constant_folding(graph, context))


def _has_trained_scale(graph: Graph, node: Node) -> bool:
    """Whether a product reads weights with the rounding of training, whose scale static quantization takes over."""
    users = graph.users.get(node.result, ()) if node.op is fake_quantize and node.attributes["bits"] == 8 else ()
    return any(user.op in PRODUCTS and user.operands[1] is node.result for user in users)


def _compute(node: Node, constants: dict[Value, Any]) -> Iterable[np.ndarray[Any, Any]]:
    operands = [None if v is None else constants[v] for v in node.operands]
    results = node.op.evaluate(operands, node.attributes)
    return results if isinstance(results, tuple) else (results,)


def _read(nodes: Iterable[Node], outputs: Iterable[Value]) -> set[Value]:
    return {v for node in nodes for v in node.operands if v is not None} | set(outputs)


def _scalar(value: Value, array: np.ndarray[Any, Any]) -> Node:
    from mithril.graph import operation

    op = operation("constant")
    number = array.item() if array.dtype.kind in "biuf" else float(array)
    return Node(op, (), op.complete({"value": number, "dtype": value.dtype}), (value,))


def _renamed(value: Value, builder: Builder) -> Value:
    return Value(builder.unique(value.name), value.type)


def _substituted(graph: Graph, nodes: list[Node], inputs: list[Input], replaced: dict[Value, Value]) -> Graph:
    def swap(node: Node) -> Node:
        if not any(v in replaced for v in node.operands if v is not None):
            return node
        return node.replaced(operands=tuple(None if v is None else replaced.get(v, v) for v in node.operands))

    return graph.replaced(
        inputs=(*graph.inputs, *inputs),
        nodes=tuple(swap(n) for n in nodes),
        outputs=tuple(replaced.get(v, v) for v in graph.outputs),
    )


__all__ = ["common_subexpression", "constant_folding", "dead_code_elimination", "late_constant_folding"]
