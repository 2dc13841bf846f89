"""Partitioning of a graph over several backends for ``backend_map``, with array transfers between segments.

``set_attribute("backend", "torch")`` of a submodel names a backend of the map. The graph is cut into as few segments
as its order allows; gradients run on the backend of their layer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mithril.backend import Backend, Executable
from mithril.graph import Dim, Graph, Input, Node, OptionError, Output, Value, iterate, symbols, unknown

Build = Callable[[Graph, Backend], Executable]
TAG = "backend"


@dataclass(slots=True)
class Segment:
    """A segment of the graph: consecutive operations on one backend."""

    backend: Backend
    executable: Executable
    inputs: tuple[tuple[str, Value], ...]  # name in the segment, value of the full graph
    outputs: tuple[tuple[str, Value], ...]


def assign_backends(graph: Graph, default: Backend, backend_map: Mapping[str, Backend]) -> dict[Node, Backend]:
    """Return the backend of every node except constants; raise OptionError for a name that is not in the map."""
    assignment = {}
    for node in graph.nodes:
        # Each segment has its own copy of the constants that it reads, so that they need no transfer.
        if node.is_constant:
            continue
        name = node.tags.get(TAG)
        if name is None or (name == default.name and name not in backend_map):
            assignment[node] = default
        elif name in backend_map:
            assignment[node] = backend_map[name]
        else:
            message, facts, hint = unknown("backend in backend_map", str(name), list(backend_map))
            raise OptionError(message, facts=[*facts, f"requested by {node.origin}"], hint=hint)
    return assignment


def group_segments(graph: Graph, where: Mapping[Node, Backend]) -> list[tuple[Backend, list[Node]]]:
    """Group nodes into segments in topological order, with few changes of the backend."""
    waiting = {n: len({graph.producers[v] for v in n.operands if v in graph.producers} & where.keys()) for n in where}
    ready: dict[int, deque[Node]] = {}
    backends = {id(b): b for b in where.values()}
    for node, count in waiting.items():
        if not count:
            ready.setdefault(id(where[node]), deque()).append(node)
    out: list[tuple[Backend, list[Node]]] = []
    current = id(where[next(iter(where))]) if where else 0
    while any(ready.values()):
        if not ready.get(current):
            current = next(k for k, queue in ready.items() if queue)
        run: list[Node] = []
        while ready[current]:
            node = ready[current].popleft()
            run.append(node)
            for user in dict.fromkeys(u for v in node.results for u in graph.users.get(v, ())):
                waiting[user] -= 1
                if not waiting[user]:
                    ready.setdefault(id(where[user]), deque()).append(user)
        out.append((backends[current], run))
    return out


def _axes(value: Value) -> set[Any]:
    """Return the symbols that are sizes of axes."""
    return {size.symbol for size in value.shape if isinstance(size, Dim)}


class Partitioned:
    """The executable of a graph on several backends; arguments and results are arrays of the default backend."""

    def __init__(self, graph: Graph, default: Backend, backend_map: Mapping[str, Backend], build: Build) -> None:
        self.graph = graph
        self.default = default
        assignment = assign_backends(graph, default, backend_map)
        rank = {n: k for k, n in enumerate(graph.nodes)}
        self._pieces = [
            self._segment(backend, sorted(run, key=rank.__getitem__), build)
            for backend, run in group_segments(graph, assignment)
        ]
        # Constants that are results belong to no segment so far.
        constants = [n for n in graph.nodes if n.is_constant and n.result in set(graph.outputs)]
        if constants:
            self._pieces.append(self._segment(default, constants, build))

    @property
    def source(self) -> str | None:
        """The generated sources of all segments."""
        texts = [p.executable.source for p in self._pieces]
        return "\n\n".join(t for t in texts if t) or None

    @property
    def lowered(self) -> frozenset[str]:
        return frozenset().union(*(p.executable.lowered for p in self._pieces))

    def _segment(self, backend: Backend, run: list[Node], build: Build) -> Segment:
        local_values = {v for n in run for v in n.results}
        scalars = [
            node
            for node in dict.fromkeys(self.graph.producers.get(v) for n in run for v in n.operands if v is not None)
            if node is not None and node.is_constant and node not in run
        ]
        available = local_values | {n.result for n in scalars}
        outer = list(dict.fromkeys(v for n in run for v in n.operands if v is not None and v not in available))
        outer += self._holders(outer, run)
        declarations = (self.graph.input_of.get(v) or Input(v) for v in outer)
        # Nothing is overwritten: other segments, or other results that are the same value, may need the old array.
        inputs = tuple(replace(i, tags={**i.tags, "donated": False}) for i in declarations)
        outputs, nodes = set(self.graph.outputs), set(run)
        live = outputs | {v for v in local_values if any(u not in nodes for u in self.graph.users.get(v, ()))}
        produced = [v for n in run for v in n.results if v in live]
        names = tuple(f"r{k}" for k in range(len(produced)))
        title = f"{self.graph.name}_{backend.name}"
        results = tuple(Output(v, name) for name, v in zip(names, produced, strict=True))
        graph = Graph(inputs, (*scalars, *run), results, title, self.graph.guards)
        executable = build(graph, backend)
        operands = tuple((i.name, i.value) for i in inputs if i.role != "constant")
        return Segment(backend, executable, operands, tuple(zip(names, produced, strict=True)))

    def _holders(self, outer: list[Value], run: list[Node]) -> list[Value]:
        """Return arguments whose axes are the sizes that a segment needs and no value that it reads has."""
        determined = {symbol for v in outer for symbol in _axes(v)}
        nodes = [node for node, _ in iterate(Graph((), tuple(run), ()))]
        needed = [size for node in nodes for v in node.results for size in v.shape]
        for attribute in (x for node in nodes for x in node.attributes.values()):
            needed += attribute if isinstance(attribute, tuple) else [attribute]
        added = []
        for symbol in symbols(*needed):
            holder = next((i.value for i in self.graph.arguments if symbol in _axes(i.value)), None)
            if symbol not in determined and holder is not None:
                added.append(holder)
                determined |= _axes(holder)
        return added

    def __call__(self, params: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
        values: dict[Value, Any] = {}
        home: dict[Value, Backend] = {}
        for i in self.graph.arguments:
            values[i.value] = params[i.name] if i.role == "param" else inputs[i.name]
            home[i.value] = self.default
        for piece in self._pieces:
            own_params: dict[str, Any] = {}
            own_inputs: dict[str, Any] = {}
            for name, value in piece.inputs:
                declaration = self.graph.input_of.get(value)
                array = self._transfer(values[value], home[value], piece.backend)
                (own_params if declaration is not None and declaration.role == "param" else own_inputs)[name] = array
            results = piece.executable(own_params, own_inputs)
            for name, value in piece.outputs:
                values[value], home[value] = results[name], piece.backend
        return {
            name: self._transfer(values[v], home[v], self.default)
            for name, v in zip(self.graph.output_names, self.graph.outputs, strict=True)
        }

    @staticmethod
    def _transfer(array: Any, source: Backend, target: Backend) -> Any:
        """Transfer an array to another backend, without a copy if both support DLPack.

        Parameters are transferred in each call, as a training step may have overwritten the same array since the last.
        """
        if source is target or target.is_array(array):
            return array
        return target.array(array if hasattr(array, "__dlpack__") else source.to_numpy(array))
