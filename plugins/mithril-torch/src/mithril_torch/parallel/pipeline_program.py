"""Pipelines: each process runs the tasks of its stage of a graph that ``ml.staged`` cuts, gradients included."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any

import torch
import torch.distributed as dist

import mithril as ml
from mithril.backend import BuildOptions, Source, SourceExecutable
from mithril.base import TensorType
from mithril.ir import Graph
from mithril_torch.parallel.arrays import MeshArrays, connection_error
from mithril_torch.parallel.meshes import AXES, MeshBackend, require_processes, select
from mithril_torch.parallel.program import check_run_options
from mithril_torch.parallel.worker import Spec, TaskText, WorkerProgram

Results = dict[torch.dtype, list[tuple[str, tuple[int, ...]]]]  # names and shapes


def build_pipeline(
    backend: MeshBackend, graph: Graph, options: BuildOptions, mesh: tuple[int, ...]
) -> SourceExecutable:
    """Build the executable of a graph on a mesh with stages."""
    check_run_options(backend, options)
    spec = spec_of(backend, graph, options, mesh)
    require_processes(mesh)
    call = PipelineProgram(spec, backend)
    texts = "\n\n".join(f"# -- task {k} of stage {task.stage} --\n{task.text}" for k, task in enumerate(spec.tasks))
    executable = SourceExecutable(graph, Source(texts), call, call)
    executable.differentiated = True  # several programs cannot be cached as one
    return executable


def spec_of(backend: MeshBackend, graph: Graph, options: BuildOptions, mesh: tuple[int, ...]) -> Spec:
    """Build the programs of all processes as text and numbers."""
    settings = options.settings
    axes = dict(zip(AXES[:2], mesh[:2], strict=True))
    splits, fsdp = dict(settings["tensor_split_dims"]), settings["parallelism"] == "fsdp"
    chunks: int = settings["pipeline_chunks"]
    schedule: Any = settings["pipeline_schedule"]
    staged = ml.staged(graph, mesh[2], chunks, schedule, axes=axes, splits=splits, fsdp=fsdp)
    sharded: Any = staged.sharded
    tasks = tuple(
        replace(_text(backend, t.graph, options, t.takes), stage=t.stage, sums=t.sums, once=t.once)
        for t in staged.tasks
    )
    loads = ", ".join(f"{share:.0%}" for share in staged.shares)
    options.decisions.record("choice", f"{mesh[2]} pipeline stages with {loads} of the work, {chunks} chunk(s)")
    types = {i.name: _plain(i.type) for i in graph.arguments}
    results = {f"result {name}": _plain(v.type) for name, v in zip(graph.output_names, graph.outputs, strict=True)}
    return Spec(
        mesh,
        tasks,
        tuple((s.task, s.chunk) for s in staged.steps),
        {n: split for n, split in sharded.inputs.items() if n in types},
        {name: part.split for name, part in sharded.outputs.items()},
        {**types, **results},
        chunks,
        staged.axes,
        staged.index,
        sharded.indices,
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


class PipelineProgram(MeshArrays):
    """Program of one process among several that all run the user's script."""

    def __init__(self, spec: Spec, backend: MeshBackend) -> None:
        super().__init__(spec.mesh, spec.splits, backend)
        self.spec = spec
        self.program = WorkerProgram(spec, self.mesh, backend.torch_device)
        self.stages: dict[int, Results] = {}

    def __call__(self, params: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
        select(self.mesh)
        arguments = {**params, **inputs}
        try:
            results = self.program({name: self.local(name, arguments[name]) for name in self.program.needs})
            if self.spec.mesh[2] > 1:
                results = self._broadcast_stages(results)
        except RuntimeError as error:
            if isinstance(error, dist.DistError) or "gloo" in str(error):
                raise connection_error(error) from error
            raise
        return {name: self._to_global(name, results[name]) for name in self.spec.outputs}

    def local(self, name: str, x: Any) -> torch.Tensor:
        """Return this process's part of an argument; a batch in chunks is split within each chunk."""
        axis = self.spec.axes.get(name)
        if axis is None:
            return super().local(name, x)
        full = x.full_tensor() if hasattr(x, "full_tensor") else x
        chunks = full.chunk(self.spec.chunks, axis)
        return torch.cat([self.part(self.splits[name], c) for c in chunks], axis)

    def _to_global(self, name: str, x: torch.Tensor) -> Any:
        split, axis = self.spec.outputs[name], self.spec.axes.get(name)
        shape = self.spec.types[f"result {name}"][0]
        if axis is None or not any(split):
            return self.joined(x, split, shape)
        part = tuple(n // self.spec.chunks if k == axis else n for k, n in enumerate(shape))
        chunks: list[Any] = [self.joined(c.contiguous(), split, part) for c in x.chunk(self.spec.chunks, axis)]
        return torch.cat([c.full_tensor() for c in chunks], axis)

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
