"""``TorchBackend(device_mesh=...)``: one program as many processes run it, under ``torchrun`` or in a pool of our own.

The graph is cut before its source is written (``ml.shard``, ``ml.staged``): each process runs ordinary generated code
on its parts, and calls ``torch.distributed`` where devices exchange something.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, Protocol

import torch
import torch.distributed as dist

import mithril as ml
from mithril.backend import BuildOptions, Source, SourceExecutable
from mithril.base import BackendError, OptionError, TensorType
from mithril.ir import Graph
from mithril_torch.execution import read
from mithril_torch.parallel.pool import PoolProgram, pool
from mithril_torch.parallel.worker import AXES, RankProgram, Spec, TaskText, mesh_of

Results = dict[torch.dtype, list[tuple[str, tuple[int, ...]]]]  # names and shapes


class MeshBackend(Protocol):
    """The part of ``mithril_torch.backend.TorchBackend`` that programs of a mesh read."""

    torch_device: torch.device
    device_mesh: tuple[int, ...] | None
    cudnn_benchmark: bool | None
    enable_amp: bool | None

    def check(self, graph: Graph, /) -> None: ...
    def generate(self, graph: Graph, options: BuildOptions, /) -> Any: ...
    def array(self, data: Any, /) -> torch.Tensor: ...


def shape_of(given: int | Sequence[int]) -> tuple[int, ...]:
    """``device_mesh`` as (data, model, pipeline)."""
    sizes = (given,) if isinstance(given, int) else tuple(given)
    if not 1 <= len(sizes) <= len(AXES) or any(not isinstance(n, int) or n < 1 for n in sizes):
        raise OptionError(
            f"device_mesh={given!r} is no mesh of devices",
            facts=["(4,) splits batches; (2, 4) batches over 2 and weights over 4 devices; (1, 1, 4) layers over 4"],
        )
    return sizes


def world() -> int | None:
    """How many processes ``torchrun`` or somebody else has started; None where this is the only one."""
    if dist.is_available() and dist.is_initialized():
        return int(dist.get_world_size())
    return int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ and "WORLD_SIZE" in os.environ else None


def mesh_for(backend: MeshBackend, options: BuildOptions) -> tuple[int, ...] | None:
    """The mesh that the backend and the options mean together; None for a single device."""
    settings = options.settings
    mesh, kind, stages = backend.device_mesh, settings.get("parallelism"), settings.get("pipeline_stages")
    if mesh is None:
        count = world() or stages
        if kind is None and stages is None:
            return None
        if count is None:
            options.decisions.record(
                "ignored", f"parallelism='{kind}': TorchBackend(device_mesh=(4,)) says over how many devices"
            )
            return None
        mesh = (count,)
    mesh = (*mesh, 1, 1)[:3]
    if kind == "pipeline" or stages is not None:
        mesh = _with_stages(mesh, stages)
    elif mesh[2] > 1 and kind not in (None, "fsdp"):
        raise OptionError(f"parallelism='{kind}' contradicts device_mesh={mesh}, which has {mesh[2]} stages")
    if kind == "model" and mesh[1] == 1:
        raise OptionError(
            "parallelism='model' needs a mesh with an axis for the model",
            facts=[f"device_mesh={mesh}"],
            hint=f"device_mesh=(1, {prod(mesh)})",
        )
    return mesh


def _with_stages(mesh: tuple[int, ...], stages: int | None) -> tuple[int, ...]:
    if mesh[2] == 1:  # the mesh says how many devices, not what for
        count = stages or prod(mesh)
        if prod(mesh) % count:
            raise OptionError(f"{prod(mesh)} devices cannot be divided into {count} stages")
        return (prod(mesh) // count, 1, count)
    if stages not in (None, mesh[2]):
        raise OptionError(f"pipeline_stages={stages} contradicts device_mesh={mesh}", hint="leave one of them out")
    return mesh


def build(backend: MeshBackend, graph: Graph, options: BuildOptions, mesh: tuple[int, ...]) -> SourceExecutable:
    """The executable of a graph over a mesh."""
    running = read(
        options, backend.torch_device, cudnn_benchmark=backend.cudnn_benchmark, enable_amp=backend.enable_amp
    )
    asked = {"jit=True": running.jit, "torch_fx=True": running.capture}
    for what in (name for name, wanted in asked.items() if wanted):
        raise OptionError(
            f"{what} contradicts a mesh of devices",
            facts=["processes run their parts as they are, with the exchanges in between"],
            hint=f"leave out {what.partition('=')[0]} or device_mesh",
        )
    spec = spec_of(backend, graph, options, mesh)
    count = world()
    if count is None:
        call: Any = PoolProgram(spec, pool(prod(mesh), backend.torch_device.type))
    elif count == prod(mesh):
        call = RankedProgram(spec, backend)
    else:
        raise BackendError(
            f"device_mesh={mesh} needs {prod(mesh)} processes, and there are {count}",
            hint=f"torchrun --nproc-per-node {prod(mesh)}, or a mesh of {count} devices",
        )
    texts = "\n\n".join(f"# -- task {k} of stage {task.stage} --\n{task.text}" for k, task in enumerate(spec.tasks))
    executable = SourceExecutable(graph, Source(texts), call, call)
    executable.differentiated = True  # several programs: nothing that could be kept as one
    return executable


def no_native(mesh: tuple[int, ...]) -> OptionError:
    """Gradients by PyTorch itself would know nothing of exchanges."""
    return OptionError(
        "autodiff='native' contradicts a mesh of devices",
        facts=[f"device_mesh={mesh}: a graph with its gradients is cut for the processes"],
        hint="leave autodiff out",
    )


def spec_of(backend: MeshBackend, graph: Graph, options: BuildOptions, mesh: tuple[int, ...]) -> Spec:
    """The programs of all processes as text and numbers."""
    settings = options.settings
    axes = dict(zip(AXES[:2], mesh[:2], strict=True))
    splits, fsdp = dict(settings.get("tensor_split_dims", {})), settings.get("parallelism") == "fsdp"
    chunks = settings.get("pipeline_chunks") or 1
    if mesh[2] == 1 and chunks == 1:
        made, left = ml.shard(graph, axes, splits=splits, fsdp=fsdp)
        for name, why in left.items():
            options.decisions.record("choice", f"'{name}' is whole on every device: {why}")
        staged: Any = None
        tasks: tuple[TaskText, ...] = (_text(backend, made.graph, options),)
        steps: tuple[tuple[int, int | None], ...] = ((0, 0),)
    else:
        schedule: Any = settings.get("pipeline_schedule") or "1f1b"
        staged = ml.staged(graph, mesh[2], chunks, schedule, axes=axes, splits=splits, fsdp=fsdp)
        made = staged.sharded
        tasks = tuple(
            replace(_text(backend, t.graph, options, t.takes), stage=t.stage, sums=t.sums, once=t.once)
            for t in staged.tasks
        )
        steps = tuple((s.task, s.chunk) for s in staged.steps)
        shares = ", ".join(f"{share:.0%}" for share in staged.shares)
        options.decisions.record("choice", f"{mesh[2]} pipeline stages with {shares} of the work, {chunks} chunk(s)")
    types = {i.name: _plain(i.type) for i in graph.arguments}
    results = {f"result {name}": _plain(v.type) for name, v in zip(graph.output_names, graph.outputs, strict=True)}
    return Spec(
        mesh,
        tasks,
        steps,
        {n: split for n, split in made.inputs.items() if n in types},
        {name: part.split for name, part in made.outputs.items()},
        {**types, **results},
        chunks,
        staged.axes if staged is not None else {},
        staged.index if staged is not None else None,
        made.indices,
        options.num_threads,
    )


def _text(
    backend: MeshBackend, graph: Graph, options: BuildOptions, takes: Mapping[str, tuple[int, str]] | None = None
) -> TaskText:
    takes = dict(takes or {})
    backend.check(graph)
    text, arrays = backend.generate(graph, options)
    params = tuple(i.name for i in graph.with_role("param"))
    inputs = tuple(i.name for i in graph.arguments if i.role != "param")
    types = {i.name: _plain(i.type) for i in graph.arguments if i.name in takes}
    return TaskText(0, text, dict(arrays), params, inputs, takes, types)


def _plain(t: TensorType) -> tuple[tuple[int, ...], str]:
    return tuple(int(n) for n in t.shape), t.dtype.name  # all known, or it would not have been cut


def lost(error: Exception) -> BackendError:
    """An exchange failed: what PyTorch tells of it are addresses and ports."""
    return BackendError(
        "other processes do not answer: one of those that run this program together has ended",
        facts=[str(error).splitlines()[0], f"this is process {dist.get_rank()} of {dist.get_world_size()}"],
        hint="its own output says why",
    )


class RankedProgram:
    """The program of one of several processes that all run the user's script.

    Arguments are whole tensors, the same in every process, or ``DTensor``; what is split comes back as ``DTensor``.
    """

    def __init__(self, spec: Spec, backend: MeshBackend) -> None:
        device = backend.torch_device
        if not dist.is_initialized():
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        self.spec = spec
        self.array = backend.array
        self.program = RankProgram(spec, device)
        self.mesh = mesh_of(spec.mesh, device.type)
        self.stages: dict[int, Results] = {}

    def __call__(self, params: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
        given = {**params, **inputs}
        try:
            made = self.program({name: self._local(name, given[name]) for name in self.program.needs})
            if self.spec.mesh[2] > 1:
                made = self._from_all_stages(made)
        except RuntimeError as error:
            if isinstance(error, dist.DistError) or "gloo" in str(error):
                raise lost(error) from error
            raise
        return {name: self._whole(name, made[name]) for name in self.spec.outputs}

    def placed(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Parameters of which every process holds its part."""
        from torch.distributed.tensor import DTensor

        found = {}
        for name, x in params.items():
            local = self._local(name, x).clone()
            found[name] = DTensor.from_local(
                local, self.mesh, self._placements(self.spec.splits[name]), shape=x.shape, stride=_strides(x.shape)
            )
        return found

    def assemble(self, name: str, shape: tuple[int, ...], read: Callable[[Any], Any]) -> torch.Tensor:
        """A parameter of what ``read(index)`` gives for this process's region."""
        from torch.distributed.tensor import DTensor

        split = self.spec.splits[name]
        index = []
        for n, axis in zip(shape, split, strict=True):
            size = n // (self.mesh.size(AXES.index(axis)) if axis is not None else 1)
            start = self.program.place[axis] * size if axis is not None else 0
            index.append(slice(start, start + size))
        local = self.array(read(tuple(index)))
        return DTensor.from_local(
            local, self.mesh, self._placements(split), shape=torch.Size(shape), stride=_strides(shape)
        )

    def _local(self, name: str, x: Any) -> torch.Tensor:
        if not hasattr(x, "to_local"):
            return self.program.part(name, x)
        if name in self.spec.axes:
            return self.program.part(name, x.full_tensor())
        wanted = self._placements(self.spec.splits[name])
        here: torch.Tensor = (x if tuple(x.placements) == wanted else x.redistribute(self.mesh, wanted)).to_local()
        return here

    def _placements(self, split: tuple[str | None, ...]) -> tuple[Any, ...]:
        from torch.distributed.tensor import Replicate, Shard

        return tuple(Shard(split.index(axis)) if axis in split else Replicate() for axis in AXES[: len(self.spec.mesh)])

    def _whole(self, name: str, x: torch.Tensor) -> Any:
        from torch.distributed.tensor import DTensor

        split = self.spec.outputs[name]
        shape = torch.Size(self.spec.types[f"result {name}"][0])
        at = self.spec.axes.get(name)
        if at is not None and any(split):
            chunks = [self._gathered(piece, split) for piece in x.chunk(self.spec.chunks, at)]
            return torch.cat(chunks, at)
        if not any(split):
            return x
        return DTensor.from_local(x, self.mesh, self._placements(split), shape=shape, stride=_strides(shape))

    def _gathered(self, x: torch.Tensor, split: tuple[str | None, ...]) -> torch.Tensor:
        from torch.distributed.tensor import DTensor

        whole: torch.Tensor = DTensor.from_local(x.contiguous(), self.mesh, self._placements(split)).full_tensor()
        return whole

    def _from_all_stages(self, made: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Results of every stage, in every process: those of a stage go round together, one flat buffer per dtype."""
        group, found = self.mesh.get_group("pipeline"), dict(made)
        for stage, rank in enumerate(dist.get_process_group_ranks(group)):
            for dtype, results in self._results_of(stage, rank, made).items():
                mine = stage == self.program.stage
                sizes = [prod(shape) for _, shape in results]
                flat = (
                    torch.cat([made[name].reshape(-1) for name, _ in results])
                    if mine
                    else torch.empty(sum(sizes), dtype=dtype, device=self.program.device)
                )
                dist.broadcast(flat.view(torch.uint8) if dtype == torch.bool else flat, rank, group)
                if not mine:
                    parts = flat.split(sizes)
                    found.update({n: x.view(shape) for (n, shape), x in zip(results, parts, strict=True)})
        return found

    def _results_of(self, stage: int, rank: int, made: Mapping[str, torch.Tensor]) -> Results:
        """What a stage makes, as it told at the first call."""
        if stage not in self.stages:
            told: list[Results] = [{}]
            if stage == self.program.stage:
                for name, x in made.items():
                    told[0].setdefault(x.dtype, []).append((name, tuple(x.shape)))
            dist.broadcast_object_list(told, rank, self.mesh.get_group("pipeline"))
            self.stages[stage] = told[0]
        return self.stages[stage]


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(prod(shape[k + 1 :]) for k in range(len(shape)))
