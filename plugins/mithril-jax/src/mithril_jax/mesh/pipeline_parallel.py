"""Programs whose layers are on different devices: one executable per stage, and a schedule that feeds them.

JAX dispatches without waiting, so that stages work at the same time although one Python thread hands out all steps.
Within a stage batches and weights are split over its part of the mesh as in any other program.
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
    """The part of the mesh that each stage has; None where all layers are everywhere."""
    settings = options.settings
    wanted: int | None = settings.get("pipeline_stages")
    given = mesh.shape.get(AXIS, 1) if mesh is not None else 1
    if settings.get("parallelism") != AXIS and wanted is None and given == 1:
        return None
    if settings.get("parallelism") not in (None, AXIS, "fsdp"):
        raise OptionError(
            f"parallelism='{settings['parallelism']}' contradicts a pipeline",
            facts=[f"pipeline_stages = {wanted}, device_mesh has {given} along '{AXIS}'"],
            hint="a device_mesh of (data, model, pipeline) has all three",
        )
    if mesh is None:
        mesh = mesh_execution.make(platform, (1, 1, wanted or len(jax.devices(platform))))
        given = mesh.shape[AXIS]
    if given == 1 and mesh.devices.size > 1:  # the mesh says how many devices, not what for
        stages = wanted or mesh.devices.size
        if mesh.devices.size % stages:
            raise OptionError(f"{mesh.devices.size} devices cannot be divided into {stages} stages")
        shape = (mesh.devices.size // stages, 1, stages)
        mesh = Mesh(mesh.devices.reshape(shape), mesh_execution.AXES)
        given = stages
    if wanted not in (None, given):
        raise OptionError(
            f"pipeline_stages={wanted} contradicts device_mesh={tuple(mesh.shape.values())}",
            facts=[f"the mesh has {given} along '{AXIS}'"],
            hint="leave one of them out",
        )
    if len({device.process_index for device in mesh.devices.flat}) > 1:
        raise BackendError(
            "the stages of a pipeline on JAX are devices of one process",
            facts=[f"device_mesh={tuple(mesh.shape.values())} has devices of {jax.process_count()} processes"],
            hint="data, model and fsdp go over processes; ml.TorchBackend has a stage in each process",
        )
    devices = mesh.devices.reshape((*mesh.devices.shape, 1, 1)[:3])
    return [Mesh(devices[:, :, k], mesh_execution.AXES[:2]) for k in range(devices.shape[2])]


def build(build_stage: BuildStage, graph: Graph, options: BuildOptions, parts: list[Mesh]) -> SourceExecutable:
    """Return the executable of a graph over stages, each task built for the mesh of its stage."""
    settings = options.settings
    made = ml.staged(
        graph, len(parts), settings.get("pipeline_chunks") or 1, settings.get("pipeline_schedule") or "1f1b"
    )
    programs = []
    for number, task in enumerate(made.tasks):
        later = made.tasks[number + 1 :] if task.once else made.tasks
        read_later = {i.name for other in later for i in other.graph.with_role("param")}
        part = _keeping(task.graph, read_later)
        programs.append(build_stage(parts[task.stage], part, _inner(options, part, read_later)))
    shares = ", ".join(f"{share:.0%}" for share in made.shares)
    options.decisions.record(
        "choice", f"{made.stages} pipeline stages with {shares} of the work, {made.chunks} chunk(s) of the batch"
    )
    call = Piped(made, programs, graph, parts)
    executable = SourceExecutable(graph, texts(programs), call)
    executable.differentiated = True  # several programs: nothing that could be kept as one
    return executable


def _keeping(graph: Graph, names: set[str]) -> Graph:
    """The graph of a task, to which parameters are given over only where no other task reads them after it."""

    def kept(i: Input) -> Input:
        return replace(i, tags={**i.tags, "donated": False}) if i.name in names and i.tags.get("donated") else i

    return graph.replaced(inputs=tuple(map(kept, graph.inputs)))


def _inner(options: BuildOptions, graph: Graph, read_later: set[str]) -> BuildOptions:
    """Options for the program of a task, which may not donate parameters that others read after it."""
    fully = options.settings.get("parallelism") == "fsdp"
    changed: dict[str, Any] = {"parallelism": "fsdp" if fully else None}  # within each stage
    if read_later & {i.name for i in graph.with_role("param")}:
        changed["jit_options"] = {n: x for n, x in options.jit_options.items() if n != "donate_argnums"}
        given = dict(options.settings.get("jax_options", {}))
        changed["jax_options"] = {n: x for n, x in given.items() if n != "donate_argnums"}
    shared: Any = ChainMap(changed, options.settings)  # type: ignore[arg-type]
    return BuildOptions(shared, inference=options.inference, decisions=options.decisions)


def texts(programs: list[SourceExecutable]) -> Source:
    """The sources of all tasks, one after the other."""
    return Source("\n\n".join(f"# -- {p.graph.name} --\n{p.source}" for p in programs))


class Piped:
    """Runs the steps of a pipeline. Gradients go where the parameters lie; everything else stays where it is made.

    ``parts`` are the meshes of the stages, where programs are called on devices that are here.
    """

    def __init__(
        self, made: Any, programs: list[SourceExecutable], graph: Graph, parts: list[Mesh] | None = None
    ) -> None:
        self.made = made
        self.calls: list[Any] = [program.call for program in programs]
        self.names = graph.output_names
        self.owners = {r.name: r.of for r in graph.results_of("gradient")}
        self.params = [tuple(i.name for i in task.graph.with_role("param")) for task in made.tasks]
        self.inputs = [tuple(i.name for i in task.graph.arguments if i.role != "param") for task in made.tasks]
        self.readers = Counter(source for task in made.tasks if not task.once for source in task.takes.values())
        self.kept = {source for task in made.tasks if task.once for source in task.takes.values()}
        self.numbers = [np.int32(k) for k in range(made.chunks)]
        self.read = self._read_in_chunks()
        self.whole = [NamedSharding(part, PartitionSpec()) for part in parts] if parts is not None else None
        self._cut = jax.jit(self._cut_all)
        self._add = jax.jit(lambda a, b: jax.tree.map(jnp.add, a, b), donate_argnums=0)
        self._join = jax.jit(lambda parts, axis: jnp.concatenate(parts, axis), static_argnums=1)

    def _read_in_chunks(self) -> dict[int, set[str]]:
        """The inputs that each stage reads chunk by chunk."""
        found: dict[int, set[str]] = {}
        for task, names in zip(self.made.tasks, self.inputs, strict=True):
            found.setdefault(task.stage, set()).update(n for n in names if n in self.made.axes)
        return found

    def pieces(self, stage: int, arguments: Mapping[str, Any]) -> dict[str, list[Any]]:
        """The chunks of a stage's inputs, cut where they are needed: moving one by one costs more than moving."""
        given = {n: arguments[n] for n in self.read[stage]}
        return self._cut(given if self.whole is None else jax.device_put(given, self.whole[stage]))  # type: ignore[no-any-return]

    def _cut_all(self, inputs: dict[str, Any]) -> dict[str, list[Any]]:
        return {n: jnp.split(x, self.made.chunks, self.made.axes[n]) for n, x in inputs.items()}

    def __call__(self, params: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
        run = _Run(self, {**params, **inputs})
        for step in self.made.steps:
            run.step(step.task, step.chunk)
        return self._home(run.results(), params)

    def _home(self, made: dict[str, Any], params: Mapping[str, Any]) -> dict[str, Any]:
        """All gradients together to where their parameters are: moving one by one costs more than moving."""
        there = {name: params[owner] for name, owner in self.owners.items() if owner in params}
        away = {
            name: like.sharding
            for name, like in there.items()
            if isinstance(like, jax.Array) and like.shape == made[name].shape and like.sharding != made[name].sharding
        }
        made.update(jax.device_put({name: made[name] for name in away}, away))
        return {name: made[name] for name in self.names}

    def placed(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Parameters on the devices of the stage that changes them, or of the first that reads them."""
        found = dict(params)
        order = sorted(range(len(self.calls)), key=lambda k: not self.made.tasks[k].once)
        for k in order:
            here = self.calls[k].placed({n: params[n] for n in self.params[k] if n in params})
            found.update({n: x for n, x in here.items() if found[n] is params[n]})
        return found

    def assemble(self, name: str, shape: tuple[int, ...], read: Any) -> Any:
        """A parameter, read for the first stage that wants it."""
        for call, names in zip(self.calls, self.params, strict=True):
            if name in names:
                return call.assemble(name, shape, read)
        return None


class _Run:
    """One call. ``links`` go from step to step, ``sums`` and ``last`` values to what is done once."""

    def __init__(self, piped: Piped, arguments: dict[str, Any]) -> None:
        self.piped, self.made, self.arguments = piped, piped.made, arguments
        self.pieces = {stage: piped.pieces(stage, arguments) for stage in piped.read}
        self.links: dict[tuple[int, int | None, str], list[Any]] = {}
        self.sums: dict[int, dict[str, Any]] = {}
        self.last: dict[tuple[int, str], Any] = {}
        self.found: dict[str, list[tuple[int, Any]]] = {}

    def step(self, number: int, chunk: int | None) -> None:
        task = self.made.tasks[number]
        made = self.piped.calls[number](
            {n: self.arguments[n] for n in self.piped.params[number]},
            {n: self._input(task, n, chunk) for n in self.piped.inputs[number]},
        )
        sums = {name: made.pop(name) for name in task.sums}
        if sums:
            before = self.sums.get(number)
            self.sums[number] = sums if before is None else self.piped._add(before, sums)
        for name, x in made.items():
            source = (number, name)
            if (count := self.piped.readers[source]) > 0:
                self.links[number, chunk, name] = [x, count]
            if source in self.piped.kept:
                self.last[source] = x
            if name in self.piped.names:
                self.found.setdefault(name, []).append((chunk or 0, x))

    def _input(self, task: Any, name: str, chunk: int | None) -> Any:
        source = task.takes.get(name)
        if source is None:
            if name == self.made.index:
                return self.piped.numbers[chunk or 0]
            pieces = self.pieces[task.stage]
            return pieces[name][chunk or 0] if name in pieces else self.arguments[name]
        if not task.once:
            return self._taken((source[0], chunk, source[1]))
        sums = self.sums.get(source[0], {})
        return sums[source[1]] if source[1] in sums else self.last[source]

    def _taken(self, key: tuple[int, int | None, str]) -> Any:
        """What an earlier task made; forgotten once its last reader has it."""
        entry = self.links[key]
        entry[1] -= 1
        if not entry[1]:
            del self.links[key]
        return entry[0]

    def results(self) -> dict[str, Any]:
        results = {name: x for sums in self.sums.values() for name, x in sums.items()}
        for name, parts in self.found.items():
            ordered = [x for _, x in sorted(parts, key=lambda part: part[0])]
            joined = name in self.made.axes and len(ordered) > 1
            results[name] = self.piped._join(ordered, self.made.axes[name]) if joined else ordered[-1]
        return results
