"""A graph cut into stages that follow each other, equal in work as far as its operations allow.

The forward part is cut where the stages come out even, and among such places where least is alive. What differentiates
an operation goes to the stage whose values it reads, so that activations and parameters stay where they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod

from mithril.errors import OptionError
from mithril.graph import Graph, Input, Node, Value
from mithril_tpu.placing.choose import LINK, forward_nodes
from mithril_tpu.placing.rules import sizes
from mithril_tpu.planning.fusion import walk

SLACK = 1.05  # how much more than the best balance a stage may do, for a narrower cut
_ANYWHERE = frozenset({"constant", "full", "iota"})  # cheaper to make again than to send
_PER_BYTE = 2  # operations that take as long as moving one byte


@dataclass(frozen=True)
class Task:
    """What one stage does, forward or backward, with one chunk of a batch.

    ``takes`` says for inputs that come from other tasks which task makes them, and as which of its outputs.
    """

    stage: int
    backward: bool
    graph: Graph
    takes: Mapping[str, tuple[int, str]]


def cost(node: Node) -> float:
    """The work of a node: its operations, and what it writes, as operations."""
    total = [0.0]

    def count(inner: Node, times: int) -> None:
        types = [None if v is None else v.type for v in inner.operands]
        found = inner.op.flops(types, [v.type for v in inner.results], inner.attributes)  # type: ignore[attr-defined]
        moved = sum(prod(sizes(v)) * v.dtype.itemsize for v in inner.results)
        total[0] += times * ((float(found) if isinstance(found, (int, float)) else 0.0) + _PER_BYTE * moved)

    walk(node, count)
    return total[0]


def cut(graph: Graph, stages: int) -> list[Task]:
    """The tasks of a pipeline: forward ones from the first stage to the last, then backward ones the other way."""
    forward = forward_nodes(graph)
    movable = [n for n in forward if n.op.name not in _ANYWHERE]
    if not 1 <= stages <= max(1, len(movable)):
        raise OptionError(f"pipeline_stages={stages}: this model has {len(movable)} operations to share")
    ends = _ends(movable, graph, stages)
    where = {node: k for k, (a, b) in enumerate(pairwise((0, *ends))) for node in movable[a:b]}
    _place_backward(graph, where, stages)
    return _tasks(graph, where, stages)


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


# -- where the gradients go -------------------------------------------------------------------------------------------
def _place_backward(graph: Graph, where: dict[Node, int], stages: int) -> None:
    homes: dict[Value, set[int]] = {}  # stages that have a value: of a shared parameter all that read it
    for node, k in where.items():
        for v in node.operands:
            if v is not None and v in graph.input_of:
                homes.setdefault(v, set()).add(k)
        homes.update((v, {k}) for v in node.results)
    made: dict[Value, int] = {}  # results of backward nodes
    for node in graph.nodes:
        if node in where or node.op.name in _ANYWHERE:
            continue
        operands = [v for v in node.operands if v is not None]
        bound = min((made[v] for v in operands if v in made), default=stages - 1)
        near = [max((k for k in homes[v] if k <= bound), default=bound) for v in operands if v in homes]
        where[node] = max(near, default=bound)
        made.update(dict.fromkeys(node.results, where[node]))


# -- tasks ------------------------------------------------------------------------------------------------------------
def _tasks(graph: Graph, where: Mapping[Node, int], stages: int) -> list[Task]:
    forward = set(forward_nodes(graph))
    both = any(node not in forward for node in where)
    order = [(k, False) for k in range(stages)] + [(k, True) for k in reversed(range(stages)) if both]
    number = {key: k for k, key in enumerate(order)}
    home = {node: number[k, node not in forward] for node, k in where.items()}
    maker = {v: home[node] for node in home for v in node.results}
    groups: list[list[Node]] = [[] for _ in order]
    for node in graph.nodes:
        if node in home:
            groups[home[node]].append(node)
    wanted: list[dict[Value, None]] = [{} for _ in order]  # values that leave a task
    for k, nodes in enumerate(groups):
        for v in (v for node in nodes for v in node.operands if v is not None):
            if maker.get(v, k) != k:
                wanted[maker[v]][v] = None
    outputs: list[dict[str, Value]] = [{} for _ in order]
    for name, v in zip(graph.output_names, graph.outputs, strict=True):
        outputs[maker.get(v, 0)][name] = v
    return [
        _task(graph, key, nodes, maker, k, wanted[k], outputs[k])
        for k, (key, nodes) in enumerate(zip(order, groups, strict=True))
    ]


def _task(
    graph: Graph,
    key: tuple[int, bool],
    nodes: Sequence[Node],
    maker: Mapping[Value, int],
    number: int,
    leaving: Mapping[Value, None],
    outputs: Mapping[str, Value],
) -> Task:
    """The graph of a task. What costs nothing is made again in each task that reads it."""
    takes: dict[str, tuple[int, str]] = {}
    inputs: dict[Value, Input] = {}
    free: dict[Node, None] = {}
    renamed: dict[Value, Value] = {}

    def enter(v: Value) -> Value:
        producer = graph.producers.get(v)
        if v in graph.input_of:
            inputs.setdefault(v, graph.input_of[v])
        elif producer is not None and v not in maker:
            free[producer] = None
        elif maker[v] != number:
            if v not in renamed:
                renamed[v] = Value(LINK + v.name, v.type)
                takes[LINK + v.name] = (maker[v], LINK + v.name)
                inputs[renamed[v]] = Input(renamed[v])
            return renamed[v]
        return v

    made = [n.replaced(operands=tuple(None if v is None else enter(v) for v in n.operands)) for n in nodes]
    out = {**{LINK + v.name: v for v in leaving}, **{name: enter(v) for name, v in outputs.items()}}
    return Task(
        key[0],
        key[1],
        Graph(
            tuple(inputs.values()),
            (*free, *made),
            tuple(out.values()),
            tuple(out),
            f"{'backward' if key[1] else 'forward'}_{key[0]}",
        ),
        takes,
    )
