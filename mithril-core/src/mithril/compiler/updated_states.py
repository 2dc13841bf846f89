"""States that a program updates in place: caches of keys and values, of which a call writes a few positions.

Their inputs are tagged ``donated``. A runner hands its arrays over, and other calls pass copies. A runner checks the
positions before the program runs, because the program overwrites the state before its own checks are read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mithril import ops
from mithril.backend import in_place_updates, state_updates
from mithril.compiler.bound_checks import Bound, BufferBound, with_bounds
from mithril.graph import Decisions, Graph, Node, Value, attributes_text, evaluate


@dataclass(frozen=True)
class EarlyChecks:
    """The checks of a program that depend on inputs and on counters of its state, and the graph that computes them."""

    graph: Graph
    bounds: tuple[Bound | BufferBound, ...]

    def raise_if_violated(self, arrays: Mapping[str, Any], to_numpy: Callable[[Any], Any]) -> None:
        """Raise InputError if a position is outside of its buffer."""
        if self.bounds:
            values = evaluate(self.graph, {i.name: to_numpy(arrays[i.name]) for i in self.graph.arguments})
            for bound in self.bounds:
                bound.raise_if_violated([values[name] for name in bound.names], {})


def early_checks(graph: Graph) -> EarlyChecks | None:
    """Return the checks of a traced graph, or None if some can be computed only by a run of the program."""
    marked, bounds = with_bounds(graph)
    checks = marked.results_of("check")
    needed, nodes = {r.value for r in checks}, []
    for node in reversed(marked.nodes):
        if needed.intersection(node.results):
            nodes.append(node)
            needed.update(v for v in node.operands if v is not None)
    # arrays of inputs with symbolic sizes determine the sizes in attributes, such as the number of new positions
    inputs = tuple(i for i in marked.inputs if i.value in needed or (i.role == "input" and not i.type.is_static))
    part = _distinct(Graph(inputs, tuple(reversed(nodes)), checks, "checks"))
    # a state of rank 1 counts the tokens of each row; reading others before each run would take too long
    if any(i.role not in ("input", "constant") and (i.role != "state" or len(i.type.shape) > 1) for i in inputs):
        return None
    return EarlyChecks(part, tuple(bounds)) if all(isinstance(b, BufferBound) for b in bounds) else None


def _distinct(graph: Graph) -> Graph:
    """Return the graph without repeated computations: every layer with a cache computes the same positions."""
    replaced: dict[Value, Value] = {}
    first: dict[Any, Node] = {}
    for node in graph.nodes:
        operands = tuple(v if v is None else replaced.get(v, v) for v in node.operands)
        key = (node.op.name, operands, attributes_text(node.attributes, {}), node.result.type)
        other = first.setdefault(key, node.replaced(operands=operands))
        replaced.update(zip(node.results, other.results, strict=True))
    return graph.replaced(nodes=tuple(first.values()), outputs=[replaced.get(v, v) for v in graph.outputs])


def with_updates(graph: Graph, decisions: Decisions) -> Graph:
    """Tag the states that the graph can update in place, unless an error of a run would have to restore them.

    Attention to such a state is tagged ``cached``: a mask excludes the positions that are not written yet.
    """
    states = {i.value: i for i in graph.with_role("state")}
    for owner, reason, node in state_updates(graph, states).values():
        if reason:
            decisions.record("choice", f"state '{states[owner].name}' is copied in every call: {reason}", node.origin)
    updates = in_place_updates(graph, states)
    if not updates:
        return graph
    if early_checks(graph) is None:
        for owner in updates.values():
            message = f"state '{states[owner].name}' is copied in every call: a check during the call may reject it"
            decisions.record("choice", message)
        return graph
    updated = set(updates.values())
    inputs = tuple(replace(i, tags={**i.tags, "donated": True}) if i.value in updated else i for i in graph.inputs)
    nodes = tuple(n.replaced(tags={**n.tags, "cached": True}) if _is_cached(n, updates) else n for n in graph.nodes)
    return graph.replaced(inputs=inputs, nodes=nodes)


def _is_cached(node: Node, updates: Mapping[Value, Value]) -> bool:
    if node.op is not ops.attention or node.attributes["causal"]:
        return False
    q, k, _, mask = node.operands
    assert q is not None
    assert k is not None
    plain = q.dtype.name in ("float32", "float64") and mask is not None and mask.dtype.is_bool
    return plain and k in updates and mask is not None and mask.shape[-1] == k.shape[2]
