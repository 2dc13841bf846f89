"""``TorchBackend(device_mesh=...)``: one program on several processes, of ``torchrun`` or started by the backend.

The graph is partitioned before its source is generated (``ml.shard``, ``ml.staged``): each process runs ordinary
generated code on its shards, and calls ``torch.distributed`` for collectives.
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
from mithril.system import launched_task
from mithril_torch.execution import read
from mithril_torch.parallel.launcher import launch_others
from mithril_torch.parallel.worker import AXES, Spec, TaskText, WorkerProgram, mesh_of

Results = dict[torch.dtype, list[tuple[str, tuple[int, ...]]]]  # names and shapes


class MeshBackend(Protocol):
    """The interface of ``mithril_torch.backend.TorchBackend`` that mesh programs use."""

    torch_device: torch.device
    device_mesh: tuple[int, ...] | None
    cudnn_benchmark: bool | None
    enable_amp: bool | None

    def check(self, graph: Graph, /) -> None: ...
    def generate(self, graph: Graph, options: BuildOptions, /) -> Any: ...
    def array(self, data: Any, /) -> torch.Tensor: ...


def parse_mesh(device_mesh: int | Sequence[int]) -> tuple[int, ...]:
    """Normalize ``device_mesh`` to a (data, model, pipeline) tuple, possibly shortened."""
    sizes = (device_mesh,) if isinstance(device_mesh, int) else tuple(device_mesh)
    if not 1 <= len(sizes) <= len(AXES) or any(not isinstance(n, int) or n < 1 for n in sizes):
        raise OptionError(
            f"device_mesh={device_mesh!r} is not a valid mesh of devices",
            facts=["(4,) splits batches; (2, 4) batches over 2 and weights over 4 devices; (1, 1, 4) layers over 4"],
        )
    return sizes


def launched_world_size() -> int | None:
    """Return the number of processes that ``torchrun`` or another launcher started, or None without a launcher."""
    if dist.is_available() and dist.is_initialized():
        return int(dist.get_world_size())
    task = launched_task()
    return None if task is None else task.size


def mesh_for(backend: MeshBackend, options: BuildOptions) -> tuple[int, ...] | None:
    """Return the mesh selected by the backend and the options together, or None for a single device."""
    settings = options.settings
    mesh, kind, stages = backend.device_mesh, settings.get("parallelism"), settings.get("pipeline_stages")
    if mesh is None:
        count = launched_world_size() or stages
        if kind is None and stages is None:
            return None
        if count is None:
            options.decisions.record(
                "ignored", f"parallelism='{kind}' requires the number of devices: TorchBackend(device_mesh=(4,))"
            )
            return None
        mesh = (count,)
    mesh = (*mesh, 1, 1)[:3]
    if kind == "pipeline" or stages is not None:
        mesh = _with_stages(mesh, stages)
    elif mesh[2] > 1 and kind not in (None, "fsdp"):
        raise OptionError(f"parallelism='{kind}' conflicts with device_mesh={mesh}, which has {mesh[2]} stages")
    if kind == "model" and mesh[1] == 1:
        raise OptionError(
            "parallelism='model' requires a mesh with a model axis",
            facts=[f"device_mesh={mesh}"],
            hint=f"use device_mesh=(1, {prod(mesh)})",
        )
    return mesh


def _with_stages(mesh: tuple[int, ...], stages: int | None) -> tuple[int, ...]:
    if mesh[2] == 1:  # the mesh specifies the number of devices only
        count = stages or prod(mesh)
        if prod(mesh) % count:
            raise OptionError(f"{prod(mesh)} devices cannot be divided into {count} stages")
        return (prod(mesh) // count, 1, count)
    if stages not in (None, mesh[2]):
        raise OptionError(f"pipeline_stages={stages} conflicts with device_mesh={mesh}", hint="omit one of them")
    return mesh


def build(backend: MeshBackend, graph: Graph, options: BuildOptions, mesh: tuple[int, ...]) -> SourceExecutable:
    """Build the executable of a graph on a mesh."""
    running = read(
        options, backend.torch_device, cudnn_benchmark=backend.cudnn_benchmark, enable_amp=backend.enable_amp
    )
    options_set = {"jit=True": running.jit, "torch_fx=True": running.capture}
    for option in (name for name, is_set in options_set.items() if is_set):
        raise OptionError(
            f"{option} conflicts with a mesh of devices",
            facts=["processes run their programs eagerly, with collectives in between"],
            hint=f"omit {option.partition('=')[0]} or device_mesh",
        )
    spec = spec_of(backend, graph, options, mesh)
    require_processes(mesh)
    call = DistributedProgram(spec, backend)
    texts = "\n\n".join(f"# -- task {k} of stage {task.stage} --\n{task.text}" for k, task in enumerate(spec.tasks))
    executable = SourceExecutable(graph, Source(texts), call, call)
    executable.differentiated = True  # several programs cannot be cached as one
    return executable


def require_processes(mesh: tuple[int, ...]) -> None:
    """Start the processes of the mesh unless a launcher has; raise BackendError if their number differs."""
    count = launched_world_size()
    if count is None:
        launch_others(prod(mesh))
    elif count != prod(mesh):
        raise BackendError(
            f"device_mesh={mesh} requires {prod(mesh)} processes, got {count}",
            hint=f"use torchrun --nproc-per-node {prod(mesh)}, or a mesh of {count} devices",
        )


def join_group(device: torch.device) -> None:
    """Create the group of the processes unless the program has done so."""
    if not dist.is_initialized():
        if (task := launched_task()) is not None:
            os.environ.update(task.torch_environment())
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")


def native_autodiff_error(mesh: tuple[int, ...]) -> OptionError:
    """Return the error for autograd on a mesh, which cannot differentiate collectives."""
    return OptionError(
        "autodiff='native' conflicts with a mesh of devices",
        facts=[f"device_mesh={mesh}: the graph is partitioned together with its gradients"],
        hint="omit autodiff",
    )


def spec_of(backend: MeshBackend, graph: Graph, options: BuildOptions, mesh: tuple[int, ...]) -> Spec:
    """Build the programs of all processes as text and numbers."""
    shard, stage = ml.shard, ml.staged  # of mithril-parallel, which declares the options that follow
    settings = options.settings
    axes = dict(zip(AXES[:2], mesh[:2], strict=True))
    splits, fsdp = dict(settings["tensor_split_dims"]), settings["parallelism"] == "fsdp"
    chunks = settings["pipeline_chunks"]
    if mesh[2] == 1 and chunks == 1:
        sharded, replicated = shard(graph, axes, splits=splits, fsdp=fsdp)
        for name, reason in replicated.items():
            options.decisions.record("choice", f"'{name}' is replicated: {reason}")
        staged: Any = None
        tasks: tuple[TaskText, ...] = (_text(backend, sharded.graph, options),)
        steps: tuple[tuple[int, int | None], ...] = ((0, 0),)
    else:
        schedule: Any = settings["pipeline_schedule"]
        staged = stage(graph, mesh[2], chunks, schedule, axes=axes, splits=splits, fsdp=fsdp)
        sharded = staged.sharded
        tasks = tuple(
            replace(_text(backend, t.graph, options, t.takes), stage=t.stage, sums=t.sums, once=t.once)
            for t in staged.tasks
        )
        steps = tuple((s.task, s.chunk) for s in staged.steps)
        loads = ", ".join(f"{share:.0%}" for share in staged.shares)
        options.decisions.record("choice", f"{mesh[2]} pipeline stages with {loads} of the work, {chunks} chunk(s)")
    types = {i.name: _plain(i.type) for i in graph.arguments}
    results = {f"result {name}": _plain(v.type) for name, v in zip(graph.output_names, graph.outputs, strict=True)}
    return Spec(
        mesh,
        tasks,
        steps,
        {n: split for n, split in sharded.inputs.items() if n in types},
        {name: part.split for name, part in sharded.outputs.items()},
        {**types, **results},
        chunks,
        staged.axes if staged is not None else {},
        staged.index if staged is not None else None,
        sharded.indices,
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
    return tuple(int(n) for n in t.shape), t.dtype.name  # static, as partitioning requires


def connection_error(error: Exception) -> BackendError:
    """Return a readable error for a failed collective; PyTorch itself reports only addresses and ports."""
    return BackendError(
        "a collective failed: another process of this program has exited",
        facts=[str(error).splitlines()[0], f"this is process {dist.get_rank()} of {dist.get_world_size()}"],
        hint="read the output of that process for the reason",
    )


class DistributedProgram:
    """Program of one process among several that all run the user's script.

    Arguments are full tensors, equal in every process, or ``DTensor``; sharded results are ``DTensor``.
    """

    def __init__(self, spec: Spec, backend: MeshBackend) -> None:
        device = backend.torch_device
        join_group(device)
        self.spec = spec
        self.array = backend.array
        self.program = WorkerProgram(spec, device)
        self.mesh = mesh_of(spec.mesh, device.type)
        self.stages: dict[int, Results] = {}

    def __call__(self, params: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
        arguments = {**params, **inputs}
        try:
            results = self.program({name: self._local(name, arguments[name]) for name in self.program.needs})
            if self.spec.mesh[2] > 1:
                results = self._broadcast_stages(results)
        except RuntimeError as error:
            if isinstance(error, dist.DistError) or "gloo" in str(error):
                raise connection_error(error) from error
            raise
        return {name: self._to_global(name, results[name]) for name in self.spec.outputs}

    def placed(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return the parameters as ``DTensor``, of which every process holds its shard."""
        from torch.distributed.tensor import DTensor

        shards = {}
        for name, x in params.items():
            local = self._local(name, x).clone()
            shards[name] = DTensor.from_local(
                local, self.mesh, self._placements(self.spec.splits[name]), shape=x.shape, stride=_strides(x.shape)
            )
        return shards

    def assemble(self, name: str, shape: tuple[int, ...], read: Callable[[Any], Any]) -> torch.Tensor:
        """Build a parameter whose local shard is ``read(index)`` of this process's region."""
        from torch.distributed.tensor import DTensor

        split = self.spec.splits[name]
        index = []
        for n, axis in zip(shape, split, strict=True):
            size = n // (self.mesh.size(AXES.index(axis)) if axis is not None else 1)
            start = self.program.coordinates[axis] * size if axis is not None else 0
            index.append(slice(start, start + size))
        local = self.array(read(tuple(index)))
        return DTensor.from_local(
            local, self.mesh, self._placements(split), shape=torch.Size(shape), stride=_strides(shape)
        )

    def _local(self, name: str, x: Any) -> torch.Tensor:
        if not hasattr(x, "to_local"):
            return self.program.local_shard(name, x)
        if name in self.spec.axes or x.device_mesh != self.mesh:  # chunks, or split over a mesh of the caller
            return self.program.local_shard(name, x.full_tensor())
        placements = self._placements(self.spec.splits[name])
        if tuple(x.placements) != placements:
            x = x.redistribute(self.mesh, placements)
        local: torch.Tensor = x.to_local()
        return local

    def _placements(self, split: tuple[str | None, ...]) -> tuple[Any, ...]:
        from torch.distributed.tensor import Replicate, Shard

        return tuple(Shard(split.index(axis)) if axis in split else Replicate() for axis in AXES[: len(self.spec.mesh)])

    def _to_global(self, name: str, x: torch.Tensor) -> Any:
        from torch.distributed.tensor import DTensor

        split = self.spec.outputs[name]
        shape = torch.Size(self.spec.types[f"result {name}"][0])
        chunk_axis = self.spec.axes.get(name)
        if chunk_axis is not None and any(split):
            chunks = [self._gather(piece, split) for piece in x.chunk(self.spec.chunks, chunk_axis)]
            return torch.cat(chunks, chunk_axis)
        if not any(split):
            return x
        return DTensor.from_local(x, self.mesh, self._placements(split), shape=shape, stride=_strides(shape))

    def _gather(self, x: torch.Tensor, split: tuple[str | None, ...]) -> torch.Tensor:
        from torch.distributed.tensor import DTensor

        full: torch.Tensor = DTensor.from_local(x.contiguous(), self.mesh, self._placements(split)).full_tensor()
        return full

    def _broadcast_stages(self, local: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Broadcast the results of every stage to all processes, in one flat buffer per dtype and stage."""
        group, results_of_all = self.mesh.get_group("pipeline"), dict(local)
        for stage, rank in enumerate(dist.get_process_group_ranks(group)):
            for dtype, results in self._stage_results(stage, rank, local).items():
                is_sender = stage == self.program.stage
                sizes = [prod(shape) for _, shape in results]
                buffer = (
                    torch.cat([local[name].reshape(-1) for name, _ in results])
                    if is_sender
                    else torch.empty(sum(sizes), dtype=dtype, device=self.program.device)
                )
                dist.broadcast(buffer.view(torch.uint8) if dtype == torch.bool else buffer, rank, group)
                if not is_sender:
                    parts = buffer.split(sizes)
                    results_of_all.update({n: x.view(shape) for (n, shape), x in zip(results, parts, strict=True)})
        return results_of_all

    def _stage_results(self, stage: int, rank: int, local: Mapping[str, torch.Tensor]) -> Results:
        """Return names and shapes of a stage's results, broadcast by the stage at the first call."""
        if stage not in self.stages:
            message: list[Results] = [{}]
            if stage == self.program.stage:
                for name, x in local.items():
                    message[0].setdefault(x.dtype, []).append((name, tuple(x.shape)))
            dist.broadcast_object_list(message, rank, self.mesh.get_group("pipeline"))
            self.stages[stage] = message[0]
        return self.stages[stage]


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(prod(shape[k + 1 :]) for k in range(len(shape)))
