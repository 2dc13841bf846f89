"""Weights of experts: stacked along their first axis, which a product preserves together with that of its operand."""

from __future__ import annotations

from mithril import ops
from mithril.graph import Graph, Node, OptionError, Value, axes_of, decompose, is_product, is_unchanged
from mithril_parallel.placing.rules import sizes


def expert_parameters(graph: Graph, parts: int) -> list[str]:
    """Return the parameters that hold one weight for each of several experts, whose number ``parts`` divides."""
    graph = decompose(graph, _is_whole)
    parameters = {i.value: i.name for i in graph.with_role("param")}
    names: dict[str, None] = {}
    for node in graph.nodes:
        stored = [_stored(graph, v) for v in expert_weights(node)]
        names |= {parameters[v]: None for v in stored if v in parameters and sizes(v)[0] % parts == 0}
        if not is_product(node) or len(node.operands) != 2:
            continue
        axes = axes_of(node)
        for k, v in enumerate(node.operands):
            weight = _stored(graph, v)
            factors, partner = axes.operands[k], axes.operands[1 - k]
            if weight not in parameters or not factors or not partner or sizes(weight)[0] % parts:
                continue
            is_stacked = (
                len(factors[0]) == 1
                and factors[0][0] in axes.parallel
                and (
                    factors[0] in partner or _is_single(node.operands[1 - k])  # of all tokens for each expert
                )
            )
            if is_stacked and weight.ndim > 2 and factors[0] in axes.results[0]:
                names[parameters[weight]] = None
    return list(names)


def divided_experts(graph: Graph, parts: int, units: str) -> list[str]:
    """Return the parameters that ``parts`` devices divide along their experts; ``units`` names devices in the error."""
    names = expert_parameters(graph, parts)
    if not names:
        counts = sorted({int(graph.input(n).value.shape[0]) for n in expert_parameters(graph, 1)})
        fact = "the weight of experts is [experts, in, out], for a product that is computed for each expert"
        hint = "stack the weights of the experts in one parameter, or omit 'expert'"
        if counts:
            fact = f"it has weights of {', '.join(map(str, counts))} experts"
            hint = f"use a mesh whose first number divides {counts[0]}, or omit 'expert'"
        raise OptionError(
            f"parallelism='expert': no weight holds a number of experts that {parts} {units} can divide",
            facts=[fact],
            hint=hint,
        )
    return names


def expert_weights(node: Node) -> list[Value]:
    """Return the weights of a mixture of experts, of which each row has those of its expert."""
    if node.op not in (ops.expert_matmul, ops.expert_mixture):
        return []
    operands = dict(zip(node.op.operands, node.operands, strict=True))
    return [v for name in ("w", "up", "down", "gate") if (v := operands.get(name)) is not None]


def _is_whole(node: Node) -> bool:
    return not node.op.composite or node.op.elementwise or is_product(node) or bool(expert_weights(node))


def _is_single(v: Value | None) -> bool:
    return v is not None and sizes(v)[0] == 1


def _stored(graph: Graph, v: Value | None) -> Value | None:
    """Return the value of which this one is a cast."""
    while v is not None and (node := graph.producers.get(v)) is not None and is_unchanged(node):
        if node.operands[0] is None or node.operands[0].shape != v.shape:
            return v
        v = node.operands[0]
    return v
