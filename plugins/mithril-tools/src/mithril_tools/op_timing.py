"""One operation several times in one program: what it takes there, and not what it takes to call it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from mithril.backend.base import Backend, BuildOptions
from mithril.ir import Graph, Input, Node, Value
from mithril.passes.manager import random_arguments
from mithril_tools.cost_model import Sample, kind_of, logarithms, size_of, worked

MOST = 8  # copies in one program
BYTES = 16 << 20  # of all copies together
LEAST = 1e-8  # seconds; what is told to take less cannot be told from nothing

Key = tuple[str, str, tuple[float, ...]]


class Copies:
    """A program of a node's copies, none of which reads what another one does; ``call`` runs it."""

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
        """From the seconds of a call, and those of one that computes next to nothing."""
        return Sample(*self.key, max((seconds - nothing) / self.count, LEAST))


def sample_key(node: Node) -> Key:
    """What two samples of the same have in common."""
    return node.op.name, kind_of(node), logarithms(node)


def distinct(graphs: Iterable[Graph], backend: Backend) -> list[Copies]:
    """A program for every operation, dtype and size that graphs hold; those of bodies of loops stay within these."""
    found: dict[Key, Copies] = {}
    for graph in graphs:
        scalars = {n.result: n for n in graph.nodes if n.op.name == "constant"}
        for node in worked(graph.nodes):
            key = sample_key(node)
            if key not in found:
                found[key] = Copies(node, scalars, backend)
    return list(found.values())


def copied(node: Node, scalars: Mapping[Value, Node], count: int) -> Graph:
    """A graph of copies of a node, each with inputs of its own; numbers that it reads are shared."""
    inputs: list[Input] = []
    nodes = [scalars[v] for v in dict.fromkeys(node.operands) if v is not None and v in scalars]
    outputs: list[Value] = []
    for k in range(count):
        own: dict[Value, Value] = {}
        for v in node.operands:
            if v is not None and v not in scalars and v not in own:
                own[v] = Value(f"a{k}_{len(own)}", v.type)
                inputs.append(Input(own[v]))
        results = tuple(Value(f"r{k}_{j}", v.type) for j, v in enumerate(node.results))
        operands = tuple(None if v is None else own.get(v, v) for v in node.operands)
        nodes.append(node.replaced(operands=operands, results=results))
        outputs += results
    return Graph(tuple(inputs), tuple(nodes), tuple(outputs), tuple(v.name for v in outputs), node.op.name)
