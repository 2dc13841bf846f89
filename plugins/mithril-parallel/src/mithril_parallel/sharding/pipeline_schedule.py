"""``ml.staged``: a graph as tasks of stages and chunks, and the order in which they are done."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from mithril.base import OptionError
from mithril.ir import Graph
from mithril_parallel.sharding.api import CHUNK, in_chunks, parts
from mithril_parallel.sharding.collective_buckets import bucketed
from mithril_parallel.sharding.local_graph import Sharded
from mithril_parallel.sharding.pipeline_stages import Task, cost, cut

Schedule = Literal["gpipe", "1f1b"]


@dataclass(frozen=True)
class Step:
    """One task with one chunk; without a chunk where it is done once."""

    task: int
    stage: int
    chunk: int | None
    backward: bool


@dataclass(frozen=True)
class Pipeline:
    """``steps`` is an order in which everything a step needs has been done; each stage does its own in that order.

    ``axes`` says which axis of an input is cut into chunks, and along which axis an output's chunks lie side by side;
    other outputs are sums over chunks where their task says so, or the same for every chunk. ``index`` is the input
    that holds the number of the chunk, where tasks want to know it. ``sharded`` says how each chunk is divided among
    the devices of a stage, where it is.
    """

    stages: int
    chunks: int
    tasks: list[Task]
    steps: list[Step]
    axes: Mapping[str, int]
    index: str | None
    sharded: Sharded | None = None

    @property
    def shares(self) -> list[float]:
        """The part of all work that each stage does."""
        work = [0.0] * self.stages
        for task in self.tasks:
            work[task.stage] += sum(cost(node) for node in task.graph.nodes)
        total = sum(work) or 1.0
        return [w / total for w in work]

    def alive(self, stage: int) -> int:
        """The most chunks of which a stage keeps something for the way back."""
        now = most = 0
        for step in self.steps:
            if step.stage == stage and step.chunk is not None:
                now += -1 if step.backward else 1
                most = max(most, now)
        return most if any(task.backward for task in self.tasks) else 1


def staged(
    graph: Graph,
    stages: int,
    chunks: int = 1,
    schedule: Schedule = "1f1b",
    *,
    axes: Mapping[str, int] | None = None,
    splits: Mapping[str, int] | None = None,
    fsdp: bool = False,
) -> Pipeline:
    """Cut ``graph`` (with gradients or without, a whole training step too) into ``stages``, its batch into ``chunks``.

    With ``axes`` what a stage does is cut for a mesh, as by ``ml.shard``. Gradients are summed over chunks first: what
    devices exchange of them, and an optimizer's update, is done once.

    ``"gpipe"`` does all chunks forward before the first goes back; ``"1f1b"`` goes back as soon as it can, so that a
    stage keeps the activations of as many chunks as there are stages after it, and not of all.
    """
    if chunks < 1:
        raise OptionError(f"pipeline_chunks={chunks} must be at least 1")
    cuts: dict[str, int] = {}
    index = None
    if chunks > 1:
        made = in_chunks(graph, chunks)
        given = {name: part.split for name, part in made.outputs.items()}
        cuts = {name: split.index(CHUNK) for name, split in {**made.inputs, **given}.items() if CHUNK in split}
        index = next(iter(made.indices), None)
        graph = made.graph
    sharded = parts(graph, axes, splits=splits, fsdp=fsdp)[0] if axes else None
    tasks = cut(sharded.graph if sharded is not None else graph, stages)
    tasks = [replace(task, graph=bucketed(task.graph)) for task in tasks]
    return Pipeline(stages, chunks, tasks, order(tasks, stages, chunks, schedule), cuts, index, sharded)


def order(tasks: list[Task], stages: int, chunks: int, schedule: Schedule) -> list[Step]:
    """All steps, as they happen when every stage does its next one as soon as that can be done."""
    back = any(task.backward for task in tasks)
    lists = [_own(k, stages, chunks, schedule, back) for k in range(stages)]
    number = {(task.stage, task.backward): k for k, task in enumerate(tasks) if not task.once}
    done: set[tuple[int, bool, int]] = set()
    steps: list[Step] = []
    while any(lists):
        now = []
        for k, mine in enumerate(lists):
            if not mine:
                continue
            chunk, backward = mine[0]
            before = (
                (k + 1, True) if backward and k + 1 < stages else (stages - 1, False) if backward else (k - 1, False)
            )
            if before[0] < 0 or (*before, chunk) in done:
                now.append((k, backward, chunk))
        for k, backward, chunk in now:
            lists[k].pop(0)
            steps.append(Step(number[k, backward], k, chunk, backward))
        done.update(now)
    return steps + [Step(k, task.stage, None, False) for k, task in enumerate(tasks) if task.once]


def _own(stage: int, stages: int, chunks: int, schedule: Schedule, back: bool) -> list[tuple[int, bool]]:
    """The steps of one stage, in its order."""
    forward = [(m, False) for m in range(chunks)]
    if not back:
        return forward
    backward = [(m, True) for m in range(chunks)]
    if schedule == "gpipe":
        return forward + backward
    ahead = min(stages - stage, chunks)
    mixed = [step for m in range(chunks - ahead) for step in (backward[m], forward[ahead + m])]
    return forward[:ahead] + mixed + backward[chunks - ahead :]
