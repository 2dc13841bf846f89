"""Interpreter that runs a graph operation by operation, each compiled separately."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mithril.backend import Backend
from mithril.graph import Graph, Input, Node, Output, Value, attributes_key, structural_hash

Watch = Callable[[Node, float, float], None]


@dataclass(slots=True)
class _Step:
    node: Node
    run: Any  # inputs by name -> results by name
    operands: tuple[tuple[str, Value], ...]
    results: tuple[tuple[str, Value], ...]
    dead: tuple[Value, ...]  # values without later uses


class Interpreter:
    """An executable that runs one operation at a time and reports its time to a watcher.

    The graph must be static, because the sizes of an operation do not follow from its operands alone.
    """

    def __init__(self, graph: Graph, backend: Backend) -> None:
        self.graph = graph
        self.backend = backend
        self._built: dict[Any, Any] = {}
        self._constants = {i.value: backend.array(i.data) for i in graph.inputs if i.data is not None}
        scalars = {n.result: n for n in graph.nodes if n.is_constant}
        nodes = [n for n in graph.nodes if not n.is_constant]
        last = {v: k for k, n in enumerate(nodes) for v in n.operands if v is not None}
        retained = {*graph.outputs, *self._constants, *scalars}
        self._steps = [
            self._step(
                n,
                scalars,
                tuple(v for v in dict.fromkeys(n.operands) if v in last and last[v] == k and v not in retained),
            )
            for k, n in enumerate(nodes)
        ]
        self._scalars = [(v, self._step(scalars[v], {}, ())) for v in dict.fromkeys(graph.outputs) if v in scalars]

    def _step(self, node: Node, scalars: Mapping[Value, Node], dead: tuple[Value, ...]) -> _Step:
        arrays = [v for v in dict.fromkeys(node.operands) if v is not None and v not in scalars]
        operands = tuple((f"a{k}", v) for k, v in enumerate(arrays))
        key = (
            node.op,
            tuple(
                None
                if v is None
                else (arrays.index(v), v.type)
                if v in arrays
                else attributes_key(scalars[v].attributes)
                for v in node.operands
            ),
            attributes_key(node.attributes),
            tuple(structural_hash(r) for r in node.regions),
        )
        run = self._built.get(key)
        if run is None:
            run = self._built[key] = self._build(node, arrays, scalars)
        return _Step(node, run, operands, tuple((f"r{k}", v) for k, v in enumerate(node.results)), dead)

    def _build(self, node: Node, arrays: list[Value], scalars: Mapping[Value, Node]) -> Any:
        inner = {v: Value(f"a{k}", v.type) for k, v in enumerate(arrays)}
        before = [scalars[v] for v in dict.fromkeys(node.operands) if v is not None and v in scalars]
        clone = node.replaced(operands=tuple(None if v is None else inner.get(v, v) for v in node.operands))
        graph = Graph(
            tuple(Input(v) for v in inner.values()),
            (*before, clone),
            tuple(Output(v, f"r{k}") for k, v in enumerate(node.results)),
            node.op.name,
        )
        return self.backend.build_step(graph)

    def run(self, arguments: Mapping[str, Any], watch: Watch | None = None) -> dict[str, Any]:
        """Run the graph and return its outputs; call ``watch(node, start, seconds)`` after each completed operation."""
        backend, clock = self.backend, time.perf_counter
        values = dict(self._constants)
        for i in self.graph.arguments:
            values[i.value] = arguments[i.name]
        for step in self._steps:
            operands = {name: values[v] for name, v in step.operands}
            start = clock()
            results = step.run({}, operands)
            backend.synchronize(results)
            seconds = clock() - start
            for name, value in step.results:
                values[value] = results[name]
            if watch is not None:
                watch(step.node, start, seconds)
            for value in step.dead:
                del values[value]
        for value, step in self._scalars:
            values[value] = step.run({}, {})["r0"]
        return {name: values[v] for name, v in zip(self.graph.output_names, self.graph.outputs, strict=True)}
