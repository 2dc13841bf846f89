"""``backend_map``: parts of a model on other backends, arrays handed over at the borders.

A sub-model says where it wants to run with ``set_attribute("backend", "torch")``; the map says which backend that is.
The graph is cut into as few pieces as its order allows; gradients run where their layers do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mithril.backend import Backend, Executable
from mithril.base import OptionError, unknown
from mithril.ir import Graph, Input, Node, Output, Value

Build = Callable[[Graph, Backend], Executable]
TAG = "backend"


@dataclass(slots=True)
class Piece:
    """A run of operations on one backend."""

    backend: Backend
    executable: Executable
    given: tuple[tuple[str, Value], ...]  # name inside -> value of the whole
    made: tuple[tuple[str, Value], ...]


def places(graph: Graph, default: Backend, others: Mapping[str, Backend]) -> dict[Node, Backend]:
    """The backend of every node but constants; a name that the map does not have is an error."""
    found = {}
    for node in graph.nodes:
        if node.is_constant:
            continue
        name = node.tags.get(TAG)
        if name is None or (name == default.name and name not in others):
            found[node] = default
        elif name in others:
            found[node] = others[name]
        else:
            what, facts, hint = unknown("backend in backend_map", str(name), list(others))
            raise OptionError(what, facts=[*facts, f"wanted by {node.origin}"], hint=hint)
    return found


def pieces(graph: Graph, where: Mapping[Node, Backend]) -> list[tuple[Backend, list[Node]]]:
    """Nodes in a valid order, gathered so that the backend changes as seldom as that allows."""
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


class Partitioned:
    """The executable of a graph on several backends; arrays come and go as the first one's."""

    def __init__(self, graph: Graph, default: Backend, others: Mapping[str, Backend], build: Build) -> None:
        self.graph = graph
        self.default = default
        where = places(graph, default, others)
        rank = {n: k for k, n in enumerate(graph.nodes)}
        self._pieces = [
            self._piece(backend, sorted(run, key=rank.__getitem__), build) for backend, run in pieces(graph, where)
        ]
        constants = [n for n in graph.nodes if n.is_constant and n.result in set(graph.outputs)]
        if constants:
            self._pieces.append(self._piece(default, constants, build))
        self._converted: dict[tuple[str, int], tuple[Any, Any]] = {}

    @property
    def source(self) -> str | None:
        """The generated sources, one after the other."""
        texts = [p.executable.source for p in self._pieces]
        return "\n\n".join(t for t in texts if t) or None

    @property
    def lowered(self) -> frozenset[str]:
        return frozenset().union(*(p.executable.lowered for p in self._pieces))

    def _piece(self, backend: Backend, run: list[Node], build: Build) -> Piece:
        inside = {v for n in run for v in n.results}
        scalars = [
            node
            for node in dict.fromkeys(self.graph.producers.get(v) for n in run for v in n.operands if v is not None)
            if node is not None and node.is_constant and node not in run
        ]
        known = inside | {n.result for n in scalars}
        outer = list(dict.fromkeys(v for n in run for v in n.operands if v is not None and v not in known))
        inputs = tuple(self.graph.input_of.get(v) or Input(v) for v in outer)
        outputs, own = set(self.graph.outputs), set(run)
        wanted = outputs | {v for v in inside if any(u not in own for u in self.graph.users.get(v, ()))}
        made = [v for n in run for v in n.results if v in wanted]
        names = tuple(f"r{k}" for k in range(len(made)))
        title = f"{self.graph.name}_{backend.name}"
        results = tuple(Output(v, name) for name, v in zip(names, made, strict=True))
        graph = Graph(inputs, (*scalars, *run), results, title, self.graph.guards)
        executable = build(graph, backend)
        given = tuple((i.name, i.value) for i in inputs if i.role != "constant")
        return Piece(backend, executable, given, tuple(zip(names, made, strict=True)))

    def __call__(self, params: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
        values: dict[Value, Any] = {}
        home: dict[Value, Backend] = {}
        for i in self.graph.arguments:
            values[i.value] = params[i.name] if i.role == "param" else inputs[i.name]
            home[i.value] = self.default
        for piece in self._pieces:
            own_params: dict[str, Any] = {}
            own_inputs: dict[str, Any] = {}
            for name, value in piece.given:
                given = self.graph.input_of.get(value)
                array = self._handed(values[value], home[value], piece.backend, given)
                (own_params if given is not None and given.role == "param" else own_inputs)[name] = array
            results = piece.executable(own_params, own_inputs)
            for name, value in piece.made:
                values[value], home[value] = results[name], piece.backend
        return {
            name: self._handed(values[v], home[v], self.default, None)
            for name, v in zip(self.graph.output_names, self.graph.outputs, strict=True)
        }

    def _handed(self, array: Any, source: Backend, target: Backend, given: Input | None) -> Any:
        """An array over the border: without a copy where both sides speak DLPack. Parameters are handed over once."""
        if source is target or target.is_array(array):
            return array
        key = (given.name, id(target)) if given is not None and given.role == "param" else None
        if key is not None:
            known = self._converted.get(key)
            if known is not None and known[0] is array:
                return known[1]
        made = target.array(array if hasattr(array, "__dlpack__") else source.to_numpy(array))
        if key is not None:
            self._converted[key] = array, made
        return made
