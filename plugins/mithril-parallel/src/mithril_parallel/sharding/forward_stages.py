"""A forward graph as consecutive stages, each of which hands values to the next one only."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import pairwise

from mithril.graph import Graph, Input, Node, Output, Value
from mithril_parallel.placing.strategy import LINK
from mithril_parallel.sharding.pipeline_stages import cost, stage_ends


@dataclass(frozen=True)
class ForwardStage:
    """The graph of one stage: it takes values from the previous stage and gives others to the next one, in order.

    Its ``results`` are those of the whole graph that it computes. The last stage computes results that follow.
    """

    graph: Graph
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    results: tuple[str, ...]
    share: float  # of the work


def forward_stages(graph: Graph, count: int, last: Collection[str] = ()) -> list[ForwardStage]:
    """Cut a forward graph into stages of balanced work; the results ``last`` are those of the last stage.

    Operations that depend on no parameter, or on parameters only, are repeated in each stage that reads their results:
    schedules that divide backward passes lose the gradients of parameters that a stage sends on without an input.
    """
    return _Stages(graph, count, last).run()


class _Stages:
    def __init__(self, graph: Graph, count: int, last: Collection[str]) -> None:
        self.graph, self.count = graph, count
        on_params = {i.value for i in graph.with_role("param")}
        on_inputs = {i.value for i in graph.arguments} - on_params
        self.nodes: list[Node] = []  # that depend on parameters and inputs
        for node in graph.nodes:
            depends = [any(v in values for v in node.operands) for values in (on_params, on_inputs)]
            for values, does in zip((on_params, on_inputs), depends, strict=True):
                values.update(node.results if does else ())
            if all(depends):
                self.nodes.append(node)
        ends = stage_ends(self.nodes, graph, count)
        self.stage_of = {n: k for k, (a, b) in enumerate(pairwise((0, *ends))) for n in self.nodes[a:b]}
        self.home = {v: k for node, k in self.stage_of.items() for v in node.results}
        self.results: list[dict[str, Value]] = [{} for _ in range(count)]
        for name, v in zip(graph.output_names, graph.outputs, strict=True):
            is_late = name in last or v not in self.home
            self.results[count - 1 if is_late else self.home[v]][name] = v
        self.last_reader = dict(self.home)
        for k in range(count):
            for v in self._reads(k):
                self.last_reader[v] = max(self.last_reader.get(v, 0), k)

    def _members(self, k: int) -> list[Node]:
        """Return the operations of a stage, with those that it repeats."""
        needed = set(self.results[k].values())
        members = []
        for node in reversed(self.graph.nodes):
            is_free = node not in self.stage_of and any(v in needed for v in node.results)
            if is_free or self.stage_of.get(node) == k:
                members.append(node)
                needed.update(v for v in node.operands if v is not None)
        return members[::-1]

    def _reads(self, k: int) -> dict[Value, None]:
        """Return the values of previous stages and the inputs that a stage reads."""
        members = self._members(k)
        inner = {v for node in members for v in node.results}
        operands = [v for node in members for v in node.operands if v is not None]
        return {v: None for v in (*operands, *self.results[k].values()) if v not in inner}

    def _crossing(self, k: int) -> list[Value]:
        """Return the values that stage ``k`` gives to the next one."""
        return [v for v, home in self.home.items() if home <= k < self.last_reader[v]]

    def run(self) -> list[ForwardStage]:
        work = [0.0] * self.count
        for node, k in self.stage_of.items():
            work[k] += cost(node)
        total = sum(work) or 1.0
        return [self._stage(k, work[k] / total) for k in range(self.count)]

    def _stage(self, k: int, share: float) -> ForwardStage:
        received = self._crossing(k - 1) if k else []
        handed_on = self._crossing(k) if k < self.count - 1 else []
        new = {v: Value(LINK + v.name, v.type) for v in received}
        read = set(self._reads(k))
        inputs = [i for i in self.graph.inputs if i.value in read]
        inputs += [Input(v, "input") for v in new.values()]

        def renamed(values: Iterable[Value | None]) -> tuple[Value | None, ...]:
            return tuple(None if v is None else new.get(v, v) for v in values)

        nodes = [node.replaced(operands=renamed(node.operands)) for node in self._members(k)]
        outputs = {**{LINK + v.name: v for v in handed_on}, **self.results[k]}
        results = tuple(Output(new.get(v, v), name) for name, v in outputs.items())
        names = tuple(LINK + v.name for v in handed_on)
        graph = Graph(tuple(inputs), tuple(nodes), results, f"stage_{k}")
        return ForwardStage(graph, tuple(v.name for v in new.values()), names, tuple(self.results[k]), share)
