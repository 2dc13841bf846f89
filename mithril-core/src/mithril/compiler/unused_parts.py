"""The part of a model that no output depends on: it has no inputs, parameters and states in compiled models."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from mithril.backend import covers
from mithril.graph import Decisions, Graph, Node, Value, symbols
from mithril.ops import with_read_results

T = TypeVar("T")
ADDED_LOSS = "added_loss"  # tag of the nodes whose results are part of the training loss


@dataclass(frozen=True, slots=True)
class Unused:
    """Names of this part. Calls, files and options may contain them, because they are those of the whole model."""

    inputs: tuple[str, ...] = ()
    params: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()  # paths, with which the names of their parameters and states begin

    def owns(self, name: str) -> bool:
        """Whether a parameter, a state, or an optimizer's slot of one is of this part."""
        name = name.rpartition("/")[2]
        return name in self.params or any(name.startswith(f"{path}.") for path in self.layers)

    def is_named_by(self, pattern: str) -> bool:
        """Whether a pattern matches a name of this part."""
        names = (*self.inputs, *self.params, *self.layers)
        return self.owns(pattern) or any(covers(pattern, name) for name in names)

    def left_out(self, arrays: Mapping[str, T], expected: Collection[str], decisions: Decisions) -> Mapping[str, T]:
        """Return the arrays without those of this part."""
        ignored = [name for name in arrays if name not in expected and self.owns(name)]
        if not ignored:
            return arrays
        removed = set(ignored)
        decisions.record("choice", f"tensors are ignored, because no output depends on them: {_listed(ignored)}")
        return {name: x for name, x in arrays.items() if name not in removed}

    def with_params(self, names: Iterable[str]) -> Unused:
        return replace(self, params=tuple(dict.fromkeys((*self.params, *names))))

    def record(self, decisions: Decisions) -> None:
        """Record the names that compiled models lack."""
        for kind, names in (("layers", self.layers), ("inputs", self.inputs), ("parameters", self.params)):
            if names:
                decisions.record("choice", f"no output depends on these {kind}, which are left out: {_listed(names)}")


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"'{name}'" for name in names[:8]) + (", ..." if len(names) > 8 else "")


def unused_of(source: Any) -> Unused:
    """Return the part of a source that no output depends on; sources of plugins need not tell."""
    unused: Unused = getattr(source, "unused", Unused())
    return unused


def unused_inputs(graph: Graph, *roles: str) -> tuple[str, ...]:
    """Return the names of the inputs of these roles that no result depends on, and no part of the training loss."""
    read = {*graph.outputs, *(v for node in _needed_nodes(graph).values() for v in node.operands)}
    return tuple(i.name for i in graph.with_role(*roles) if i.value not in read)


def _needed_nodes(graph: Graph) -> dict[Node, Node]:
    """Return the nodes that a result or the training loss depends on, each as far as they need it."""
    read, needed = set(graph.outputs), dict[Node, Node]()
    for node in reversed(graph.nodes):
        if ADDED_LOSS in node.tags or not read.isdisjoint(node.results):
            needed[node] = with_read_results(node, read)
            read.update(v for v in needed[node].operands if v is not None)
    return needed


def without_inputs(graph: Graph, names: Collection[str]) -> Graph:
    """Return the graph without unused inputs, and without the nodes, results and guards that need them."""
    if not names:
        return graph
    removed = {graph.input(name).value for name in names}
    needed, nodes = _needed_nodes(graph), []
    for node in graph.nodes:
        if removed.isdisjoint(node.operands):
            nodes.append(node)
            continue
        results: tuple[Value, ...] = ()
        if node in needed:  # control flow, of which only results that nothing reads need the inputs
            nodes.append(needed[node])
            results = needed[node].results
        removed.update(v for v in node.results if v not in results)
    inputs = tuple(i for i in graph.inputs if i.value not in removed)
    remaining = symbols(*(size for i in inputs for size in i.type.shape))
    guards = tuple(g for g in graph.guards if all(s in remaining for s in symbols(g.left, g.right)))
    return graph.replaced(inputs=inputs, nodes=tuple(nodes), guards=guards)
