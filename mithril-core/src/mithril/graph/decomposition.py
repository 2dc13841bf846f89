"""Decomposition: replace the composites that a backend does not lower by their bodies."""

from __future__ import annotations

from collections.abc import Callable
from itertools import repeat
from operator import is_, is_not

from mithril.graph.builder import Builder
from mithril.graph.core import Graph, Node, Value, types_of
from mithril.graph.errors import UnsupportedError

Lowers = Callable[[Node], bool]


def decompose(graph: Graph, lowers: Lowers, backend: str = "") -> Graph:
    """Return a graph of nodes that the backend lowers; the same object if nothing changes.

    Raise UnsupportedError, which names ``backend`` and all unsupported operations, if a primitive is not lowered.
    """
    missing: dict[str, list[Node]] = {}
    result = _decompose(graph, lowers, missing)
    if missing:
        facts = [_where(name, nodes) for name, nodes in sorted(missing.items())]
        names = ", ".join(sorted(missing))
        subject = f"backend '{backend}'" if backend else "the backend"
        count = f"{len(missing)} operation{'s' if len(missing) > 1 else ''}"
        raise UnsupportedError(
            f"{subject} does not support {count}: {names}",
            facts=facts,
            hint="choose another backend, or register lowerings for them with the hook mithril_lowerings",
        )
    return result


def _where(name: str, nodes: list[Node]) -> str:
    origin = str(nodes[0].origin)
    return f"'{name}', {len(nodes)} time{'s' if len(nodes) > 1 else ''}" + (f", first in {origin}" if origin else "")


def _decompose(graph: Graph, lowers: Lowers, missing: dict[str, list[Node]]) -> Graph:
    """Decompose one graph, recursively for its regions (the depth is the nesting of control flow)."""
    if all(not n.regions and lowers(n) for n in graph.nodes):
        return graph
    builder = Builder(graph.name)
    builder.inputs = list(graph.inputs)
    for guard in graph.guards:
        builder.guards[guard] = None
    for i in graph.inputs:
        builder.unique(i.name)
    for node in graph.nodes:  # reserve these names: nodes from bodies must not use them
        for v in node.results:
            builder.unique(v.name)
    replaced: dict[Value, Value] = {}
    pending = list(reversed(graph.nodes))
    changed = False
    while pending:
        node = pending.pop()
        if replaced:
            operands = tuple(None if v is None else _final(v, replaced) for v in node.operands)
            if any(map(is_not, operands, node.operands)):  # == would be an operation while a graph is built
                node = node.replaced(operands=operands)
        if node.regions:
            regions = tuple(_decompose(r, lowers, missing) for r in node.regions)
            if any(a is not b for a, b in zip(regions, node.regions, strict=True)):
                node, changed = node.replaced(regions=regions), True
        if lowers(node):
            builder.nodes.append(node)
        elif node.op.composite:
            changed = True
            _expand(node, builder, pending, replaced)
        else:
            missing.setdefault(node.op.name, []).append(node)
    if not changed:
        return graph
    return Graph(
        tuple(builder.inputs),
        tuple(builder.nodes),
        graph.carrying(_final(v, replaced) for v in graph.outputs),
        graph.name,
        tuple(builder.guards),
    )


def _final(value: Value, replaced: dict[Value, Value]) -> Value:
    while value in replaced:
        value = replaced[value]
    return value


def _expand(node: Node, builder: Builder, pending: list[Node], replaced: dict[Value, Value]) -> None:
    """Schedule the nodes of the body next, with its results substituted for those of the composite."""
    types = types_of(node.operands)
    body: Graph = node.op.decompose(types, node.attributes)
    stage = Builder(body.name)
    stage._used = builder._used
    stage.origin, stage.tags = node.origin, node.tags
    values = stage.inline(body, [v for v in node.operands if v is not None])
    builder.inputs += stage.inputs
    builder.guards.update(stage.guards)
    nodes = stage.nodes
    arguments = set(node.operands)
    for old, new in zip(node.results, values, strict=True):
        if new in arguments or sum(v is new for v in values) > 1 or any(new is i.value for i in stage.inputs):
            replaced[old] = new  # the body returns an operand, a constant, or one value twice
        else:
            nodes = [_renamed(n, new, old) for n in nodes]
    pending.extend(reversed(nodes))


def _renamed(node: Node, new: Value, old: Value) -> Node:
    """Return the node with ``new`` replaced by ``old``: results of the graph keep their names."""
    if not any(map(is_, repeat(new), (*node.results, *node.operands))):
        return node
    return node.replaced(
        operands=tuple([old if v is new else v for v in node.operands]),
        results=tuple([old if v is new else v for v in node.results]),
    )
