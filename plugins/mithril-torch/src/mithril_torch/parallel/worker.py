"""Execution in one worker process: its shard of the program and its steps of a pipeline.

Programs are source text and plain numbers, so that a process needs PyTorch only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from mithril_torch.parallel.meshes import AXES, Split

Link = tuple[int, int | None, str]  # a value: producing task, chunk (None: all chunks), name


@dataclass(frozen=True)
class TaskText:
    """One task of the program: its source and the origin of its arguments."""

    stage: int
    text: str
    arrays: Mapping[str, Any]
    params: tuple[str, ...]
    inputs: tuple[str, ...]
    takes: Mapping[str, tuple[int, str]]
    types: Mapping[str, tuple[tuple[int, ...], str]]  # of values received from other tasks
    sums: frozenset[str] = frozenset()  # outputs summed over chunks
    once: bool = False  # runs once, after all chunks


@dataclass(frozen=True)
class Spec:
    """A complete program. ``steps`` are pairs (task, chunk) in topological order.

    Tasks that run once have chunk None. They use sums over chunks and, for other values, the last chunk's.
    """

    mesh: tuple[int, ...]
    tasks: tuple[TaskText, ...]
    steps: tuple[tuple[int, int | None], ...]
    splits: dict[str, Split]
    outputs: Mapping[str, Split]
    types: Mapping[str, tuple[tuple[int, ...], str]]  # full shapes and dtypes of arguments and outputs
    chunks: int = 1
    axes: Mapping[str, int] = field(default_factory=dict)  # axis that is split into chunks
    index: str | None = None
    indices: Mapping[str, str] = field(default_factory=dict)  # inputs that hold the process index along an axis

    def chunk_of(self, source: tuple[int, str], reader: TaskText, chunk: int | None) -> int | None:
        """Return the chunk whose value ``reader`` uses at ``chunk``, or None if the value exists once."""
        task = self.tasks[source[0]]
        if task.once or source[1] in task.sums:
            return None
        return self.chunks - 1 if reader.once else chunk

    def readers(self, source: tuple[int, str], chunk: int | None) -> list[int]:
        """Return the stages that read a value, one entry per reading task."""
        consumers = [task for task in self.tasks if source in task.takes.values()]
        steps = [task for task in consumers if self.chunk_of(source, task, chunk) == chunk]
        return [task.stage for task in steps]


class WorkerProgram:
    """Per-process program; arguments and results are local shards."""

    def __init__(self, spec: Spec, mesh: DeviceMesh, device: torch.device) -> None:
        self.spec, self.mesh, self.device = spec, mesh, device
        coordinate = mesh.get_coordinate()
        assert coordinate is not None
        self.coordinates = dict(zip(AXES, coordinate, strict=False))
        self.stage = self.coordinates.get("pipeline", 0)
        self.forwards = [_function(task.text, task.arrays) if task.stage == self.stage else None for task in spec.tasks]
        self.fixed = {
            name: torch.tensor(self.coordinates[axis], dtype=torch.int32, device=device)
            for name, axis in spec.indices.items()
        }
        self.readers = {key: self.spec.readers((key[0], key[2]), key[1]) for key in self._links()}
        self.messages = {k: [m for m in self.readers if self._receives_from(k, m)] for k in range(self._stages)}

    @property
    def _stages(self) -> int:
        return max(task.stage for task in self.spec.tasks) + 1

    @property
    def needs(self) -> set[str]:
        """Arguments that this process reads."""
        local_tasks = [task for task in self.spec.tasks if task.stage == self.stage]
        return {n for task in local_tasks for n in (*task.params, *task.inputs) if n in self.spec.splits}

    def _links(self) -> Iterator[Link]:
        """Yield the values passed between tasks in the order of computation, sums after their last chunk."""
        spec = self.spec
        transferred = {source for task in spec.tasks for source in task.takes.values()}
        for number, chunk in spec.steps:
            task = spec.tasks[number]
            for name in sorted(name for producer, name in transferred if producer == number):
                if name not in task.sums:
                    yield number, chunk, name
                elif chunk == spec.chunks - 1:
                    yield number, None, name

    def _receives_from(self, stage: int, link: Link) -> bool:
        """Whether ``stage`` sends this value to the stage of this process."""
        return self.spec.tasks[link[0]].stage == stage != self.stage and self.stage in self.readers[link]

    # -- running ------------------------------------------------------------------------------------------------------
    def __call__(self, arguments: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        with torch.no_grad():
            return _Run(self, arguments).run()


class _Run:
    """One call of a program with several steps."""

    def __init__(self, program: WorkerProgram, arguments: Mapping[str, torch.Tensor]) -> None:
        self.program, self.spec = program, program.spec
        self.arguments = {**arguments, **program.fixed}
        self.chunks = {
            n: x.chunk(self.spec.chunks, self.spec.axes[n]) for n, x in arguments.items() if n in self.spec.axes
        }
        self.links: dict[Link, torch.Tensor] = {}
        self.remaining: dict[Link, int] = {}  # number of outstanding reads in this process
        self.expected = {k: deque(messages) for k, messages in program.messages.items()}
        self.pending_sends: list[tuple[Any, torch.Tensor]] = []
        self.sums: dict[tuple[int, str], torch.Tensor] = {}
        self.results: dict[str, list[torch.Tensor]] = {}

    def run(self) -> dict[str, torch.Tensor]:
        for number, chunk in self.spec.steps:
            forward = self.program.forwards[number]
            if forward is not None:
                self._step(number, chunk, forward)
        for work, _ in self.pending_sends:
            work.wait()
        results = {}
        for name, parts in self.results.items():
            is_chunked = name in self.spec.axes and len(parts) > 1
            results[name] = torch.cat(parts, self.spec.axes[name]) if is_chunked else parts[-1]
        return results

    def _step(self, number: int, chunk: int | None, forward: Any) -> None:
        task = self.spec.tasks[number]
        params = {n: self.arguments[n] for n in task.params}
        outputs = forward(params, {n: self._input(task, n, chunk) for n in task.inputs})
        for name, x in sorted(outputs.items()):  # in the order in which the receivers expect them
            if name not in task.sums:
                self._deliver(number, chunk, name, x)
                continue
            previous = self.sums.get((number, name))
            total = self.sums[number, name] = x if previous is None else previous + x
            if chunk == self.spec.chunks - 1:
                self._deliver(number, None, name, total)

    def _deliver(self, number: int, chunk: int | None, name: str, x: torch.Tensor) -> None:
        """Pass a value to the tasks that read it, and save it if it is a result."""
        link = (number, chunk, name)
        stages = self.program.readers.get(link, [])
        if num_uses := stages.count(self.program.stage):
            self.links[link], self.remaining[link] = x, num_uses
        for stage in sorted(set(stages) - {self.program.stage}):
            packed = x.contiguous()
            work = dist.isend(packed.view(torch.uint8) if packed.dtype == torch.bool else packed, self._rank(stage))
            self.pending_sends.append((work, packed))  # the buffer must live until it is sent
        if name in self.spec.outputs:
            self.results.setdefault(name, []).append(x)

    def _input(self, task: TaskText, name: str, chunk: int | None) -> torch.Tensor:
        source = task.takes.get(name)
        if source is not None:
            return self._receive((source[0], self.spec.chunk_of(source, task, chunk), source[1]))
        if name == self.spec.index:
            return torch.tensor(chunk, dtype=torch.int32, device=self.program.device)
        return self.chunks[name][chunk or 0] if name in self.chunks else self.arguments[name]

    def _receive(self, link: Link) -> torch.Tensor:
        """Return a value of this process or of another; messages of one sender arrive in the order sent."""
        sender = self.spec.tasks[link[0]].stage
        while link not in self.links:
            message = self.expected[sender].popleft()
            shape, dtype = self._type(message)
            x = torch.empty(shape, dtype=dtype, device=self.program.device)
            dist.recv(x.view(torch.uint8) if dtype == torch.bool else x, self._rank(sender))
            self.links[message], self.remaining[message] = x, self.program.readers[message].count(self.program.stage)
        x = self.links[link]
        self.remaining[link] -= 1
        if not self.remaining[link]:
            del self.links[link]
        return x

    def _type(self, message: Link) -> tuple[tuple[int, ...], torch.dtype]:
        for task in self.spec.tasks:
            for name, source in task.takes.items():
                if source == (message[0], message[2]):
                    shape, dtype = task.types[name]
                    return shape, getattr(torch, dtype)
        raise KeyError(message)

    def _rank(self, stage: int) -> int:
        coordinates = {**self.program.coordinates, "pipeline": stage}
        return int(self.program.mesh.mesh[tuple(coordinates[axis] for axis in AXES[: len(self.spec.mesh)])])


def _function(text: str, arrays: Mapping[str, Any]) -> Any:
    space: dict[str, Any] = {"__name__": "mithril_generated", "_arrays": dict(arrays)}
    exec(compile(text, "<mithril parallel>", "exec"), space)
    return space["forward"]
