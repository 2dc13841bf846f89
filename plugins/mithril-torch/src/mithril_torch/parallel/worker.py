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

Link = tuple[int, int | None, str]  # a value by the task that makes it, the chunk (None: all of them) and its name

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
    sums: frozenset[str] = frozenset()  # outputs that are added up over chunks
    once: bool = False  # done after all chunks


@dataclass(frozen=True)
class Spec:
    """A whole program. ``steps`` are (task, chunk) in an order in which everything is there in time.

    What is done once has no chunk. It takes sums over chunks, and of other values those of the last chunk.
    """

    mesh: tuple[int, ...]
    tasks: tuple[TaskText, ...]
    steps: tuple[tuple[int, int | None], ...]
    splits: Mapping[str, Split]
    outputs: Mapping[str, Split]
    types: Mapping[str, tuple[tuple[int, ...], str]]  # whole shapes and dtypes of arguments and outputs
    chunks: int = 1
    axes: Mapping[str, int] = field(default_factory=dict)  # cut into, or joined from, chunks
    index: str | None = None
    places: Mapping[str, str] = field(default_factory=dict)  # inputs that hold the place along an axis
    threads: int | None = None

    def chunk_of(self, source: tuple[int, str], reader: TaskText, chunk: int | None) -> int | None:
        """The chunk whose value a task reads that is at ``chunk``; None of what there is one of."""
        task = self.tasks[source[0]]
        if task.once or source[1] in task.sums:
            return None
        return self.chunks - 1 if reader.once else chunk

    def carries(self, name: str) -> bool:
        """Whether a result can be an argument of the next call where it is: of one stage, both split alike."""
        return self.mesh[2] == 1 and self.splits.get(name) == self.outputs[name]

    def readers(self, source: tuple[int, str], chunk: int | None) -> list[int]:
        """The stages that read this value of a task, once for each of their tasks that does."""
        found = [task for task in self.tasks if source in task.takes.values()]
        steps = [task for task in found if self.chunk_of(source, task, chunk) == chunk]
        return [task.stage for task in steps]


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
        self.readers = {key: self.spec.readers((key[0], key[2]), key[1]) for key in self._links()}
        self.messages = {k: [m for m in self.readers if self._sends(k, m)] for k in range(self._stages)}

    @property
    def _stages(self) -> int:
        return max(task.stage for task in self.spec.tasks) + 1

    @property
    def needs(self) -> set[str]:
        """The arguments that this process reads."""
        mine = [task for task in self.spec.tasks if task.stage == self.stage]
        return {n for task in mine for n in (*task.params, *task.inputs) if n in self.spec.splits}

    def _links(self) -> Iterator[Link]:
        """Everything that a task gives to another, in the order in which it is made; sums after their last chunk."""
        spec = self.spec
        given = {source for task in spec.tasks for source in task.takes.values()}
        for number, chunk in spec.steps:
            task = spec.tasks[number]
            for name in sorted(name for at, name in given if at == number):
                if name not in task.sums:
                    yield number, chunk, name
                elif chunk == spec.chunks - 1:
                    yield number, None, name

    def _sends(self, stage: int, link: Link) -> bool:
        """Whether a stage sends this to ours."""
        return self.spec.tasks[link[0]].stage == stage != self.stage and self.stage in self.readers[link]

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
        self.links: dict[Link, torch.Tensor] = {}
        self.left: dict[Link, int] = {}  # how often a link is still read here
        self.coming = {k: deque(messages) for k, messages in program.messages.items()}
        self.sent: list[tuple[Any, torch.Tensor]] = []
        self.sums: dict[tuple[int, str], torch.Tensor] = {}
        self.found: dict[str, list[torch.Tensor]] = {}

    def run(self) -> dict[str, torch.Tensor]:
        for number, chunk in self.spec.steps:
            forward = self.program.forwards[number]
            if forward is not None:
                self._step(number, chunk, forward)
        for work, _ in self.sent:
            work.wait()
        results = {}
        for name, parts in self.found.items():
            joined = name in self.spec.axes and len(parts) > 1
            results[name] = torch.cat(parts, self.spec.axes[name]) if joined else parts[-1]
        return results

    def _step(self, number: int, chunk: int | None, forward: Any) -> None:
        task = self.spec.tasks[number]
        params = {n: self.whole[n] for n in task.params}
        made = forward(params, {n: self._input(task, n, chunk) for n in task.inputs})
        for name, x in sorted(made.items()):  # in the order in which others expect it
            if name not in task.sums:
                self._give(number, chunk, name, x)
                continue
            before = self.sums.get((number, name))
            total = self.sums[number, name] = x if before is None else before + x
            if chunk == self.spec.chunks - 1:
                self._give(number, None, name, total)

    def _give(self, number: int, chunk: int | None, name: str, x: torch.Tensor) -> None:
        """To the tasks that read it; and a result is kept, one for each chunk."""
        link = (number, chunk, name)
        stages = self.program.readers.get(link, [])
        if here := stages.count(self.program.stage):
            self.links[link], self.left[link] = x, here
        for stage in sorted(set(stages) - {self.program.stage}):
            packed = x.contiguous()
            work = dist.isend(packed.view(torch.uint8) if packed.dtype == torch.bool else packed, self._rank(stage))
            self.sent.append((work, packed))  # memory that is being sent must not go
        if name in self.spec.outputs:
            self.found.setdefault(name, []).append(x)

    def _input(self, task: TaskText, name: str, chunk: int | None) -> torch.Tensor:
        source = task.takes.get(name)
        if source is not None:
            return self._take((source[0], self.spec.chunk_of(source, task, chunk), source[1]))
        if name == self.spec.index:
            return torch.tensor(chunk, dtype=torch.int32, device=self.program.device)
        return self.pieces[name][chunk or 0] if name in self.pieces else self.whole[name]

    def _take(self, link: Link) -> torch.Tensor:
        """A link of this process, or from another: messages of one sender are received in the order they were sent."""
        sender = self.spec.tasks[link[0]].stage
        while link not in self.links:
            message = self.coming[sender].popleft()
            shape, dtype = self._type(message)
            x = torch.empty(shape, dtype=dtype, device=self.program.device)
            dist.recv(x.view(torch.uint8) if dtype == torch.bool else x, self._rank(sender))
            self.links[message], self.left[message] = x, self.program.readers[message].count(self.program.stage)
        x = self.links[link]
        self.left[link] -= 1
        if not self.left[link]:
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
        at = [stage if axis == "pipeline" else self.program.place[axis] for axis in AXES[: len(self.spec.mesh)]]
        return int(self.program.mesh.mesh[tuple(at)])


def _function(text: str, arrays: Mapping[str, Any]) -> Any:
    space: dict[str, Any] = {"__name__": "mithril_generated", "_arrays": dict(arrays)}
    exec(compile(text, "<mithril parallel>", "exec"), space)
    return space["forward"]
