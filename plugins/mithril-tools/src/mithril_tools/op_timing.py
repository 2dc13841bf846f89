"""Time a single operation by repeating it in one program, so that call overhead cancels out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from mithril.backend import Backend, BuildOptions
from mithril.graph import Graph, Input, Node, Value, as_results
from mithril.passes import random_arguments
from mithril_tools.cost_model import Sample, costly_nodes, kind_of, logarithms, size_of

MOST = 8  # copies in one program
BYTES = 16 << 20  # of all copies together
LEAST = 1e-8  # seconds; shorter times cannot be distinguished from 0

Key = tuple[str, str, tuple[float, ...]]


class RepeatedOp:
    """A program of independent copies of a node; ``call`` runs it."""

    def __init__(self, node: Node, scalars: Mapping[Value, Node], backend: Backend) -> None:
        self.key = sample_key(node)
        self.count = max(1, min(MOST, BYTES // max(size_of(node)[1], 1)))
        graph = copied(node, scalars, self.count)
        self._backend = backend
        self._run: Any = backend.build(graph, BuildOptions(inference=True))
        self._arguments = {name: backend.array(x) for name, x in random_arguments(graph).items()}

    def call(self) -> None:
        self._backend.synchronize(self._run({}, self._arguments))

    def sample(self, seconds: float, nothing: float) -> Sample:
        """Return the sample for the seconds of a call, less the seconds of a nearly empty call."""
        return Sample(*self.key, max((seconds - nothing) / self.count, LEAST))


def sample_key(node: Node) -> Key:
    """Return the key that identical samples share."""
    return node.op.name, kind_of(node), logarithms(node)


def repeated_ops(graphs: Iterable[Graph], backend: Backend) -> list[RepeatedOp]:
    """Build a program for every distinct operation, dtype and size of the graphs, loop bodies excluded."""
    programs: dict[Key, RepeatedOp] = {}
    for graph in graphs:
        scalars = {n.result: n for n in graph.nodes if n.is_constant}
        for node in costly_nodes(graph.nodes):
            key = sample_key(node)
            if key not in programs:
                programs[key] = RepeatedOp(node, scalars, backend)
    return list(programs.values())


def copied(node: Node, scalars: Mapping[Value, Node], count: int) -> Graph:
    """Build a graph of copies of a node, each with separate inputs; scalar constants are shared."""
    inputs: list[Input] = []
    nodes = [scalars[v] for v in dict.fromkeys(node.operands) if v is not None and v in scalars]
    outputs: list[Value] = []
    for k in range(count):
        fresh: dict[Value, Value] = {}
        for v in node.operands:
            if v is not None and v not in scalars and v not in fresh:
                fresh[v] = Value(f"a{k}_{len(fresh)}", v.type)
                inputs.append(Input(fresh[v]))
        results = tuple(Value(f"r{k}_{j}", v.type) for j, v in enumerate(node.results))
        operands = tuple(None if v is None else fresh.get(v, v) for v in node.operands)
        nodes.append(node.replaced(operands=operands, results=results))
        outputs += results
    return Graph(tuple(inputs), tuple(nodes), as_results(outputs), node.op.name)
