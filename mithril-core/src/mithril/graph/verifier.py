"""Graph verifier: every value is defined once and before its uses, and has the type that its operation infers."""

from __future__ import annotations

from operator import is_
from typing import Any

from mithril.graph.core import ROLES, Graph, Node, Op, Value, iterate, types_of
from mithril.graph.errors import MithrilError, VerificationError, unknown
from mithril.graph.guards import collect_guards
from mithril.graph.result_names import PREFIXES
from mithril.graph.text import window


def verify(graph: Graph, *, since: Graph | None = None) -> Graph:
    """Return the graph, or raise ``VerificationError`` with the lines of graph text around the invalid node.

    ``since`` is a verified graph from which ``graph`` was derived: shared nodes are not type-checked again.
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
                f"constant '{i.name}' holds {i.data.dtype}{list(i.data.shape)}, but its type is {i.type}",
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
    for r in graph.results:
        if r.value not in defined:
            raise VerificationError(f"output '{r.name}' is %{r.value.name}, which is not defined")
        if r.role not in PREFIXES:
            raise VerificationError(
                f"result '{r.name}' has the unknown role '{r.role}'", facts=[f"known: {', '.join(PREFIXES)}"]
            )
    if len(set(graph.output_names)) != len(graph.results):
        raise VerificationError("output names must be unique", facts=[f"names: {', '.join(graph.output_names)}"])


def _check_form(graph: Graph, node: Node) -> None:
    """Raise if the operands or attributes of a node do not match the declaration of its operation."""
    op = node.op
    if not isinstance(op, Op):
        raise VerificationError(
            f"the operation of a node is {op!r}, expected an operation such as ml.ops.exp",
            facts=[f"in graph '{graph.name}'", f"results: {', '.join(f'%{v.name}' for v in node.results)}"],
        )
    if not op.variadic and len(node.operands) != len(op.operands):
        count, expected = len(node.operands), len(op.operands)
        raise _broken(graph, node, f"'{op.name}' has {count} operands, expected {expected}: {', '.join(op.operands)}")
    for name in node.attributes:
        if name not in op.attributes:
            message, facts, hint = unknown(f"attribute of '{op.name}'", name, list(op.attributes))
            raise _broken(graph, node, message, *facts, *([hint] if hint else []))
    for name, attribute in op.attributes.items():
        if name not in node.attributes:
            raise _broken(graph, node, f"'{op.name}' needs the attribute '{name}' ({attribute.annotation})")
    try:
        op.require_canonical_axes(node.attributes)
    except MithrilError as error:
        raise _broken(graph, node, error.what, *error.facts) from None


def _check_types(graph: Graph, node: Node) -> None:
    _check_form(graph, node)
    try:
        with collect_guards():
            types = node.op.infer(types_of(node.operands), node.attributes, node.regions)
    except MithrilError as error:
        raise _broken(
            graph, node, f"'{node.op.name}' does not accept its operands: {error.what}", *error.facts
        ) from error
    except Exception as error:
        raise _broken(graph, node, f"'{node.op.name}' cannot be checked: {type(error).__name__}: {error}") from error
    if len(types) != len(node.results):
        raise _broken(graph, node, f"'{node.op.name}' has {len(node.results)} results, expected {len(types)}")
    for value, expected in zip(node.results, types, strict=True):
        if value.type != expected:
            raise _broken(graph, node, f"%{value.name} has type {value.type}, but '{node.op.name}' returns {expected}")


def _broken(graph: Graph, node: Node, message: str, *facts: str) -> VerificationError:
    origin = f"from {node.origin}" if str(node.origin) else ""
    return VerificationError(message, facts=[*facts, origin, f"in graph '{graph.name}':", *window(graph, node)])


FIELDS = ("op", "operands", "results", "regions")
PARTS = ("inputs", "nodes", "results")


class Snapshot:
    """The objects of a graph at one moment, to detect passes that modify their input in place."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._parts = {name: getattr(graph, name) for name in PARTS}
        self._nodes = [_content(node) for node, _ in iterate(graph)]

    def difference(self) -> str | None:
        """Return where the graph differs from this snapshot, or None if it does not."""
        for name, part in self._parts.items():
            if getattr(self.graph, name) is not part:
                return f"the {name.replace('_', ' ')} of the graph were replaced"
        for (node, _), (fields, types, attributes) in zip(iterate(self.graph), self._nodes, strict=False):
            for name, value in fields.items():
                if getattr(node, name) is not value:
                    return f"{name} of {node!r}"
            if not all(map(is_, types, (v.type for v in node.results))):
                return f"the type of {node!r}"
            if node.attributes != attributes:
                return f"the attributes of {node!r}: {attributes} became {dict(node.attributes)}"
        return None


def _content(node: Node) -> tuple[dict[str, Any], tuple[Any, ...], dict[str, Any]]:
    fields = {name: getattr(node, name) for name in FIELDS}
    return fields, tuple(v.type for v in node.results), dict(node.attributes)
