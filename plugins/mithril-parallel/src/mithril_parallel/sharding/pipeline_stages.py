"""A graph cut into consecutive pipeline stages with balanced work.

The forward pass is cut where the slowest stage has least to compute and to exchange. Backward operations are assigned
to the stage that holds their operands, so that activations and parameters are not sent. Operations that run once after
all chunks (mainly the optimizer's update) are assigned to the stage that holds most bytes of their operands.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import prod

from mithril.graph import Graph, Input, Node, OptionError, Output, Value, flops, is_permutation, is_source
from mithril_parallel.placing.rules import sizes
from mithril_parallel.placing.strategy import LINK, forward_nodes
from mithril_parallel.sharding.collectives import chunk_sum
from mithril_parallel.xla_model.fusion_model import walk

SLACKS = (1.0, 1.05, 1.1, 1.2, 1.4)  # loads of a stage, relative to the best balance, at which narrow cuts are tried
_PER_BYTE = 2  # operations that take as long as one byte of memory traffic
_PER_LINK_BYTE = 100  # the same of a link between devices


@dataclass(frozen=True)
class Task:
    """The work of one stage for one chunk of the batch, forward or backward; or ``once``, after all chunks.

    ``takes`` maps inputs to the task and the output that produce them. Outputs in ``sums`` are added up over chunks. A
    task that runs once reads these sums; its other inputs are equal for all chunks and taken from the last.
    """

    stage: int
    backward: bool
    graph: Graph
    takes: Mapping[str, tuple[int, str]]
    sums: frozenset[str] = frozenset()
    once: bool = False


def cost(node: Node) -> float:
    """Return the cost of a node in operations, including the bytes that it writes."""
    total = [0.0]

    def count(inner: Node, times: int) -> None:
        operations = flops(inner)
        written = sum(prod(sizes(v)) * v.dtype.itemsize for v in inner.results)
        total[0] += times * ((float(operations) if isinstance(operations, (int, float)) else 0.0) + _PER_BYTE * written)

    walk(node, count)
    return total[0]


def split_stages(graph: Graph, stages: int) -> list[Task]:
    """Return the tasks of a pipeline: forward tasks by stage, backward tasks in reverse order, then the rest."""
    once = _update_nodes(graph)
    forward = [n for n in forward_nodes(graph) if n not in once]
    movable = [n for n in forward if not is_source(n)]
    ends = stage_ends(movable, graph, stages)
    stage_of = {node: k for k, (a, b) in enumerate(pairwise((0, *ends))) for node in movable[a:b]}
    homes = _assign_backward(graph, stage_of, once, stages)
    rounds = _assign_once(graph, once, stage_of, homes)
    return _tasks(graph, stage_of, rounds, stages)


def _update_nodes(graph: Graph) -> dict[Node, None]:
    """Return the nodes of an optimizer's update, and all others that depend on a sum over chunks."""
    once: dict[Node, None] = {}
    late_values: set[Value] = set()
    for node in graph.nodes:
        late = node.op is chunk_sum or any(v in late_values for v in node.operands)
        if late or (node.tags.get("phase") == "update" and not is_source(node)):
            once[node] = None
            late_values.update(node.results)
    return once


# -- cuts of the forward pass -----------------------------------------------------------------------------------------
def stage_ends(nodes: Sequence[Node], graph: Graph, stages: int) -> list[int]:
    """Return the end of each stage in ``nodes``; raise OptionError if there are fewer nodes than stages."""
    if not 1 <= stages <= max(1, len(nodes)):
        raise OptionError(
            f"pipeline_stages={stages} is out of range: this model has {len(nodes)} operations to distribute",
            hint=f"set pipeline_stages between 1 and {max(1, len(nodes))}",
        )
    sums = [0.0, *accumulate(cost(n) for n in nodes)]
    width = _live_bytes(nodes, graph)
    balance = _minimax_load(sums, stages)

    def slowest(ends: list[int]) -> float:
        """Return the load of the slowest stage, with the bytes that it receives and sends."""
        return max(
            sums[b] - sums[a] + _PER_LINK_BYTE * ((width[a] if a else 0) + (width[b] if b < len(nodes) else 0))
            for a, b in pairwise((0, *ends))
        )

    return min((_narrow_ends(sums, width, stages, slack * balance) for slack in SLACKS), key=slowest)


def _narrow_ends(sums: Sequence[float], width: Sequence[int], stages: int, limit: float) -> list[int]:
    """Return the ends of stages whose loads are within a limit, at the fewest live bytes."""
    count = len(sums) - 1
    latest = _earliest_starts(sums, stages, limit)
    ends, start = [], 0
    for k in range(1, stages):
        fits = [
            p for p in range(start + 1, count - (stages - k) + 1) if p >= latest[k] and sums[p] - sums[start] <= limit
        ]
        start = min(fits, key=lambda p: (width[p], abs(sums[p] - k * sums[-1] / stages))) if fits else start + 1
        ends.append(start)
    return [*ends, count]


def _minimax_load(sums: Sequence[float], stages: int) -> float:
    """Return the smallest possible load of the most loaded stage."""
    low = max(sums[-1] / stages, *(b - a for a, b in pairwise(sums)))
    high = sums[-1]
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if _stages_needed(sums, middle) <= stages else (middle, high)
    return high


def _stages_needed(sums: Sequence[float], limit: float) -> int:
    count, start = 1, 0.0
    for before, now in pairwise(sums):
        if now - start > limit:
            count, start = count + 1, before
    return count


def _earliest_starts(sums: Sequence[float], stages: int, limit: float) -> list[int]:
    """Return for each boundary the first position from which the remaining stages can do the rest within ``limit``."""
    starts, end = [len(sums) - 1] * (stages + 1), len(sums) - 1
    for k in range(stages - 1, 0, -1):
        start = end
        while start > 0 and sums[end] - sums[start - 1] <= limit:
            start -= 1
        starts[k] = end = start
    return starts


def _live_bytes(nodes: Sequence[Node], graph: Graph) -> list[int]:
    """Return the live bytes between each pair of consecutive nodes."""
    step = {node: k for k, node in enumerate(nodes)}
    change = [0] * (len(nodes) + 2)
    for node in nodes:
        for v in node.results:
            last = max((step[u] for u in graph.users.get(v, ()) if u in step), default=step[node])
            change[step[node] + 1] += (size := prod(sizes(v)) * v.dtype.itemsize)
            change[last + 1] -= size
    return list(accumulate(change))


# -- assignment of gradients and updates ------------------------------------------------------------------------------
Homes = dict[Value, set[int]]  # stages that hold a value: its producer's and its consumers'


def _assign_backward(graph: Graph, stage_of: dict[Node, int], once: Mapping[Node, None], stages: int) -> Homes:
    homes: Homes = {}
    for node, k in stage_of.items():
        for v in (*node.operands, *node.results):
            if v is not None:
                homes.setdefault(v, set()).add(k)
    backward_stage: dict[Value, int] = {}  # results of backward nodes
    for node in graph.nodes:
        if node in stage_of or node in once or is_source(node):
            continue
        operands = [v for v in node.operands if v is not None]
        bound = min((backward_stage[v] for v in operands if v in backward_stage), default=stages - 1)
        candidates = [max((k for k in homes[v] if k <= bound), default=bound) for v in operands if v in homes]
        stage_of[node] = max(candidates, default=bound)
        backward_stage.update(dict.fromkeys(node.results, stage_of[node]))
    for node in reversed(graph.nodes):
        if is_permutation(node) and node.operands[0] in backward_stage and node.result not in graph.outputs:
            readers = [stage_of[n] for n in graph.users.get(node.result, ()) if n in stage_of]
            stage_of[node] = backward_stage[node.result] = max(readers, default=stage_of[node])
    homes.update((v, {k}) for v, k in backward_stage.items())
    return homes


def _assign_once(graph: Graph, once: Mapping[Node, None], stage_of: dict[Node, int], homes: Homes) -> dict[Node, int]:
    """Assign the nodes that run once to stages; return their rounds, which are later than those of their producers.

    Parameters and their optimizer slots are not sent. Small sums over all parameters are sent to later stages.
    """
    rounds: dict[Node, int] = {}
    producer_of: dict[Value, Node] = {}
    for node in once:
        read = [v for v in node.operands if v is not None]
        bytes_by_stage: dict[int, int] = {}
        for v in read:
            for k in homes.get(v, ()):
                # an input counts twice: if it is sent to another stage, its new value has to be sent back
                weight = 2 if v in graph.input_of else 1
                bytes_by_stage[k] = bytes_by_stage.get(k, 0) + weight * prod(sizes(v)) * v.dtype.itemsize
        stage = max(bytes_by_stage, key=lambda k: (bytes_by_stage[k], k), default=0)
        producers = [producer_of[v] for v in read if v in producer_of]
        rounds[node] = max((rounds[n] + (stage_of[n] != stage) for n in producers), default=0)
        stage_of[node] = stage
        for v in (*(v for v in read if v not in homes), *node.results):
            homes[v] = {stage}
            producer_of.update((result, node) for result in node.results)
    return rounds


# -- tasks ------------------------------------------------------------------------------------------------------------
def _tasks(graph: Graph, stage_of: Mapping[Node, int], rounds: Mapping[Node, int], stages: int) -> list[Task]:
    forward = set(forward_nodes(graph))
    has_backward = any(node not in forward and node not in rounds for node in stage_of)
    order: list[Key] = [(k, "forward", 0) for k in range(stages)]
    order += [(k, "backward", 0) for k in reversed(range(stages)) if has_backward]
    late = {(rounds[node], stage_of[node]) for node in rounds if node.op is not chunk_sum}
    order += [(k, "once", r) for r, k in sorted(late)]
    number = {key: k for k, key in enumerate(order)}
    sums = {node.result: node.operands[0] for node in rounds if node.op is chunk_sum}
    home = {
        node: number[k, "once" if node in rounds else "forward" if node in forward else "backward", rounds.get(node, 0)]
        for node, k in stage_of.items()
        if node.op is not chunk_sum
    }
    return _TaskGraphs(graph, order, home, sums).run()


Key = tuple[int, str, int]  # stage, kind and round of a task


class _TaskGraphs:
    """Builds the graphs of the tasks. Source nodes are repeated in each task that reads them."""

    def __init__(
        self, graph: Graph, order: list[Key], home: Mapping[Node, int], sums: Mapping[Value, Value | None]
    ) -> None:
        self.graph, self.order, self.home = graph, order, home
        self.sums = sums  # sums over chunks -> their summands
        self.task_of = {v: home[node] for node in home for v in node.results}
        self.outputs_by_task: list[dict[str, Value]] = [{} for _ in order]  # values for other tasks, by output name
        self.summed: list[set[str]] = [set() for _ in order]
        self.outputs: list[dict[str, Value]] = [{} for _ in order]

    def run(self) -> list[Task]:
        groups: list[list[Node]] = [[] for _ in self.order]
        for node in self.graph.nodes:
            if node in self.home:
                groups[self.home[node]].append(node)
        for name, v in zip(self.graph.output_names, self.graph.outputs, strict=True):
            summand = self.sums.get(v)
            k = self.task_of[summand] if summand is not None else self.task_of.get(v, 0)
            self.outputs[k][name] = v if summand is None else summand
            if summand is not None:
                self.summed[k].add(name)
        # Collects the values that each task sends.
        parts = [self._collect(k, nodes) for k, nodes in enumerate(groups)]
        return [self._task(k, *part) for k, part in enumerate(parts)]

    def _collect(
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
            elif v not in self.task_of and v not in self.sums and producer is not None:
                free[producer] = None
            elif self.task_of.get(v) != number:
                if v not in renamed:
                    renamed[v] = Value(LINK + v.name, v.type)
                    takes[LINK + v.name] = self._producing_task(v)
                    # the batch is determined from the inputs, which values read once are not part of
                    role = "state" if self.order[number][1] == "once" else "input"
                    inputs[renamed[v]] = Input(renamed[v], role)
                return renamed[v]
            return v

        new_nodes = [n.replaced(operands=tuple(None if v is None else enter(v) for v in n.operands)) for n in nodes]
        self.outputs[number] = {name: enter(v) for name, v in self.outputs[number].items()}
        return inputs, [*free, *new_nodes], takes

    def _producing_task(self, v: Value) -> tuple[int, str]:
        """Return the task that computes a value, and the name of its output."""
        summand = self.sums.get(v)
        value = v if summand is None else summand
        k, name = self.task_of[value], LINK + v.name
        self.outputs_by_task[k][name] = value
        if summand is not None:
            self.summed[k].add(name)
        return k, name

    def _task(
        self, number: int, inputs: dict[Value, Input], nodes: list[Node], takes: dict[str, tuple[int, str]]
    ) -> Task:
        stage, kind, turn = self.order[number]
        out = {**self.outputs_by_task[number], **self.outputs[number]}
        name = f"{kind}_{stage}" if not turn else f"{kind}_{stage}_{turn}"
        results_by_name = {r.name: r for r in self.graph.results}
        results = tuple(
            replace(results_by_name[n], value=v) if n in results_by_name else Output(v, n) for n, v in out.items()
        )
        graph = Graph(tuple(inputs.values()), tuple(nodes), results, name)
        return Task(stage, kind == "backward", graph, takes, frozenset(self.summed[number]), kind == "once")
