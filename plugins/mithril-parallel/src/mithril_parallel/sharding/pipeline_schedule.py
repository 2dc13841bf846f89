"""``ml.staged``: a graph as tasks of pipeline stages and chunks, and their schedule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from mithril.graph import Graph, OptionError
from mithril_parallel.sharding.api import CHUNK, in_chunks
from mithril_parallel.sharding.pipeline_stages import Task, cost, split_stages

Schedule = Literal["gpipe", "1f1b"]


@dataclass(frozen=True)
class Step:
    """One task with one chunk; ``chunk`` is None for a task that runs once, after all chunks."""

    task: int
    stage: int
    chunk: int | None
    backward: bool


@dataclass(frozen=True)
class Pipeline:
    """The tasks of a pipeline and ``steps``, an order that satisfies their dependencies; each stage follows it.

    ``axes`` maps inputs to the axis that is cut into chunks, and outputs to the axis along which their chunks are
    concatenated. Other outputs are sums over chunks if their task says so, or equal for all chunks. ``index`` is the
    input that holds the number of the chunk, or None.
    """

    stages: int
    chunks: int
    tasks: list[Task]
    steps: list[Step]
    axes: Mapping[str, int]
    index: str | None

    @property
    def shares(self) -> list[float]:
        """The fraction of the total work in each stage."""
        work = [0.0] * self.stages
        for task in self.tasks:
            work[task.stage] += sum(cost(node) for node in task.graph.nodes)
        total = sum(work) or 1.0
        return [w / total for w in work]

    def alive(self, stage: int) -> int:
        """Return the largest number of chunks whose activations a stage holds for the backward pass."""
        current = peak = 0
        for step in self.steps:
            if step.stage == stage and step.chunk is not None:
                current += -1 if step.backward else 1
                peak = max(peak, current)
        return peak if any(task.backward for task in self.tasks) else 1


def staged(graph: Graph, stages: int, chunks: int = 1, schedule: Schedule = "1f1b") -> Pipeline:
    """Cut ``graph`` (a forward pass, gradients or a training step) into ``stages`` and its batch into ``chunks``.

    Gradients are summed over chunks first, so that the optimizer's update runs once.

    ``"gpipe"`` runs the forward steps of all chunks before the first backward step; ``"1f1b"`` starts backward steps
    as early as possible, so that a stage holds the activations of at most one chunk per following stage, and its own.
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
    tasks = split_stages(graph, stages)
    return Pipeline(stages, chunks, tasks, order(tasks, stages, chunks, schedule), cuts, index)


def order(tasks: list[Task], stages: int, chunks: int, schedule: Schedule) -> list[Step]:
    """Return all steps in the order in which they start if every stage runs its next step as early as possible."""
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
    """Return the (chunk, is backward) steps of one stage in order."""
    forward = [(m, False) for m in range(chunks)]
    if not has_backward:
        return forward
    backward = [(m, True) for m in range(chunks)]
    if schedule == "gpipe":
        return forward + backward
    ahead = min(stages - stage, chunks)
    mixed = [step for m in range(chunks - ahead) for step in (backward[m], forward[ahead + m])]
    return forward[:ahead] + mixed + backward[chunks - ahead :]
