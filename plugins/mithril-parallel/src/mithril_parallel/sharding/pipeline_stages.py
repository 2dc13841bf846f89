"""A graph cut into stages that follow each other, equal in work as far as its operations allow.

The forward part is cut where the stages come out even, and among such places where least is alive. What differentiates
an operation goes to the stage whose values it reads, so that activations and parameters stay where they are. What is
done once after all chunks (an optimizer's update, above all) goes to the stage that has most of what it reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import prod

from mithril.base import OptionError
from mithril.ir import Graph, Input, Node, Output, Value, is_permutation, is_source
from mithril_parallel.placing.rules import sizes
from mithril_parallel.placing.strategy import LINK, forward_nodes
from mithril_parallel.sharding.collectives import chunk_sum
from mithril_parallel.xla_model.fusion_model import walk

SLACK = 1.05  # how much more than the best balance a stage may do, for a narrower cut
_PER_BYTE = 2  # operations that take as long as moving one byte


@dataclass(frozen=True)
class Task:
    """What one stage does, forward or backward, with one chunk of a batch; or ``once``, after all of them.

    ``takes`` says for inputs that come from other tasks which task makes them, and as which of its outputs. Outputs in
    ``sums`` are added up over chunks. A task that is done once takes those sums, and of other values the last chunk's,
    which are the same for all.
    """

    stage: int
    backward: bool
    graph: Graph
    takes: Mapping[str, tuple[int, str]]
    sums: frozenset[str] = frozenset()
    once: bool = False


def cost(node: Node) -> float:
    """The work of a node: its operations, and what it writes, as operations."""
    total = [0.0]

    def count(inner: Node, times: int) -> None:
        types = [None if v is None else v.type for v in inner.operands]
        found = inner.op.flops(types, [v.type for v in inner.results], inner.attributes)
        moved = sum(prod(sizes(v)) * v.dtype.itemsize for v in inner.results)
        total[0] += times * ((float(found) if isinstance(found, (int, float)) else 0.0) + _PER_BYTE * moved)

    walk(node, count)
    return total[0]


def cut(graph: Graph, stages: int) -> list[Task]:
    """The tasks of a pipeline: forward ones from the first stage to the last, backward ones the other way, the rest."""
    once = _done_once(graph)
    forward = [n for n in forward_nodes(graph) if n not in once]
    movable = [n for n in forward if not is_source(n)]
    if not 1 <= stages <= max(1, len(movable)):
        raise OptionError(f"pipeline_stages={stages}: this model has {len(movable)} operations to share")
    ends = _ends(movable, graph, stages)
    where = {node: k for k, (a, b) in enumerate(pairwise((0, *ends))) for node in movable[a:b]}
    homes = _place_backward(graph, where, once, stages)
    rounds = _place_once(graph, once, where, homes)
    return _tasks(graph, where, rounds, stages)


def _done_once(graph: Graph) -> dict[Node, None]:
    """The nodes of an optimizer's update, and all others that read a sum over chunks."""
    found: dict[Node, None] = {}
    made: set[Value] = set()
    for node in graph.nodes:
        late = node.op is chunk_sum or any(v in made for v in node.operands)
        if late or (node.tags.get("phase") == "update" and not is_source(node)):
            found[node] = None
            made.update(node.results)
    return found


# -- where to cut -----------------------------------------------------------------------------------------------------
def _ends(nodes: Sequence[Node], graph: Graph, stages: int) -> list[int]:
    """The end of each stage in ``nodes``."""
    sums = [0.0, *accumulate(cost(n) for n in nodes)]
    limit = SLACK * _least_most(sums, stages)
    width = _alive(nodes, graph)
    latest = _from_behind(sums, stages, limit)
    ends, start = [], 0
    for k in range(1, stages):
        fits = [
            p
            for p in range(start + 1, len(nodes) - (stages - k) + 1)
            if p >= latest[k] and sums[p] - sums[start] <= limit
        ]
        start = min(fits, key=lambda p: (width[p], abs(sums[p] - k * sums[-1] / stages))) if fits else start + 1
        ends.append(start)
    return [*ends, len(nodes)]


def _least_most(sums: Sequence[float], stages: int) -> float:
    """The least that the busiest stage must do."""
    low = max(sums[-1] / stages, *(b - a for a, b in pairwise(sums)))
    high = sums[-1]
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if _needed(sums, middle) <= stages else (middle, high)
    return high


def _needed(sums: Sequence[float], limit: float) -> int:
    count, start = 1, 0.0
    for before, now in pairwise(sums):
        if now - start > limit:
            count, start = count + 1, before
    return count


def _from_behind(sums: Sequence[float], stages: int, limit: float) -> list[int]:
    """For each boundary the first place from which the stages behind it can do the rest."""
    found, end = [len(sums) - 1] * (stages + 1), len(sums) - 1
    for k in range(stages - 1, 0, -1):
        start = end
        while start > 0 and sums[end] - sums[start - 1] <= limit:
            start -= 1
        found[k] = end = start
    return found


def _alive(nodes: Sequence[Node], graph: Graph) -> list[int]:
    """Bytes that must cross each place between two nodes."""
    step = {node: k for k, node in enumerate(nodes)}
    change = [0] * (len(nodes) + 2)
    for node in nodes:
        for v in node.results:
            last = max((step[u] for u in graph.users.get(v, ()) if u in step), default=step[node])
            change[step[node] + 1] += (size := prod(sizes(v)) * v.dtype.itemsize)
            change[last + 1] -= size
    return list(accumulate(change))


# -- where the gradients go, and what follows them --------------------------------------------------------------------
Homes = dict[Value, set[int]]  # stages that have a value: that which makes it, and all that read it


def _place_backward(graph: Graph, where: dict[Node, int], once: Mapping[Node, None], stages: int) -> Homes:
    homes: Homes = {}
    for node, k in where.items():
        for v in (*node.operands, *node.results):
            if v is not None:
                homes.setdefault(v, set()).add(k)
    made: dict[Value, int] = {}  # results of backward nodes
    for node in graph.nodes:
        if node in where or node in once or is_source(node):
            continue
        operands = [v for v in node.operands if v is not None]
        bound = min((made[v] for v in operands if v in made), default=stages - 1)
        near = [max((k for k in homes[v] if k <= bound), default=bound) for v in operands if v in homes]
        where[node] = max(near, default=bound)
        made.update(dict.fromkeys(node.results, where[node]))
    for node in reversed(graph.nodes):
        if is_permutation(node) and node.operands[0] in made and node.result not in graph.outputs:
            readers = [where[n] for n in graph.users.get(node.result, ()) if n in where]
            where[node] = made[node.result] = max(readers, default=where[node])
    homes.update((v, {k}) for v, k in made.items())
    return homes


def _place_once(graph: Graph, once: Mapping[Node, None], where: dict[Node, int], homes: Homes) -> dict[Node, int]:
    """The stages of what is done once, and in which round: what comes from another stage is made in an earlier one.

    Parameters, and what is kept for them, stay where they are. Small sums of all parameters go on to later stages.
    """
    rounds: dict[Node, int] = {}
    maker: dict[Value, Node] = {}
    for node in once:
        read = [v for v in node.operands if v is not None]
        there: dict[int, int] = {}
        for v in read:
            for k in homes.get(v, ()):
                weight = 2 if v in graph.input_of else 1  # what is carried on stays rather than what is made
                there[k] = there.get(k, 0) + weight * prod(sizes(v)) * v.dtype.itemsize
        stage = max(there, key=lambda k: (there[k], k), default=0)
        before = [maker[v] for v in read if v in maker]
        rounds[node] = max((rounds[n] + (where[n] != stage) for n in before), default=0)
        where[node] = stage
        for v in (*(v for v in read if v not in homes), *node.results):
            homes[v] = {stage}
            maker.update((result, node) for result in node.results)
    return rounds


# -- tasks ------------------------------------------------------------------------------------------------------------
def _tasks(graph: Graph, where: Mapping[Node, int], rounds: Mapping[Node, int], stages: int) -> list[Task]:
    forward = set(forward_nodes(graph))
    both = any(node not in forward and node not in rounds for node in where)
    order: list[Key] = [(k, "forward", 0) for k in range(stages)]
    order += [(k, "backward", 0) for k in reversed(range(stages)) if both]
    late = {(rounds[node], where[node]) for node in rounds if node.op is not chunk_sum}
    order += [(k, "once", r) for r, k in sorted(late)]
    number = {key: k for k, key in enumerate(order)}
    sums = {node.result: node.operands[0] for node in rounds if node.op is chunk_sum}
    home = {
        node: number[k, "once" if node in rounds else "forward" if node in forward else "backward", rounds.get(node, 0)]
        for node, k in where.items()
        if node.op is not chunk_sum
    }
    return _Cutting(graph, order, home, sums).run()


Key = tuple[int, str, int]  # of a task: stage, kind, round


class _Cutting:
    """The graphs of the tasks. What costs nothing is made again in each task that reads it."""

    def __init__(
        self, graph: Graph, order: list[Key], home: Mapping[Node, int], sums: Mapping[Value, Value | None]
    ) -> None:
        self.graph, self.order, self.home = graph, order, home
        self.sums = sums  # over chunks, of what
        self.maker = {v: home[node] for node in home for v in node.results}
        self.leaving: list[dict[str, Value]] = [{} for _ in order]  # outputs of tasks
        self.summed: list[set[str]] = [set() for _ in order]
        self.outputs: list[dict[str, Value]] = [{} for _ in order]

    def run(self) -> list[Task]:
        groups: list[list[Node]] = [[] for _ in self.order]
        for node in self.graph.nodes:
            if node in self.home:
                groups[self.home[node]].append(node)
        for name, v in zip(self.graph.output_names, self.graph.outputs, strict=True):
            of = self.sums.get(v)
            k = self.maker[of] if of is not None else self.maker.get(v, 0)
            self.outputs[k][name] = v if of is None else of
            if of is not None:
                self.summed[k].add(name)
        parts = [self._part(k, nodes) for k, nodes in enumerate(groups)]  # then all know what leaves them
        return [self._task(k, *part) for k, part in enumerate(parts)]

    def _part(
        self, number: int, nodes: list[Node]
    ) -> tuple[dict[Value, Input], list[Node], dict[str, tuple[int, str]]]:
        takes: dict[str, tuple[int, str]] = {}
        inputs: dict[Value, Input] = {}
        free: dict[Node, None] = {}
        renamed: dict[Value, Value] = {}

        def enter(v: Value) -> Value:
            producer = self.graph.producers.get(v)
            if v in self.graph.input_of:
                inputs.setdefault(v, self.graph.input_of[v])
            elif v not in self.maker and v not in self.sums and producer is not None:
                free[producer] = None
            elif self.maker.get(v) != number:
                if v not in renamed:
                    renamed[v] = Value(LINK + v.name, v.type)
                    takes[LINK + v.name] = self._leave(v)
                    role = "state" if self.order[number][1] == "once" else "input"  # which a batch is looked for among
                    inputs[renamed[v]] = Input(renamed[v], role, tags={"handed_on": True})
                return renamed[v]
            return v

        made = [n.replaced(operands=tuple(None if v is None else enter(v) for v in n.operands)) for n in nodes]
        self.outputs[number] = {name: enter(v) for name, v in self.outputs[number].items()}
        return inputs, [*free, *made], takes

    def _leave(self, v: Value) -> tuple[int, str]:
        """The task that makes a value, and the name under which it gives it."""
        of = self.sums.get(v)
        made = v if of is None else of
        k, name = self.maker[made], LINK + v.name
        self.leaving[k][name] = made
        if of is not None:
            self.summed[k].add(name)
        return k, name

    def _task(
        self, number: int, inputs: dict[Value, Input], nodes: list[Node], takes: dict[str, tuple[int, str]]
    ) -> Task:
        stage, kind, turn = self.order[number]
        out = {**self.leaving[number], **self.outputs[number]}
        name = f"{kind}_{stage}" if not turn else f"{kind}_{stage}_{turn}"
        own = {r.name: r for r in self.graph.results}
        results = tuple(replace(own[n], value=v) if n in own else Output(v, n) for n, v in out.items())
        graph = Graph(tuple(inputs.values()), tuple(nodes), results, name)
        return Task(stage, kind == "backward", graph, takes, frozenset(self.summed[number]), kind == "once")
