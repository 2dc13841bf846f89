"""``ml.staged``: a graph as tasks of stages and chunks, and the order in which they are done."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from mithril.base import OptionError
from mithril.ir import Graph
from mithril_parallel.sharding.api import CHUNK, in_chunks, parts
from mithril_parallel.sharding.collective_buckets import bucketed
from mithril_parallel.sharding.local_graph import DeviceGraph
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
    sharded: DeviceGraph | None = None

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
        current = peak = 0
        for step in self.steps:
            if step.stage == stage and step.chunk is not None:
                current += -1 if step.backward else 1
                peak = max(peak, current)
        return peak if any(task.backward for task in self.tasks) else 1


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
        per_chunk = in_chunks(graph, chunks)
        output_splits = {name: part.split for name, part in per_chunk.outputs.items()}
        cuts = {
            name: split.index(CHUNK) for name, split in {**per_chunk.inputs, **output_splits}.items() if CHUNK in split
        }
        index = next(iter(per_chunk.indices), None)
        graph = per_chunk.graph
    sharded = parts(graph, axes, splits=splits, fsdp=fsdp)[0] if axes else None
    tasks = cut(sharded.graph if sharded is not None else graph, stages)
    tasks = [replace(task, graph=bucketed(task.graph)) for task in tasks]
    return Pipeline(stages, chunks, tasks, order(tasks, stages, chunks, schedule), cuts, index, sharded)


def order(tasks: list[Task], stages: int, chunks: int, schedule: Schedule) -> list[Step]:
    """All steps, as they happen when every stage does its next one as soon as that can be done."""
    has_backward = any(task.backward for task in tasks)
    lists = [_stage_steps(k, stages, chunks, schedule, has_backward) for k in range(stages)]
    number = {(task.stage, task.backward): k for k, task in enumerate(tasks) if not task.once}
    done: set[tuple[int, bool, int]] = set()
    steps: list[Step] = []
    while any(lists):
        ready = []
        for k, remaining in enumerate(lists):
            if not remaining:
                continue
            chunk, backward = remaining[0]
            predecessor = (
                (k + 1, True) if backward and k + 1 < stages else (stages - 1, False) if backward else (k - 1, False)
            )
            if predecessor[0] < 0 or (*predecessor, chunk) in done:
                ready.append((k, backward, chunk))
        for k, backward, chunk in ready:
            lists[k].pop(0)
            steps.append(Step(number[k, backward], k, chunk, backward))
        done.update(ready)
    return steps + [Step(k, task.stage, None, False) for k, task in enumerate(tasks) if task.once]


def _stage_steps(
    stage: int, stages: int, chunks: int, schedule: Schedule, has_backward: bool
) -> list[tuple[int, bool]]:
    """The steps of one stage, in its order."""
    forward = [(m, False) for m in range(chunks)]
    if not has_backward:
        return forward
    backward = [(m, True) for m in range(chunks)]
    if schedule == "gpipe":
        return forward + backward
    ahead = min(stages - stage, chunks)
    mixed = [step for m in range(chunks - ahead) for step in (backward[m], forward[ahead + m])]
    return forward[:ahead] + mixed + backward[chunks - ahead :]
