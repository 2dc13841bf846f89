"""The parts of a program on a mesh: forward passes with their gradients, and the operations between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import mithril as ml
from mithril.graph import Graph, Input, Node, Output, Value, is_source, operation

GRADIENTS = "mesh.gradients"  # the operation of a forward pass that PyTorch differentiates


@dataclass(frozen=True)
class Part:
    """Consecutive operations.

    ``takes`` names the operands in order; ``gives`` names all results.
    """

    graph: Graph
    takes: tuple[str, ...]
    gives: tuple[str, ...]


@dataclass(frozen=True)
class ForwardPart(Part):
    """A forward pass, and the gradients of some results (``objectives``, as numbers) for some arguments (``trained``).

    The operands are the arguments of the graph, then the cotangents of the objectives.
    """

    objectives: tuple[int, ...]
    trained: tuple[str, ...]
    sums: Mapping[str, str] = field(default_factory=dict)  # trained parameters, and values to which gradients are added

    @property
    def operands(self) -> dict[str, str]:
        """The values that are the arguments of the graph."""
        return dict(zip((i.name for i in self.graph.arguments), self.takes, strict=False))

    @property
    def cotangents(self) -> tuple[str, ...]:
        """The values that are the cotangents of the objectives."""
        return self.takes[len(self.graph.arguments) :]

    @property
    def params(self) -> list[str]:
        """The arguments that are parameters."""
        return [i.name for i in self.graph.with_role("param")]

    @property
    def inputs(self) -> list[str]:
        """The other arguments."""
        return [i.name for i in self.graph.arguments if i.role != "param"]


def parts_of(graph: Graph) -> tuple[list[Part], dict[str, str]]:
    """Cut a graph at its forward passes; also return the name of the value of each result."""
    op = operation(GRADIENTS)
    if not any(node.op is op for node in graph.nodes):
        graph = ml.with_framework_gradients(graph, (), ())  # one forward pass, without gradients
    graph = _with_own_constants(graph)
    return _Cutter(graph, [node for node in graph.nodes if node.op is op]).run()


def _with_own_constants(graph: Graph) -> Graph:
    """Return the graph with a constant of its own for each result: each has its own parts and owner."""
    used, nodes, results = set(), list(graph.nodes), []
    for r in graph.results:
        producer = graph.producers.get(r.value)
        if r.value in used and producer is not None and is_source(producer):
            nodes.append(producer.replaced(results=(Value(r.value.name, r.value.type),)))
            r = replace(r, value=nodes[-1].result)
        used.add(r.value)
        results.append(r)
    return graph.replaced(nodes=tuple(nodes), results=tuple(results))


class _Cutter:
    def __init__(self, graph: Graph, calls: Sequence[Node]) -> None:
        self.graph, self.calls = graph, calls
        self.names: dict[Value, str] = {i.value: i.name for i in graph.inputs}
        used = set(self.names.values())
        for node in graph.nodes:
            for v in node.results:
                name, n = v.name, 1
                while name in used:
                    name, n = f"{v.name}_{n}", n + 1
                used.add(name)
                self.names[v] = name

    def run(self) -> tuple[list[Part], dict[str, str]]:
        level: dict[Value, int] = {}  # the number of forward passes before a value
        groups: list[list[Node]] = [[] for _ in range(len(self.calls) + 1)]
        for node in self.graph.nodes:
            if node in self.calls:
                k = self.calls.index(node) + 1
            else:
                k = max((level.get(v, 0) for v in node.operands if v is not None), default=0)
                groups[k].append(node)
            level.update(dict.fromkeys(node.results, k))
        parts: list[Part] = []
        for k, nodes in enumerate(groups):
            if nodes:
                later = [*self.calls[k:], *(node for group in groups[k + 1 :] for node in group)]
                parts.append(self._operations(nodes, {v for node in later for v in node.operands if v is not None}))
            if k < len(self.calls):
                parts.append(self._forward(self.calls[k]))
        return parts, {r.name: self.names[r.value] for r in self.graph.results}

    def _forward(self, node: Node) -> ForwardPart:
        forward = node.regions[0]
        takes = tuple(self.names[v] for v in node.operands if v is not None)
        trained = tuple(forward.arguments[k].name for k in node.attributes["wrt"])
        gives = tuple(self.names[v] for v in node.results)
        return ForwardPart(forward, takes, gives, tuple(node.attributes["objectives"]), trained)

    def _operations(self, nodes: Sequence[Node], later: set[Value]) -> Part:
        """Return a part of the program; ``later`` are the values that the parts after it read."""
        inner = {v for node in nodes for v in node.results}
        members = set(nodes)
        live = {v for node in self.graph.nodes if node not in members for v in node.operands if v is not None}
        live |= set(self.graph.outputs)
        inputs: dict[Value, Input] = {}
        new: dict[Value, Value] = {}
        for v in (v for node in nodes for v in node.operands if v is not None and v not in inner):
            if v in self.graph.input_of:
                inputs[v] = self.graph.input_of[v]
                if v in later or v in self.graph.outputs:  # the old value is still read
                    inputs[v] = replace(inputs[v], tags={t: x for t, x in inputs[v].tags.items() if t != "donated"})
            elif v not in new:
                new[v] = Value(self.names[v], v.type)
                inputs[v] = Input(new[v], "input")
        renamed = [
            node.replaced(operands=tuple(v if v is None else new.get(v, v) for v in node.operands)) for node in nodes
        ]
        gives = [v for node in nodes for v in node.results if v in live]
        results = tuple(Output(v, self.names[v]) for v in gives)
        graph = Graph(tuple(inputs.values()), tuple(renamed), results, self.graph.name)
        return Part(graph, tuple(i.name for i in inputs.values()), graph.output_names)
