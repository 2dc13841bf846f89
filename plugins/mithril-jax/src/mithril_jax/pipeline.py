"""Programs whose layers are on different devices: one executable per stage, and a schedule that feeds them.

JAX dispatches without waiting, so that stages work at the same time although one Python thread hands out all steps.
Within a stage batches and weights are split over its part of the mesh as in any other program.
"""

from __future__ import annotations

import copy
from collections import ChainMap, Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import mithril as ml
from mithril.codegen.source import Source
from mithril.errors import OptionError
from mithril.graph import Graph
from mithril.runtime.backend import BuildOptions
from mithril.runtime.source_backend import SourceExecutable
from mithril_jax import meshes

if TYPE_CHECKING:
    from mithril_jax.backend import JaxBackend

AXIS = "pipeline"


def stages_of(mesh: Mesh | None, options: BuildOptions, platform: str) -> list[Mesh] | None:
    """The part of the mesh that each stage has; None where all layers are everywhere."""
    settings = options.settings
    wanted: int | None = settings.get("pipeline_stages")
    given = mesh.shape.get(AXIS, 1) if mesh is not None else 1
    if settings.get("parallelism") != AXIS and wanted is None and given == 1:
        return None
    if settings.get("parallelism") not in (None, AXIS):
        raise OptionError(
            f"parallelism='{settings['parallelism']}' contradicts a pipeline",
            facts=[f"pipeline_stages = {wanted}, device_mesh has {given} along '{AXIS}'"],
            hint="a device_mesh of (data, model, pipeline) has all three",
        )
    if mesh is None:
        mesh = meshes.make(platform, (1, 1, wanted or len(jax.devices(platform))))
        given = mesh.shape[AXIS]
    if given == 1 and mesh.devices.size > 1:  # the mesh says how many devices, not what for
        stages = wanted or mesh.devices.size
        if mesh.devices.size % stages:
            raise OptionError(f"{mesh.devices.size} devices cannot be divided into {stages} stages")
        shape = (mesh.devices.size // stages, 1, stages)
        mesh = Mesh(mesh.devices.reshape(shape), meshes.AXES)
        given = stages
    if wanted not in (None, given):
        raise OptionError(
            f"pipeline_stages={wanted} contradicts device_mesh={tuple(mesh.shape.values())}",
            facts=[f"the mesh has {given} along '{AXIS}'"],
            hint="leave one of them out",
        )
    devices = mesh.devices.reshape((*mesh.devices.shape, 1, 1)[:3])
    return [Mesh(devices[:, :, k], meshes.AXES[:2]) for k in range(devices.shape[2])]


def build(backend: JaxBackend, graph: Graph, options: BuildOptions, parts: list[Mesh]) -> SourceExecutable:
    """The executable of a graph over stages."""
    settings = options.settings
    made = ml.staged(
        graph, len(parts), settings.get("pipeline_chunks") or 1, settings.get("pipeline_schedule") or "1f1b"
    )
    shared: Any = ChainMap({"parallelism": None}, settings)  # type: ignore[arg-type]
    inner = BuildOptions(shared, inference=options.inference, decisions=options.decisions)
    programs = []
    for task in made.tasks:
        stage = copy.copy(backend)
        stage.mesh = parts[task.stage]
        programs.append(stage.build_whole(task.graph, inner))
    shares = ", ".join(f"{share:.0%}" for share in made.shares)
    options.decisions.record(
        "choice", f"{made.stages} pipeline stages with {shares} of the work, {made.chunks} chunk(s) of the batch"
    )
    call = Piped(made, programs, graph)
    executable = SourceExecutable(graph, texts(programs), call)
    executable.differentiated = True  # several programs: nothing that could be kept as one
    return executable


def texts(programs: list[SourceExecutable]) -> Source:
    """The sources of all tasks, one after the other."""
    return Source("\n\n".join(f"# -- {p.graph.name} --\n{p.source}" for p in programs))


class Piped:
    """Runs the steps of a pipeline. Results that belong to an argument (gradients, new state) go where that lies."""

    def __init__(self, made: Any, programs: list[SourceExecutable], graph: Graph) -> None:
        self.made = made
        self.calls: list[Any] = [program.call for program in programs]
        self.arguments = {i.name for i in graph.arguments}
        self.names = graph.output_names
        self.needs = [[i.name for i in task.graph.arguments] for task in made.tasks]
        self.params = [{i.name for i in task.graph.with_role("param")} for task in made.tasks]
        self.readers = Counter(source for task in made.tasks for source in task.takes.values())
        self.numbers = [np.int32(k) for k in range(made.chunks)]
        self._cut = jax.jit(self._cut_all)
        self._add = jax.jit(lambda a, b: jax.tree.map(jnp.add, a, b), donate_argnums=0)
        self._join = jax.jit(lambda parts, axis: jnp.concatenate(parts, axis), static_argnums=1)

    def _cut_all(self, inputs: dict[str, Any]) -> dict[str, list[Any]]:
        return {n: jnp.split(x, self.made.chunks, self.made.axes[n]) for n, x in inputs.items()}

    def __call__(self, params: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
        made, arguments = self.made, {**params, **inputs}
        pieces = self._cut({n: x for n, x in inputs.items() if n in made.axes})
        links: dict[tuple[int, int, str], list[Any]] = {}
        chunks: dict[str, list[Any]] = {}
        sums: dict[int, dict[str, Any]] = {}
        for step in made.steps:
            task = made.tasks[step.task]
            given: dict[str, Any] = {}
            for name in self.needs[step.task]:
                if (source := task.takes.get(name)) is not None:
                    given[name] = _take(links, (source[0], step.chunk, source[1]))
                elif name == made.index:
                    given[name] = self.numbers[step.chunk]
                else:
                    given[name] = pieces[name][step.chunk] if name in pieces else arguments[name]
            mine = self.params[step.task]
            found = self.calls[step.task](
                {n: x for n, x in given.items() if n in mine}, {n: x for n, x in given.items() if n not in mine}
            )
            open_sums = {}
            for name, x in found.items():
                if (count := self.readers[step.task, name]) > 0:
                    links[step.task, step.chunk, name] = [x, count]
                elif name in made.sums:
                    open_sums[name] = x
                else:
                    chunks.setdefault(name, []).append((step.chunk, x))
            if open_sums:
                before = sums.get(step.task)
                sums[step.task] = open_sums if before is None else self._add(before, open_sums)
        results = {name: x for found in sums.values() for name, x in found.items()}
        for name, parts in chunks.items():
            ordered = [x for _, x in sorted(parts, key=lambda part: part[0])]
            joined = name in made.axes and len(ordered) > 1
            results[name] = self._join(ordered, made.axes[name]) if joined else ordered[-1]
        return {name: self._home(name, results[name], arguments) for name in self.names}

    def _home(self, name: str, x: Any, arguments: Mapping[str, Any]) -> Any:
        owner = next((n for n in (name.removeprefix("grad/"), name) if n in self.arguments), None)
        like = arguments.get(owner) if owner is not None else None
        return jax.device_put(x, like.sharding) if isinstance(like, jax.Array) and like.shape == x.shape else x

    def placed(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Parameters on the devices of the first stage that reads them."""
        found = dict(params)
        for call, names in zip(self.calls, self.params, strict=True):
            here = call.placed({n: x for n, x in params.items() if n in names})
            found.update({n: x for n, x in here.items() if found[n] is params[n]})
        return found

    def assemble(self, name: str, shape: tuple[int, ...], read: Any) -> Any:
        """A parameter, read for the first stage that wants it."""
        for call, names in zip(self.calls, self.params, strict=True):
            if name in names:
                return call.assemble(name, shape, read)
        return None


def _take(links: dict[tuple[int, int, str], list[Any]], key: tuple[int, int, str]) -> Any:
    """What an earlier task made; forgotten once its last reader has it."""
    entry = links[key]
    entry[1] -= 1
    if not entry[1]:
        del links[key]
    return entry[0]
