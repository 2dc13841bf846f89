"""Pipeline parallelism: one executable per stage of layers, and a schedule of their steps.

JAX dispatches asynchronously, so stages run concurrently although one Python thread dispatches all steps. Within a
stage, batches and weights are sharded over the stage's submesh as in any other program.
"""

from __future__ import annotations

from collections import ChainMap, Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import mithril as ml
from mithril.backend import BuildOptions, Source, SourceExecutable
from mithril.base import BackendError, OptionError
from mithril.ir import Graph, Input
from mithril_jax.mesh import mesh_execution

AXIS = "pipeline"
BuildStage = Callable[[Mesh, Graph, BuildOptions], SourceExecutable]


def stages_of(mesh: Mesh | None, options: BuildOptions, platform: str) -> list[Mesh] | None:
    """Return the submesh of each stage, or None without a pipeline."""
    settings = options.settings
    requested: int | None = settings.get("pipeline_stages")
    available = mesh.shape.get(AXIS, 1) if mesh is not None else 1
    if settings.get("parallelism") != AXIS and requested is None and available == 1:
        return None
    if settings.get("parallelism") not in (None, AXIS, "fsdp"):
        raise OptionError(
            f"parallelism='{settings['parallelism']}' conflicts with a pipeline",
            facts=[f"pipeline_stages = {requested}, device_mesh has {available} along '{AXIS}'"],
            hint="use a device_mesh of (data, model, pipeline) to combine all three",
        )
    if mesh is None:
        mesh = mesh_execution.make(platform, (1, 1, requested or len(jax.devices(platform))))
        available = mesh.shape[AXIS]
    if available == 1 and mesh.devices.size > 1:  # the mesh specifies the number of devices only
        stages = requested or mesh.devices.size
        if mesh.devices.size % stages:
            raise OptionError(f"{mesh.devices.size} devices cannot be divided into {stages} stages")
        shape = (mesh.devices.size // stages, 1, stages)
        mesh = Mesh(mesh.devices.reshape(shape), mesh_execution.AXES)
        available = stages
    if requested not in (None, available):
        raise OptionError(
            f"pipeline_stages={requested} conflicts with device_mesh={tuple(mesh.shape.values())}",
            facts=[f"the mesh has {available} along '{AXIS}'"],
            hint="omit one of them",
        )
    if len({device.process_index for device in mesh.devices.flat}) > 1:
        raise BackendError(
            "a pipeline on JAX requires all stages in one process",
            facts=[f"device_mesh={tuple(mesh.shape.values())} has devices of {jax.process_count()} processes"],
            hint="use data, model or fsdp over processes, or ml.TorchBackend, which runs each stage in a process",
        )
    devices = mesh.devices.reshape((*mesh.devices.shape, 1, 1)[:3])
    return [Mesh(devices[:, :, k], mesh_execution.AXES[:2]) for k in range(devices.shape[2])]


def build(build_stage: BuildStage, graph: Graph, options: BuildOptions, stages: list[Mesh]) -> SourceExecutable:
    """Return the executable of a graph over stages, each task built for the mesh of its stage."""
    settings = options.settings
    staged = ml.staged(graph, len(stages), settings["pipeline_chunks"], settings["pipeline_schedule"])
    programs = []
    for number, task in enumerate(staged.tasks):
        later = staged.tasks[number + 1 :] if task.once else staged.tasks
        read_later = {i.name for other in later for i in other.graph.with_role("param")}
        task_graph = _without_donation(task.graph, read_later)
        programs.append(build_stage(stages[task.stage], task_graph, _inner(options, task_graph, read_later)))
    loads = ", ".join(f"{share:.0%}" for share in staged.shares)
    options.decisions.record(
        "choice", f"{staged.stages} pipeline stages with {loads} of the work, {staged.chunks} chunk(s) of the batch"
    )
    call = PipelineExecutable(staged, programs, graph, stages)
    executable = SourceExecutable(graph, texts(programs), call)
    executable.differentiated = True  # several programs cannot be cached as one
    return executable


def _without_donation(graph: Graph, names: set[str]) -> Graph:
    """Return the graph of a task without donation of the parameters in ``names``, which other tasks read later."""

    def retained(i: Input) -> Input:
        return replace(i, tags={**i.tags, "donated": False}) if i.name in names and i.tags.get("donated") else i

    return graph.replaced(inputs=tuple(map(retained, graph.inputs)))


def _inner(options: BuildOptions, graph: Graph, read_later: set[str]) -> BuildOptions:
    """Return the options of a task's program, which must not donate parameters that other tasks read later."""
    fully = options.settings.get("parallelism") == "fsdp"
    changed: dict[str, Any] = {"parallelism": "fsdp" if fully else None}  # within each stage
    if read_later & {i.name for i in graph.with_role("param")}:
        changed["jit_options"] = {n: x for n, x in options.jit_options.items() if n != "donate_argnums"}
        jax_options = dict(options.settings["jax_options"])
        changed["jax_options"] = {n: x for n, x in jax_options.items() if n != "donate_argnums"}
    shared: Any = ChainMap(changed, options.settings)  # type: ignore[arg-type]
    return BuildOptions(shared, inference=options.inference, decisions=options.decisions)


def texts(programs: list[SourceExecutable]) -> Source:
    """Concatenate the sources of all tasks."""
    return Source("\n\n".join(f"# -- {p.graph.name} --\n{p.source}" for p in programs))


class PipelineExecutable:
    """Runs the steps of a pipeline. Gradients move to their parameters; all other results stay on their stage.

    ``stages`` are the meshes of the stages, or None if the devices are not available and programs only compile.
    """

    def __init__(
        self, staged: Any, programs: list[SourceExecutable], graph: Graph, stages: list[Mesh] | None = None
    ) -> None:
        self.staged = staged
        self.calls: list[Any] = [program.call for program in programs]
        self.names = graph.output_names
        self.owners = {r.name: r.of for r in graph.results_of("gradient")}
        self.params = [tuple(i.name for i in task.graph.with_role("param")) for task in staged.tasks]
        self.inputs = [tuple(i.name for i in task.graph.arguments if i.role != "param") for task in staged.tasks]
        self.readers = Counter(source for task in staged.tasks if not task.once for source in task.takes.values())
        self.once_sources = {source for task in staged.tasks if task.once for source in task.takes.values()}
        self.numbers = [np.int32(k) for k in range(staged.chunks)]
        self.chunked = self._chunked_inputs()
        self.replicated = [NamedSharding(mesh, PartitionSpec()) for mesh in stages] if stages is not None else None
        self._split = jax.jit(self._split_all)
        self._add = jax.jit(lambda a, b: jax.tree.map(jnp.add, a, b), donate_argnums=0)
        self._join = jax.jit(lambda chunks, axis: jnp.concatenate(chunks, axis), static_argnums=1)

    def _chunked_inputs(self) -> dict[int, set[str]]:
        """Return the inputs that each stage reads by chunk."""
        by_stage: dict[int, set[str]] = {}
        for task, names in zip(self.staged.tasks, self.inputs, strict=True):
            by_stage.setdefault(task.stage, set()).update(n for n in names if n in self.staged.axes)
        return by_stage

    def chunks(self, stage: int, arguments: Mapping[str, Any]) -> dict[str, list[Any]]:
        """Split a stage's inputs into chunks on its own devices: one transfer is cheaper than one per chunk."""
        inputs = {n: arguments[n] for n in self.chunked[stage]}
        if self.replicated is not None:
            inputs = jax.device_put(inputs, self.replicated[stage])
        return self._split(inputs)  # type: ignore[no-any-return]

    def _split_all(self, inputs: dict[str, Any]) -> dict[str, list[Any]]:
        return {n: jnp.split(x, self.staged.chunks, self.staged.axes[n]) for n, x in inputs.items()}

    def __call__(self, params: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
        run = _Run(self, {**params, **inputs})
        for step in self.staged.steps:
            run.step(step.task, step.chunk)
        return self._to_parameters(run.results(), params)

    def _to_parameters(self, results: dict[str, Any], params: Mapping[str, Any]) -> dict[str, Any]:
        """Move all gradients to the devices of their parameters, in one transfer."""
        targets = {}
        for name, owner in self.owners.items():
            x, param = results[name], params.get(owner)
            if isinstance(param, jax.Array) and param.shape == x.shape and param.sharding != x.sharding:
                targets[name] = param.sharding
        results.update(jax.device_put({name: results[name] for name in targets}, targets))
        return {name: results[name] for name in self.names}

    def placed(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return the parameters on the devices of the stage that updates them, or of the first that reads them."""
        arrays = dict(params)
        order = sorted(range(len(self.calls)), key=lambda k: not self.staged.tasks[k].once)
        for k in order:
            stage_arrays = self.calls[k].placed({n: params[n] for n in self.params[k] if n in params})
            arrays.update({n: x for n, x in stage_arrays.items() if arrays[n] is params[n]})
        return arrays

    def assemble(self, name: str, shape: tuple[int, ...], read: Any) -> Any:
        """Read a parameter for the first stage that uses it."""
        for call, names in zip(self.calls, self.params, strict=True):
            if name in names:
                return call.assemble(name, shape, read)
        return None


class _Run:
    """One call. ``links`` are values between steps; ``sums`` and ``last`` are values for tasks that run once."""

    def __init__(self, executable: PipelineExecutable, arguments: dict[str, Any]) -> None:
        self.executable, self.staged, self.arguments = executable, executable.staged, arguments
        self.chunks = {stage: executable.chunks(stage, arguments) for stage in executable.chunked}
        self.links: dict[tuple[int, int | None, str], list[Any]] = {}
        self.sums: dict[int, dict[str, Any]] = {}
        self.last: dict[tuple[int, str], Any] = {}
        self.results_by_name: dict[str, list[tuple[int, Any]]] = {}

    def step(self, number: int, chunk: int | None) -> None:
        task = self.staged.tasks[number]
        outputs = self.executable.calls[number](
            {n: self.arguments[n] for n in self.executable.params[number]},
            {n: self._input(task, n, chunk) for n in self.executable.inputs[number]},
        )
        sums = {name: outputs.pop(name) for name in task.sums}
        if sums:
            previous = self.sums.get(number)
            self.sums[number] = sums if previous is None else self.executable._add(previous, sums)
        for name, x in outputs.items():
            source = (number, name)
            if (count := self.executable.readers[source]) > 0:
                self.links[number, chunk, name] = [x, count]
            if source in self.executable.once_sources:
                self.last[source] = x
            if name in self.executable.names:
                self.results_by_name.setdefault(name, []).append((chunk or 0, x))

    def _input(self, task: Any, name: str, chunk: int | None) -> Any:
        source = task.takes.get(name)
        if source is None:
            if name == self.staged.index:
                return self.executable.numbers[chunk or 0]
            chunks = self.chunks[task.stage]
            return chunks[name][chunk or 0] if name in chunks else self.arguments[name]
        if not task.once:
            return self._consume((source[0], chunk, source[1]))
        sums = self.sums.get(source[0], {})
        return sums[source[1]] if source[1] in sums else self.last[source]

    def _consume(self, key: tuple[int, int | None, str]) -> Any:
        """Return a value of an earlier task; it is released after its last use."""
        entry = self.links[key]
        entry[1] -= 1
        if not entry[1]:
            del self.links[key]
        return entry[0]

    def results(self) -> dict[str, Any]:
        results = {name: x for sums in self.sums.values() for name, x in sums.items()}
        for name, chunks in self.results_by_name.items():
            ordered = [x for _, x in sorted(chunks, key=lambda entry: entry[0])]
            is_chunked = name in self.staged.axes and len(ordered) > 1
            results[name] = self.executable._join(ordered, self.staged.axes[name]) if is_chunked else ordered[-1]
        return results
