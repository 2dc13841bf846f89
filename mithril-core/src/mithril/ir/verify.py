"""The verifier: every value defined once before it is used, every type what its operation says."""

from __future__ import annotations

from mithril.base.errors import MithrilError, VerificationError
from mithril.base.guards import collect_guards
from mithril.ir.core import ROLES, Graph, Node, Value
from mithril.ir.text import window


def verify(graph: Graph, *, since: Graph | None = None) -> Graph:
    """Return the graph, or raise ``VerificationError`` showing the lines around what is wrong.

    ``since`` is a verified graph this one was made from: nodes shared with it are not type-checked again.
    """
    trusted = set(map(id, since.nodes)) if since is not None else set()
    stack = [graph]
    while stack:
        current = stack.pop()
        _verify_one(current, trusted)
        stack.extend(region for node in current.nodes if id(node) not in trusted for region in node.regions)
    return graph


def _verify_one(graph: Graph, trusted: set[int]) -> None:
    defined: set[Value] = set()
    names: set[str] = set()
    for i in graph.inputs:
        if i.role not in ROLES:
            raise VerificationError(
                f"input '{i.name}' has the unknown role '{i.role}'", facts=[f"known: {', '.join(ROLES)}"]
            )
        if i.name in names or i.value in defined:
            raise VerificationError(f"two inputs are named '{i.name}'")
        if (i.role == "constant") != (i.data is not None):
            raise VerificationError(f"input '{i.name}': constants, and only they, have data")
        if i.data is not None and (i.data.shape != i.type.shape or i.data.dtype != i.type.dtype.numpy):
            raise VerificationError(
                f"constant '{i.name}' holds {i.data.dtype}{list(i.data.shape)} but says it is {i.type}",
            )
        names.add(i.name)
        defined.add(i.value)
    for node in graph.nodes:
        for operand in node.operands:
            if operand is not None and operand not in defined:
                raise _broken(graph, node, f"operand %{operand.name} of '{node.op.name}' is used before it is defined")
        if id(node) not in trusted:
            _check_types(graph, node)
        for result in node.results:
            if result in defined:
                raise _broken(graph, node, f"%{result.name} is defined twice")
            defined.add(result)
    for name, value in zip(graph.output_names, graph.outputs, strict=False):
        if value not in defined:
            raise VerificationError(f"output '{name}' is %{value.name}, which nothing defines")
    if len(graph.output_names) != len(graph.outputs) or len(set(graph.output_names)) != len(graph.outputs):
        raise VerificationError(
            "every output needs a name of its own", facts=[f"names: {', '.join(graph.output_names)}"]
        )


def _check_types(graph: Graph, node: Node) -> None:
    try:
        with collect_guards():
            types = node.op.infer([None if v is None else v.type for v in node.operands], node.attributes, node.regions)
    except MithrilError as error:
        raise _broken(
            graph, node, f"'{node.op.name}' does not accept its operands: {error.what}", *error.facts
        ) from error
    if len(types) != len(node.results):
        raise _broken(graph, node, f"'{node.op.name}' has {len(node.results)} results, expected {len(types)}")
    for value, expected in zip(node.results, types, strict=True):
        if value.type != expected:
            raise _broken(graph, node, f"%{value.name} says {value.type}, but '{node.op.name}' gives {expected}")


def _broken(graph: Graph, node: Node, what: str, *facts: str) -> VerificationError:
    origin = f"from {node.origin}" if str(node.origin) else ""
    return VerificationError(what, facts=[*facts, origin, f"in graph '{graph.name}':", *window(graph, node)])
