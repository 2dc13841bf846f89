"""What one process of several runs: its part of the program, and its steps of a pipeline.

Programs come as text and plain numbers, so that a process that only knows PyTorch can run them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

AXES = ("data", "model", "pipeline")
Split = tuple[str | None, ...]

_current: dict[str, DeviceMesh] = {}


@dataclass(frozen=True)
class TaskText:
    """One task of the program: its source, and where its arguments come from."""

    stage: int
    text: str
    arrays: Mapping[str, Any]
    params: tuple[str, ...]
    inputs: tuple[str, ...]
    takes: Mapping[str, tuple[int, str]]
    types: Mapping[str, tuple[tuple[int, ...], str]]  # of what it takes from other tasks


@dataclass(frozen=True)
class Spec:
    """A whole program. ``steps`` are (task, chunk) in an order in which everything is there in time."""

    mesh: tuple[int, ...]
    tasks: tuple[TaskText, ...]
    steps: tuple[tuple[int, int], ...]
    splits: Mapping[str, Split]
    outputs: Mapping[str, Split]
    types: Mapping[str, tuple[tuple[int, ...], str]]  # whole shapes and dtypes of arguments and outputs
    chunks: int = 1
    axes: Mapping[str, int] = field(default_factory=dict)  # cut into, or joined from, chunks
    sums: frozenset[str] = frozenset()
    index: str | None = None
    places: Mapping[str, str] = field(default_factory=dict)  # inputs that hold the place along an axis
    threads: int | None = None


def group_of(axis: str) -> Any:
    """The processes along an axis of the mesh whose program runs."""
    return _current["mesh"].get_group(axis)


def exchanged_as(dtype: torch.dtype, kind: str) -> torch.dtype:
    """The dtype in which values are exchanged."""
    if dtype in (torch.float16, torch.bfloat16) and kind == "sum":
        return torch.float32
    return torch.uint8 if dtype == torch.bool else dtype


def mesh_of(shape: tuple[int, ...], device: str) -> DeviceMesh:
    """The mesh of all processes; made once, since every process must make it at the same time."""
    key = f"{device} {shape}"
    if key not in _current:
        _current[key] = init_device_mesh(device, shape, mesh_dim_names=AXES[: len(shape)])
    return _current[key]


class RankProgram:
    """The part of this process. Arguments and results are its parts of them."""

    def __init__(self, spec: Spec, device: torch.device) -> None:
        self.spec = spec
        self.device = device
        self.mesh = mesh_of(spec.mesh, device.type)
        coordinate = self.mesh.get_coordinate()
        assert coordinate is not None
        self.place = dict(zip(AXES, coordinate, strict=False))
        self.stage = self.place.get("pipeline", 0)
        self.forwards = [_function(task.text, task.arrays) if task.stage == self.stage else None for task in spec.tasks]
        self.fixed = {
            name: torch.tensor(self.place[axis], dtype=torch.int32, device=device) for name, axis in spec.places.items()
        }
        self.readers = self._readers()
        self.messages = {k: list(self._messages(k)) for k in range(self._stages)}

    @property
    def _stages(self) -> int:
        return max(task.stage for task in self.spec.tasks) + 1

    @property
    def needs(self) -> set[str]:
        """The arguments that this process reads."""
        mine = [task for task in self.spec.tasks if task.stage == self.stage]
        return {n for task in mine for n in (*task.params, *task.inputs) if n in self.spec.splits}

    def _readers(self) -> dict[tuple[int, str], list[int]]:
        """For each value that leaves a task the stages that read it, once for each task that does."""
        found: dict[tuple[int, str], list[int]] = {}
        for task in self.spec.tasks:
            for source in task.takes.values():
                found.setdefault(source, []).append(task.stage)
        return found

    def _messages(self, sender: int) -> Iterator[tuple[int, int, str]]:
        """What a stage sends to this one, in the order in which it does."""
        for number, chunk in self.spec.steps:
            if self.spec.tasks[number].stage == sender:
                for (task, name), stages in sorted(self.readers.items()):
                    if task == number and self.stage in stages and sender != self.stage:
                        yield task, chunk, name

    # -- arguments and results ----------------------------------------------------------------------------------------
    def part(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """This process's part of a whole argument. Of a batch in chunks it is the part of each chunk."""
        at = self.spec.axes.get(name)
        if at is None:
            return self._part(self.spec.splits[name], x)
        return torch.cat([self._part(self.spec.splits[name], c) for c in x.chunk(self.spec.chunks, at)], at)

    def _part(self, split: Split, x: torch.Tensor) -> torch.Tensor:
        for k, axis in enumerate(split):
            if axis is not None:
                x = x.chunk(self.mesh.size(AXES.index(axis)), k)[self.place[axis]]
        return x

    # -- running ------------------------------------------------------------------------------------------------------
    def __call__(self, arguments: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        _current["mesh"] = self.mesh
        if len(self.forwards) == 1 and self.spec.chunks == 1:
            forward, task = self.forwards[0], self.spec.tasks[0]
            assert forward is not None
            given = {**arguments, **self.fixed}
            with torch.no_grad():
                made: dict[str, torch.Tensor] = forward(
                    {n: given[n] for n in task.params}, {n: given[n] for n in task.inputs}
                )
            return made
        with torch.no_grad():
            return _Run(self, arguments).run()


class _Run:
    """One call of a program in steps."""

    def __init__(self, program: RankProgram, arguments: Mapping[str, torch.Tensor]) -> None:
        self.program, self.spec = program, program.spec
        self.whole = {**arguments, **program.fixed}
        self.pieces = {
            n: x.chunk(self.spec.chunks, self.spec.axes[n]) for n, x in arguments.items() if n in self.spec.axes
        }
        self.links: dict[tuple[int, int, str], torch.Tensor] = {}
        self.left: dict[tuple[int, int, str], int] = {}  # how often a link is still read here
        self.coming = {k: deque(messages) for k, messages in program.messages.items()}
        self.sent: list[tuple[Any, torch.Tensor]] = []
        self.found: dict[str, list[tuple[int, torch.Tensor]]] = {}

    def run(self) -> dict[str, torch.Tensor]:
        for number, chunk in self.spec.steps:
            forward = self.program.forwards[number]
            if forward is not None:
                self._step(number, chunk, forward)
        for work, _ in self.sent:
            work.wait()
        results = {}
        for name, parts in self.found.items():
            ordered = [x for _, x in sorted(parts, key=lambda part: part[0])]
            joined = name in self.spec.axes and len(ordered) > 1
            results[name] = torch.cat(ordered, self.spec.axes[name]) if joined else ordered[-1]
        return results

    def _step(self, number: int, chunk: int, forward: Any) -> None:
        task = self.spec.tasks[number]
        params = {n: self.whole[n] for n in task.params}
        made = forward(params, {n: self._input(task, n, chunk) for n in task.inputs})
        for name, x in sorted(made.items()):  # in the order in which others expect it
            stages = self.program.readers.get((number, name))
            if stages is not None:
                self._hand_on(number, chunk, name, x, stages)
            elif name in self.spec.sums and name in self.found:
                self.found[name] = [(chunk, self.found[name][0][1] + x)]
            else:
                self.found.setdefault(name, []).append((chunk, x))

    def _input(self, task: TaskText, name: str, chunk: int) -> torch.Tensor:
        source = task.takes.get(name)
        if source is not None:
            return self._take(task, name, (source[0], chunk, source[1]))
        if name == self.spec.index:
            return torch.tensor(chunk, dtype=torch.int32, device=self.program.device)
        return self.pieces[name][chunk] if name in self.pieces else self.whole[name]

    def _hand_on(self, number: int, chunk: int, name: str, x: torch.Tensor, stages: list[int]) -> None:
        here = stages.count(self.program.stage)
        if here:
            self.links[number, chunk, name], self.left[number, chunk, name] = x, here
        for stage in sorted(set(stages) - {self.program.stage}):
            packed = x.contiguous()
            work = dist.isend(packed.view(torch.uint8) if packed.dtype == torch.bool else packed, self._rank(stage))
            self.sent.append((work, packed))  # memory that is being sent must not go

    def _take(self, task: TaskText, name: str, key: tuple[int, int, str]) -> torch.Tensor:
        """A link of this process, or from another: messages of one sender are received in the order they were sent."""
        sender = self.spec.tasks[key[0]].stage
        while key not in self.links:
            message = self.coming[sender].popleft()
            shape, dtype = self._type(message)
            x = torch.empty(shape, dtype=dtype, device=self.program.device)
            dist.recv(x.view(torch.uint8) if dtype == torch.bool else x, self._rank(sender))
            self.links[message] = x
            self.left[message] = self.program.readers[message[0], message[2]].count(self.program.stage)
        x = self.links[key]
        self.left[key] -= 1
        if not self.left[key]:
            del self.links[key]
        return x

    def _type(self, message: tuple[int, int, str]) -> tuple[tuple[int, ...], torch.dtype]:
        for task in self.spec.tasks:
            for name, source in task.takes.items():
                if source == (message[0], message[2]):
                    shape, dtype = task.types[name]
                    return shape, getattr(torch, dtype)
        raise KeyError(message)

    def _rank(self, stage: int) -> int:
        at = [stage if axis == "pipeline" else self.program.place[axis] for axis in AXES[: len(self.spec.mesh)]]
        return int(self.program.mesh.mesh[tuple(at)])


def _function(text: str, arrays: Mapping[str, Any]) -> Any:
    space: dict[str, Any] = {"__name__": "mithril_generated", "_arrays": dict(arrays)}
    exec(compile(text, "<mithril parallel>", "exec"), space)
    return space["forward"]
