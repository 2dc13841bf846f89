"""Pipeline parallelism: one program for all devices, in which each device runs the tasks of its stage.

``ml.staged`` cuts the graph into tasks. The program is a loop over ticks inside ``shard_map``: in each tick a device
runs the task of its stage for one chunk, and sends the results to the neighboring stage. As every process runs the same
program, the stages can be in several processes.

Between steps each parameter is split over the stages, like a fully sharded one. The program first exchanges these
parts, so that each stage has its own parameters complete, and at the end the gradients of each stage in the opposite
direction. The optimizer's update then runs on the parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

import mithril as ml
from mithril.backend import BuildOptions, Forward, Source
from mithril.graph import Graph, OptionError
from mithril_jax.mesh import mesh_execution
from mithril_jax.mesh.stage_slots import Kind, Routes, Slots

AXIS, DATA = "pipeline", "data"
Specs = Mapping[str, tuple[Any, ...]]
Key = tuple[int, str]  # a task and the name of its output
BuildTask = Callable[[Graph], tuple[str, Forward]]


def pipeline_mesh(mesh: Mesh | None, options: BuildOptions, platform: str) -> Mesh | None:
    """Return the mesh (data, model, pipeline), or None without a pipeline."""
    settings = options.settings
    requested: int | None = settings.get("pipeline_stages")
    available = mesh.shape.get(AXIS, 1) if mesh is not None else 1
    if settings.get("parallelism") != AXIS and requested is None and available == 1:
        return None
    if settings.get("parallelism") not in (None, AXIS, "fsdp"):
        raise OptionError(
            f"parallelism='{settings['parallelism']}' conflicts with a pipeline",
            facts=[f"pipeline_stages = {requested}, device_mesh has {available} along '{AXIS}'"],
            hint="omit parallelism: device_mesh=(data, model, pipeline) combines all three; 'fsdp' is possible, too",
        )
    check_schedule(settings)
    if mesh is None:
        mesh = mesh_execution.make(platform, (1, 1, requested or len(jax.devices(platform))))
        available = mesh.shape[AXIS]
    if available == 1 and mesh.shape.get("model", 1) > 1:
        sizes = tuple(mesh.shape.values())[:2]
        raise OptionError(
            f"device_mesh={sizes} does not tell how many of its devices are stages",
            facts=["its second number divides weights; the third one is that of stages"],
            hint=f"use device_mesh=({sizes[0]}, {sizes[1]}, {requested or 2}), or device_mesh=({mesh.devices.size},)",
        )
    if available == 1 and mesh.devices.size > 1:  # the mesh specifies the number of devices only
        stages = requested or mesh.devices.size
        if mesh.devices.size % stages:
            raise OptionError(
                f"{mesh.devices.size} devices cannot be divided into {stages} stages",
                hint=f"set pipeline_stages={gcd(mesh.devices.size, stages)}",
            )
        shape = (mesh.devices.size // stages, 1, stages)
        mesh = Mesh(mesh.devices.reshape(shape), mesh_execution.AXES)
        available = stages
    if requested not in (None, available):
        raise OptionError(
            f"pipeline_stages={requested} conflicts with device_mesh={tuple(mesh.shape.values())}",
            facts=[f"the mesh has {available} along '{AXIS}'"],
            hint="omit one of them",
        )
    devices = mesh.devices.reshape((*mesh.devices.shape, 1, 1)[:3])
    return Mesh(devices, mesh_execution.AXES)


def check_schedule(settings: Mapping[str, Any]) -> None:
    """Raise OptionError for the schedules of PyTorch."""
    if (schedule := settings["pipeline_schedule"]) not in ("1f1b", "gpipe"):
        raise OptionError(
            f"pipeline_schedule='{schedule}' is a schedule of PyTorch",
            facts=["on JAX: '1f1b', 'gpipe'"],
            hint="omit pipeline_schedule, or compile for TorchBackend",
        )


def pipelined(
    build_task: BuildTask, graph: Graph, options: BuildOptions, axes: Mapping[str, int], specs: Specs
) -> tuple[Source, Forward]:
    """Return the source of all tasks, and the function that runs them on a mesh with these axes.

    ``specs`` are the splits of the parameters between steps.
    """
    settings = options.settings
    stages, chunks = axes[AXIS], settings["pipeline_chunks"]
    # Each has its own chunks; a single chunk is partitioned by XLA instead.
    replicas = axes[DATA] if chunks > 1 else 1
    staged = ml.staged(graph, stages, chunks * replicas, settings["pipeline_schedule"])
    built = [build_task(task.graph) for task in staged.tasks]
    loads = ", ".join(f"{share:.0%}" for share in staged.shares)
    options.decisions.record(
        "choice", f"{stages} pipeline stages with {loads} of the work, {chunks} chunk(s) of the batch"
    )
    text = "\n\n".join(f"# -- {task.graph.name} --\n{t}" for task, (t, _) in zip(staged.tasks, built, strict=True))
    schedule = settings["pipeline_schedule"]
    calls = [forward for _, forward in built]
    return Source(text), Pipelined(staged, calls, graph, specs, stages, chunks, replicas, schedule)


@dataclass
class State:
    """The arrays of one device during the loop; each field is a list of slots."""

    down: list[Any]  # values for the next stage
    up: list[Any]  # values for the previous stage
    saved: list[Any]  # values for the backward task, by chunk
    sums: list[Any]
    collected: list[Any]  # results by chunk
    latest: list[Any]  # results that are equal for all chunks


jax.tree_util.register_dataclass(
    State, data_fields=["down", "up", "saved", "sums", "collected", "latest"], meta_fields=[]
)


class Pipelined:
    """The function of parameters and inputs that runs a pipeline; it is traced inside ``jax.jit``."""

    def __init__(
        self,
        staged: Any,
        calls: Sequence[Forward],
        graph: Graph,
        specs: Specs,
        stages: int,
        chunks: int,
        replicas: int,
        schedule: str,
    ) -> None:
        self.staged, self.generated, self.specs = staged, calls, specs
        self.stages, self.chunks, self.replicas, self.schedule = stages, chunks, replicas, schedule
        self.names = graph.output_names
        self.params = {i.name: i.type for i in graph.with_role("param")}
        self.routes = Routes(staged, self.names)
        self.backward = any(task.backward for task in staged.tasks)
        self.param_slots = Slots([self._params_of(k) for k in range(stages)])
        # a stage runs the backward task of a chunk at most 2 (stages - 1) ticks after its forward task
        self.rows = min(chunks, 2 * stages - 1) if schedule == "1f1b" else chunks

    def _params_of(self, stage: int) -> dict[str, Kind]:
        tasks = [task for task in self.staged.tasks if task.stage == stage and not task.once]
        names = {i.name for task in tasks for i in task.graph.with_role("param")}
        return {n: self._kind(n) for n in sorted(names)}

    def _kind(self, name: str) -> Kind:
        t = self.params[name]
        spec = tuple(self.specs.get(name, ()))
        return Kind(t.shape, t.dtype.numpy, (*spec, *[None] * (len(t.shape) - len(spec))))

    # -- the program -------------------------------------------------------------------------------------------------
    def __call__(self, params: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
        tasks = [task for task in self.staged.tasks if not task.once]
        names = sorted({i.name for task in tasks for i in task.graph.arguments if i.role != "param"})
        read = {n: inputs[n] for n in names if n in inputs}
        manual = {AXIS, DATA} if self.replicas > 1 else {AXIS}
        run = jax.shard_map(
            self._run_stage,
            in_specs=(
                PartitionSpec(AXIS),
                self._data_spec(None),
                PartitionSpec(AXIS),
                {n: self._data_spec(n) for n in read},
            ),
            out_specs=(PartitionSpec(AXIS), {s: self._data_spec(s[1]) for s in self.routes.results}),
            axis_names=manual,
            check_vma=False,
        )
        stacked = [self._stacked(k, kind, params) for k, (kind, _) in enumerate(self.param_slots.order)]
        replicas = jnp.arange(self.replicas, dtype=jnp.int32)
        sums, results = run(jnp.arange(self.stages, dtype=jnp.int32), replicas, stacked, read)
        return self._finished(params, inputs, sums, results)

    def _data_spec(self, name: str | None) -> PartitionSpec:
        """Return the split of an input or a result over the replicas; None means the array of their numbers."""
        if self.replicas == 1:
            return PartitionSpec()
        if name is None:
            return PartitionSpec(DATA)
        axis = self.staged.axes.get(name)
        return PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, DATA)

    def _stacked(self, slot: int, kind: Kind, params: Mapping[str, Any]) -> Any:
        """Return the parameters of all stages in one slot; each stage has the complete array of its own."""
        names = [self.param_slots.name_at(stage, slot) for stage in range(self.stages)]
        # Stages have different parameters, but one program: slots of equal kind are stacked, and a
        # stage without one has zeros.
        arrays = [jnp.zeros(kind.shape, kind.dtype) if n is None else params[n] for n in names]
        parts = lax.with_sharding_constraint(jnp.stack(arrays), PartitionSpec(None, *kind.split))
        complete = [a if a not in (AXIS, DATA) else None for a in kind.split]
        return lax.with_sharding_constraint(parts, PartitionSpec(AXIS, *complete))

    def _run_stage(self, stage: Any, replica: Any, stacked: Any, inputs: Mapping[str, Any]) -> Any:
        """Run all ticks on one device."""
        number, params = stage[0], [x[0] for x in stacked]
        chunked = {n: self._in_chunks(n, x) for n, x in inputs.items() if n in self.staged.axes}
        fixed = {n: x for n, x in inputs.items() if n not in chunked}

        def arguments(m: Any) -> dict[str, Any]:
            chunk = {n: lax.dynamic_index_in_dim(x, m, keepdims=False) for n, x in chunked.items()}
            if self.staged.index is not None:
                chunk[self.staged.index] = replica[0] * self.chunks + m
            return {**fixed, **chunk}

        def forward(state: State, tick: Any) -> State:
            return self._tick(state, number, tick - number, params, arguments, backward=False)

        def backward(state: State, tick: Any) -> State:
            return self._tick(state, number, tick - (self.stages - 1 - number), params, arguments, backward=True)

        state = (
            self._scan(forward, self._initial()) if not self.backward or self.schedule == "gpipe" else self._initial()
        )
        if self.backward and self.schedule == "gpipe":
            state = self._scan(backward, state)
        elif self.backward:
            late = self.stages - 1
            state = self._scan(lambda s, t: backward(forward(s, t), t - late), state, extra=late)
        return self._local_results(state, number)

    def _scan(self, tick: Callable[[State, Any], State], state: State, extra: int = 0) -> State:
        count = self.chunks + self.stages - 1 + extra
        result: State = lax.scan(lambda s, t: (tick(s, t), None), state, jnp.arange(count, dtype=jnp.int32))[0]
        return result

    def _initial(self) -> State:
        routes = self.routes
        return State(
            routes.down.zeros(),
            routes.up.zeros(),
            routes.saved.zeros(self.rows),
            routes.sums.zeros(),
            routes.collected.zeros(self.chunks),
            routes.latest.zeros(),
        )

    def _tick(
        self, state: State, number: Any, m: Any, params: list[Any], arguments: Callable[[Any], Any], *, backward: bool
    ) -> State:
        """Run the task of this stage for chunk ``m`` if there is such a chunk, and send results to the neighbor."""
        m = m.astype(jnp.int32)
        active = (m >= 0) & (m < self.chunks)
        chunk = jnp.clip(m, 0, self.chunks - 1)

        def branch(stage: int) -> Callable[[State], State]:
            return lambda s: self._run_task(s, stage, chunk, params, arguments(chunk), backward=backward)

        branches = [branch(k) for k in range(self.stages)]
        # Idle ticks at both ends of the schedule take the last branch, so that all devices run the same
        # number of ticks.
        state = lax.switch(jnp.where(active, number, self.stages), [*branches, lambda s: s], state)
        if self.stages == 1:
            return state
        if backward:
            ring = [(k, k - 1) for k in range(1, self.stages)]
            return State(**{**vars(state), "up": [lax.ppermute(x, AXIS, ring) for x in state.up]})
        ring = [(k, k + 1) for k in range(self.stages - 1)]
        return State(**{**vars(state), "down": [lax.ppermute(x, AXIS, ring) for x in state.down]})

    def _run_task(
        self, state: State, stage: int, m: Any, params: list[Any], arguments: Mapping[str, Any], *, backward: bool
    ) -> State:
        routes, row = self.routes, m % self.rows
        task = routes.task(stage, backward=backward)
        values = routes.up.unpack(stage, state.up) if backward else routes.down.unpack(stage, state.down)
        if backward:
            values |= routes.saved.unpack(stage, state.saved, row)
        graph = self.staged.tasks[task].graph
        available = self.param_slots.unpack(stage, params)
        links = {n: values[source] for n, source in self.staged.tasks[task].takes.items()}
        outputs = self.generated[task](
            {i.name: available[i.name] for i in graph.with_role("param")},
            {
                i.name: links[i.name] if i.name in links else arguments[i.name]
                for i in graph.arguments
                if i.role != "param"
            },
        )
        values |= {(task, name): x for name, x in outputs.items()}
        return State(
            state.down if backward else routes.down.pack(stage + 1, values),
            routes.up.pack(stage - 1, values) if backward else state.up,
            state.saved if backward else routes.saved.put(stage, values, state.saved, row),
            routes.sums.add(stage, values, state.sums),
            routes.collected.put(stage, values, state.collected, m),
            routes.latest.put(stage, values, state.latest),
        )

    # -- chunks and results ------------------------------------------------------------------------------------------
    def _in_chunks(self, name: str, x: Any) -> Any:
        """Return an input of this replica with its chunks along a new first axis."""
        axis = self.staged.axes[name]
        shape = (*x.shape[:axis], self.chunks, x.shape[axis] // self.chunks, *x.shape[axis + 1 :])
        return jnp.moveaxis(x.reshape(shape), axis, 0)

    def _local_results(self, state: State, number: Any) -> tuple[list[Any], dict[Key, Any]]:
        """Return the sums of this stage, and the results of all stages on each of them."""
        sums = [lax.psum(x, DATA) if self.replicas > 1 else x for x in state.sums]
        results = {}
        for source in self.routes.results:
            stage, name = self.staged.tasks[source[0]].stage, source[1]
            is_collected = name in self.staged.axes
            slots, arrays = (
                (self.routes.collected, state.collected) if is_collected else (self.routes.latest, state.latest)
            )
            x = slots.unpack(stage, arrays)[source]
            if is_collected:
                x = jnp.moveaxis(x, 0, axis := self.staged.axes[name])
                x = x.reshape((*x.shape[:axis], -1, *x.shape[axis + 2 :]))
            # Only one stage has the value; a sum over stages sends it to all, and bools cannot be summed.
            as_sum = x.astype(jnp.int32) if x.dtype == jnp.bool_ else x
            results[source] = lax.psum(jnp.where(number == stage, as_sum, 0).astype(as_sum.dtype), AXIS).astype(x.dtype)
        return [x[None] for x in sums], results

    def _finished(
        self, params: Mapping[str, Any], inputs: Mapping[str, Any], sums: list[Any], results: dict[Key, Any]
    ) -> dict[str, Any]:
        """Return all results: run the tasks that follow the last chunk, on the parts of the parameters."""
        values = dict(results)
        for stage in range(self.stages):
            for slot, source in self.routes.sums.names_at(stage):
                values[source] = self._part(sums[slot], stage)
        for number, task in enumerate(self.staged.tasks):
            if task.once:
                links = {n: values[source] for n, source in task.takes.items()}
                outputs = self.generated[number](
                    {i.name: params[i.name] for i in task.graph.with_role("param")},
                    {
                        i.name: links[i.name] if i.name in links else inputs[i.name]
                        for i in task.graph.arguments
                        if i.role != "param"
                    },
                )
                values |= {(number, name): x for name, x in outputs.items()}
        by_name = {name: x for (_, name), x in values.items() if name in self.names}
        return {name: by_name[name] for name in self.names}

    def _part(self, stacked: Any, stage: int) -> Any:
        """Return the sum of one stage, split like a parameter of that shape."""
        shape = stacked.shape[1:]
        kinds = (self._kind(n) for n in self._params_of(stage))
        split = next((kind.split for kind in kinds if kind.shape == shape), (None,) * len(shape))
        return lax.with_sharding_constraint(stacked, PartitionSpec(None, *split))[stage]
