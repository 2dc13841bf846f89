"""The engine: builds and runs the executables of training, one per set of batch shapes, and owns all carried arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np

from mithril import ops, plugins
from mithril.backend import Backend, BuildOptions, Executable, to_numpy
from mithril.compiler import (
    Bound,
    BufferBound,
    CompiledModel,
    IndexInput,
    InputSpec,
    ModelCompiler,
    ProgramMemory,
    array_type,
    as_numpy,
    check_memory,
    convert_input,
    given_indices,
    resolve_type,
    with_bounds,
)
from mithril.derivatives import require_framework_gradients, value_and_gradients
from mithril.graph import (
    BackendError,
    DType,
    Graph,
    Input,
    InputError,
    Node,
    OptionError,
    Output,
    TensorType,
    Value,
    closest,
    shape_text,
)
from mithril.passes import Pass
from mithril_parallel.processes import World
from mithril_parallel.sharding.framework_gradients import with_framework_gradients
from mithril_train.augment.stages import PREFIX, Augmentations, augmented
from mithril_train.engine.carried_arrays import CarriedArrays
from mithril_train.step.step import (
    SOUND,
    Reports,
    with_gradients,
    with_gradients_of,
    with_loss,
    with_update,
)
from mithril_train.step.step_config import StepConfig
from mithril_train.step.train_step import written


def broadcasts(graph: Graph) -> Iterator[tuple[str, Node]]:
    """Yield a description of each operation in losses and metrics that broadcasts two values against each other.

    Only values that keep their shape since the model or the batch count: after a reshape, a slice or a reduction,
    broadcasting is intended.
    """
    written = [node for node in graph.nodes if node.tags.get("phase") == "loss"]
    constants = {i.value for i in graph.with_role("constant")}
    computed = {v for node in written for v in node.results}
    unchanged: set[Any] = {v for node in written for v in node.operands if v not in computed and v not in constants}
    for node in written:
        values = [v for v in node.operands if v is not None and v in unchanged]
        if not values or not (node.op.elementwise or node.op is ops.cast):
            continue
        shape = node.result.shape
        if any(v.shape == shape for v in values):
            unchanged.add(node.result)
        elif len(values) > 1:
            shapes = " and ".join(shape_text(v.shape) for v in values)
            yield f"'{node.op.name}' in a loss or metric broadcasts {shapes} to {shape_text(shape)}", node


Converters = tuple[tuple[str, Callable[[Any], Any]], ...]
FLAG = "is_training"


@dataclass(frozen=True)
class Step:
    """The executables for batches of one set of shapes, and the conversions of their columns."""

    graph: Graph  # of the full step, after the passes
    run: Executable  # a full step
    add: Executable | None  # accumulates gradients, if a step consists of several batches
    convert: Converters
    reports: tuple[Output, ...]
    fixed: Mapping[str, Any]  # additional inputs that are constant
    indices: tuple[IndexInput, ...]  # columns of the batch that contain indices
    bounds: tuple[Bound | BufferBound, ...]  # results that report whether a loop reached its bound
    carried: tuple[str, ...]  # the carried arrays that the step reads; those of frozen parameters may be missing


@dataclass(frozen=True)
class Evaluation:
    """The executable for loss and metrics without training."""

    graph: Graph
    run: Executable
    convert: Converters
    fixed: Mapping[str, Any]
    initial: Mapping[str, Any]  # states that training does not have, such as caches of generation
    indices: tuple[IndexInput, ...]
    bounds: tuple[Bound | BufferBound, ...]


def _check_indices(backend: Backend, indices: Iterable[IndexInput], batch: Mapping[str, Any]) -> None:
    """Raise if labels or tokens are out of range; arrays on a device are not fetched for this check."""
    for index_input in indices:
        column = backend.to_main_memory(batch[index_input.name])
        if column is not None:
            index_input.raise_if_violated(column)


class Engine(CarriedArrays):
    """One model, one configuration of the step, one backend."""

    def __init__(self, compiled: CompiledModel, recipe: StepConfig, augmentations: Augmentations | None = None) -> None:
        self.compiled = compiled
        self.augmentations = augmentations
        self.recipe = recipe
        self.backend: Backend = compiled.backend
        self.compiler = compiler_of(compiled)
        self.session = self.compiler.session
        self.decisions = compiled.decisions
        if self.session.inference:
            raise OptionError(
                "this model was compiled with inference=True: it cannot be trained",
                hint="compile it without inference=True",
            )
        if self.session.settings["autodiff"] == "native":
            self.decisions.record("ignored", "autodiff='native': a training step differentiates the graph")
        if self.session.settings["checks"] and not self.backend.capabilities.checks_indices:
            message = "a training step looks at labels and tokens of NumPy batches, not at indices that it computes"
            self.decisions.record("ignored", f"checks=True: {message}")
        super().__init__()
        self.inputs: dict[str, TensorType] = {}  # of the model, as traced last
        self._steps: dict[Any, Step] = {}
        self._evaluations: dict[Any, Evaluation] = {}
        self._traced: tuple[Any, Graph, Graph] | None = None  # the last one, which is often requested again
        self._rates: dict[str, tuple[float, Any]] = {}
        self._has_run: set[Any] = set()

    def begin(
        self,
        batch: Mapping[str, Any],
        seed: int,
        initial_values: Mapping[str, Any],
        state: Mapping[str, Any],
        saved: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Build the executables for such batches; return everything carried: initial arrays, or those of ``saved``.

        ``initial_values`` and ``state`` replace randomly initialized arrays. The executable is built first: it knows
        where each array belongs, so that no device ever holds a complete copy of an array that is sharded.
        """
        self.forget_sizes()
        traced, _, _ = self.traced(batch, training=True)
        self.declare(traced, initial_values, state)
        step = self.prepare(batch)
        self.place_like(step.run, step.carried)
        if saved is not None:
            return self.restored(saved)
        arrays: dict[str, Any] = {}
        for i in (*traced.with_role("param"), *traced.with_role("state")):
            array = {**initial_values, **state}.get(i.name)
            if array is None:
                arrays[i.name] = self.assembled(i.name, tuple(map(int, i.type.shape)), partial(self._initial, i, seed))
                continue
            if tuple(array.shape) != i.type.shape:
                raise InputError(f"'{i.name}' has shape {list(array.shape)}, expected {list(i.type.shape)}")
            arrays[i.name] = self.placed(i.name, array)
        return self.with_extra(arrays)

    def _initial(self, declared: Input, seed: int, index: tuple[slice, ...] | None) -> np.ndarray[Any, Any]:
        """Draw or load the region of a parameter that a device holds."""
        return self.compiler.initial([declared], seed, index)[declared.name]

    # -- running -----------------------------------------------------------------------------------------------------
    def step(self, batch: Mapping[str, Any], rates: Mapping[str, float], *, last: bool = True) -> Reports:
        """Run one step, or one batch of an accumulated step if ``last`` is False; return its reports."""
        step = self.prepare(batch)
        _check_indices(self.backend, step.indices, batch)
        inputs = {n: convert(batch[n]) for n, convert in step.convert}
        inputs.update(step.fixed)
        carried = {n: self.arrays[n] for n in step.carried}
        if last:
            inputs.update(self._rate_arrays(rates))
        run = step.run if last else step.add
        assert run is not None
        try:
            results = run(carried, inputs)
        # Also a keyboard interrupt: donated parameters may have been overwritten in part, which no
        # later step can repair.
        except BaseException:
            message = "a step failed while it ran, and may have changed some of the parameters in place"
            self.decisions.record("assumed", f"{message}: trainer.load(checkpoint) restores all", warn=True)
            raise
        flags = {n: results.pop(n) for bound in step.bounds for n in bound.names}
        reports = self._reports(step.reports, results)
        # A new dictionary at once, so that an interrupt sees all new arrays or none.
        self.arrays = {**self.arrays, **results}
        # A step that raises here has kept all values, but in new arrays: the old ones may be overwritten. It
        # must not count.
        self._hold_bounds(step.bounds, flags)
        return reports

    def forget_failure(self) -> None:
        """Let the next step update again, after one that was not finite."""
        if SOUND in self.arrays:
            self.arrays = {**self.arrays, SOUND: self.placed(SOUND, np.asarray(True))}

    def _reports(self, outputs: Iterable[Output], results: dict[str, Any]) -> Reports:
        """Remove reports from the results. A step that only accumulates gradients has fewer."""
        reports = Reports({}, {})
        for r in outputs:
            if r.name in results:
                measure = self.recipe.metrics.get(r.of)
                merged = measure is not None and measure.metric is not None
                (reports.statistics if merged else reports.values)[r.name if merged else r.of] = results.pop(r.name)
        return reports

    def _hold_bounds(self, bounds: Iterable[Bound | BufferBound], results: dict[str, Any]) -> None:
        """Remove the loop flags from the results, and raise InputError if a loop reached its bound."""
        for bound in bounds:
            bound.raise_if_violated([self.backend.to_numpy(results.pop(name)) for name in bound.names], {})

    def evaluate(self, batch: Mapping[str, Any], parameters: Mapping[str, Any] | None = None) -> Reports:
        """Return loss and metrics of a batch."""
        key = signature(batch)
        evaluation = self._evaluations.get(key) or self._new_evaluation(key, batch)
        _check_indices(self.backend, evaluation.indices, batch)
        inputs = {n: convert(batch[n]) for n, convert in evaluation.convert}
        inputs.update(evaluation.fixed)
        arrays = {**evaluation.initial, **self.arrays}
        inputs.update({i.name: arrays[i.name] for i in evaluation.graph.with_role("state")})
        results = dict(evaluation.run(self.live(parameters), inputs))
        self._hold_bounds(evaluation.bounds, results)
        return self._reports(evaluation.graph.results_of("report"), results)

    def model_states(self) -> dict[str, Any]:
        """Return the state of the model, without that of augmentations."""
        return {n: self.arrays[n] for n in self.states if not n.startswith(f"{PREFIX}/")}

    def live(self, parameters: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the current parameters; the next step may overwrite them."""
        parameter_values = parameters or {}
        return {n: parameter_values.get(n, self.arrays[n]) for n in self.parameters}

    def _rate_arrays(self, rates: Mapping[str, float]) -> dict[str, Any]:
        out = {}
        for name, rate in rates.items():
            cached_rate = self._rates.get(name)
            if cached_rate is None or cached_rate[0] != rate:
                # Rates change rarely, and are transferred to the device only then.
                cached_rate = self._rates[name] = (rate, self.backend.array(np.float32(rate)))
            out[name] = cached_rate[1]
        return out

    def as_inputs(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Convert the columns that the model reads, as a step does; omit others, such as targets."""
        inputs, _ = self.types(batch, training=False)
        return {n: self._converter(n, t.dtype)(batch[n]) for n, t in inputs.items() if n in batch}

    def joined_rows(self, batch: Mapping[str, Any], world: World) -> dict[str, Any]:
        """Return the batch of which each process has some rows."""
        if world.size == 1:
            raise InputError(
                "each process has its own rows of this batch, but training runs in one process",
                hint="leave out rank= and world= of the DataLoader, or start several processes",
            )
        columns = {}
        for name, x in batch.items():
            spec = self.session.specs.get(name, InputSpec(name))
            dtype = resolve_type(spec, array_type(name, x), self.backend.dtype).dtype.numpy
            columns[name] = self.backend.from_local_rows(np.asarray(self._numpy(x)).astype(dtype, copy=False))
        return columns

    def has_run(self, batch: Mapping[str, Any]) -> bool:
        """Whether a step has run for such batches, so that its program is compiled."""
        key = (signature(batch), self.recipe.frozen)
        is_new = key not in self._has_run
        self._has_run.add(key)
        return not is_new

    def prepare(self, batch: Mapping[str, Any]) -> Step:
        """Compile the executables for such batches."""
        key = (signature(batch), self.recipe.frozen)
        return self._steps.get(key) or self._new_step(key, batch)

    # -- building executables ----------------------------------------------------------------------------------------
    def types(self, batch: Mapping[str, Any], *, training: bool) -> tuple[dict[str, TensorType], dict[str, TensorType]]:
        """Return the types of the model's inputs in the batch and of all columns, after dtype conversion."""
        specs: Mapping[str, InputSpec] = self.session.specs
        actual = {n: array_type(n, x) for n, x in batch.items()}
        columns = {}
        for name, t in actual.items():
            resolved = resolve_type(specs.get(name, InputSpec(name)), t, self.backend.dtype)
            columns[name] = TensorType(resolved.dtype, t.shape)
        inputs = {n: t for n, t in columns.items() if n in specs}
        if FLAG in specs:
            inputs.setdefault(FLAG, array_type(FLAG, np.asarray(training)))
        missing = [n for n, s in specs.items() if s.required and n not in inputs]
        if missing:
            columns_near = closest(missing[0], [n for n in batch if n not in specs], 1)
            raise InputError(
                f"the batch lacks '{missing[0]}', an input of the model",
                facts=[f"inputs: {', '.join(specs)}", f"batch: {', '.join(batch)}"],
                hint=f"rename the column '{columns_near[0]}' to '{missing[0]}'"
                if columns_near
                else specs[missing[0]].misspelling or f"give a column the name '{missing[0]}'",
            )
        return inputs, columns

    def traced(self, batch: Mapping[str, Any], *, training: bool) -> tuple[Graph, Graph, dict[str, TensorType]]:
        """Return the model's graph, the same with loss and metrics, and the types of the batch."""
        inputs, columns = self.types(batch, training=training)
        self.inputs = inputs
        key = (training, tuple(columns.items()))
        if self._traced is None or self._traced[0] != key:
            stages, types = self.augmentations.stages(columns) if training and self.augmentations else ([], columns)
            traced = self.compiler.pipeline.trace({n: types.get(n, t) for n, t in inputs.items()}, training=training)
            self.check_sizes(traced)
            replaced: dict[str, Value] = {}
            if stages:
                traced, replaced = augmented(stages, traced, columns)
            try:
                measured = with_loss(traced, columns, self.recipe, list(inputs), replaced)
                self._traced = key, traced, measured
            except OptionError as error:
                suspects = [s.misspelling for n, s in self.session.specs.items() if n in batch and s.misspelling]
                raise error.with_facts(*suspects) from None
            for message, node in broadcasts(measured):
                advice = "bring predictions and targets to one shape, for example with targets[:, None] in the data"
                self.decisions.record("assumed", f"{message}: {advice}", node.origin, warn=True)
        return self._traced[1], self._traced[2], columns

    def differentiated(self, forward: Graph) -> Graph:
        """Return the graph of the forward and backward part, before the passes."""
        return with_gradients(self._fused(forward), self.recipe, self.trained, self._with_gradients)

    def _with_gradients(self, graph: Graph, loss: str, names: Iterable[str]) -> Graph:
        lowers = None if self.session.settings["backend_map"] else self.backend.lowers
        differentiated: Graph = value_and_gradients(graph, loss, names, lowers)
        return differentiated

    def _fused(self, forward: Graph) -> Graph:
        """Fuse a forward pass first: the gradient of a composite is better than that of its decomposition."""
        return self.compiler.pipeline.optimize(forward, only="fuse", then_gradients=True)[0]

    def _differentiated(self, forward: Graph, with_gradients: Callable[..., Graph], *arguments: Any) -> Graph:
        """Return the optimized graph of a forward pass and its gradients, which the backend or the graph computes."""
        fused = self._fused(forward)
        if not self.backend.differentiates(BuildOptions(self.session.settings)):
            return self._passes(with_gradients(fused, *arguments, self._with_gradients), first=True)

        def by_framework(graph: Graph, loss: str, names: Iterable[str]) -> Graph:
            optimized = self._passes(graph, first=True)
            hint = "replace the operation, or train on one device"
            require_framework_gradients(optimized, f"'{self.backend.name}' on several devices", hint, custom=True)
            return with_framework_gradients(optimized, [loss], names)

        return with_gradients(fused, *arguments, by_framework)

    def _differentiator(self, forward: Graph) -> Callable[[str, tuple[str, ...]], Graph]:
        """Return a function that builds the optimized forward and backward part for a loss, once for each."""

        @cache
        def differentiate(loss: str, names: tuple[str, ...]) -> Graph:
            return self._differentiated(forward, with_gradients_of, loss, names)

        return differentiate

    def _new_step(self, key: Any, batch: Mapping[str, Any]) -> Step:
        _, measured, columns = self.traced(batch, training=True)
        forward, bounds = with_bounds(measured)
        full, part = self._step_graphs(forward)
        graph = self._passes(full, first=False)
        add = None if part is None else self._build(self._passes(part, first=False))
        step = Step(
            graph,
            self._build(graph),
            add,
            self._converters(graph, columns),
            graph.results_of("report"),
            self._fixed(graph, batch, training=True),
            given_indices(measured),
            tuple(bounds),
            tuple(i.name for i in graph.with_role("param")),
        )
        self._steps[key] = step
        if len(self._steps) > 1:
            shapes = ", ".join(f"{n}: {t}" for n, t in columns.items())
            self.decisions.record("specialized", f"training step {len(self._steps)} for {shapes}")
        return step

    def _step_graphs(self, forward: Graph) -> tuple[Graph, Graph | None]:
        """Return the graph of a full step, and that of its earlier batches if a step consists of several."""
        if self.recipe.program is not None:
            return written(forward, self.recipe, self.trained, self._differentiator(forward)), None
        inner = self._differentiated(forward, with_gradients, self.recipe, self.trained)
        full = with_update(inner, self.recipe, self.trained, branch=self._branches())
        if self.recipe.accumulate == 1:
            return full, None
        return full, with_update(inner, self.recipe, self.trained, last=False)

    def _new_evaluation(self, key: Any, batch: Mapping[str, Any]) -> Evaluation:
        _, measured, columns = self.traced(batch, training=False)
        bounded, bounds = with_bounds(measured)
        graph = bounded.replaced(results=tuple(r for r in bounded.results if r.role != "state"))
        graph, _ = self.compiler.pipeline.optimize(graph)
        new = [i for i in graph.with_role("state") if i.name not in self.states]
        evaluation = Evaluation(
            graph,
            self.compiler.builder.build(graph),
            self._converters(graph, columns),
            self._fixed(graph, batch, training=False),
            {i.name: self.placed(i.name, self._initial(i, 0, None)) for i in new},
            given_indices(measured),
            tuple(bounds),
        )
        self._evaluations[key] = evaluation
        return evaluation

    def _branches(self) -> bool:
        """Whether skipping an update with ``if`` is cheaper than selecting every value.

        According to measurements it is on CPUs, if the program supports branches; on a GPU it would wait for the
        device.
        """
        on_cpu = self.backend.capabilities.family == "cpu"
        return on_cpu and self.backend.branches(BuildOptions(self.session.settings))

    def _passes(self, graph: Graph, *, first: bool) -> Graph:
        """Run the pipeline on the forward and backward pass, then cleanup and memory passes on the full step.

        Passes that choose dtypes do not process the update: parameters and moments keep their storage precision.
        """
        if first:
            return self._run_passes(graph, lambda one: one.stage != "final")
        return self._run_passes(graph, lambda one: one.stage in ("clean", "canonical", "final"))

    def _run_passes(self, graph: Graph, keep: Callable[[Pass], bool]) -> Graph:
        manager, context = self.compiler.passes()
        return manager.selected(keep).run(graph, context, runner=plugins.run_pass)[0]

    def _build(self, graph: Graph) -> Executable:
        """Build the executable, which takes ownership of all carried arrays."""
        executable: Executable = self.compiler.builder.build(self._shared(graph))
        check_memory(ProgramMemory(self.backend, executable), self.session.settings)
        return executable

    def _shared(self, graph: Graph) -> Graph:
        """Decompose the graph for the backend and merge duplicates: a loss and its gradient share subexpressions."""
        if self.session.settings["backend_map"]:
            return graph  # parts may belong to different backends, which decompose them differently
        options = BuildOptions(self.session.settings, decisions=self.decisions)
        lowered = self.backend.decomposed(graph, options)
        phases = {v: node.tags["phase"] for node in lowered.nodes if "phase" in node.tags for v in node.results}
        # CSE merges nodes with equal tags only; a value of the loss and the same one of the gradient
        # differ in their phase.
        lowered = lowered.replaced(nodes=tuple(without_phase(node) for node in lowered.nodes))
        cleaned = self._run_passes(lowered, lambda one: one.stage == "clean")
        return cleaned.replaced(nodes=tuple(with_phase(node, phases) for node in cleaned.nodes))

    def _fixed(self, graph: Graph, batch: Mapping[str, Any], *, training: bool) -> dict[str, Any]:
        if FLAG in batch or FLAG not in {i.name for i in graph.inputs}:
            return {}
        return {FLAG: self.backend.array(np.asarray(training))}

    def _converters(self, graph: Graph, columns: Mapping[str, TensorType]) -> Converters:
        """Return the conversion to the backend of every column that the graph uses."""
        read = {i.name for i in graph.arguments}
        return tuple((n, self._converter(n, t.dtype)) for n, t in columns.items() if n in read)

    def _converter(self, name: str, target_dtype: DType) -> Callable[[Any], Any]:
        backend, native, decisions = self.backend, self.backend.native_dtype(target_dtype), self.decisions

        def convert(x: Any) -> Any:
            # Arrays of the backend stay on their device: a conversion would fetch them.
            if backend.is_array(x) and x.dtype == native:
                return x
            array = as_numpy(name, to_numpy(x, f"'{name}'") if hasattr(x, "dtype") else x)
            return backend.array(convert_input(name, array, target_dtype, decisions, rounds=True))

        return convert


def compiler_of(compiled: CompiledModel) -> ModelCompiler:
    """Return the compiler of the model, which also compiles the step."""
    if not isinstance(compiled.compiler, ModelCompiler):
        raise OptionError(
            "cannot train this model: its logical model is not available",
            hint="compile the logical model with ml.compile",
        )
    return compiled.compiler


def without_phase(node: Node) -> Node:
    """Remove the phase of the node, so that CSE merges equal nodes of different phases."""
    if "phase" not in node.tags:
        return node
    return node.replaced(tags={n: tag for n, tag in node.tags.items() if n != "phase"})


def with_phase(node: Node, phases: Mapping[Value, Any]) -> Node:
    """Restore the phase of the node, by which pipeline stages are partitioned."""
    phase = next((phases[v] for v in node.results if v in phases), None)
    return node if phase is None else node.replaced(tags={**node.tags, "phase": phase})


def signature(batch: Mapping[str, Any]) -> Any:
    """Return the key of the executable that a batch needs."""
    try:
        return tuple([(n, x.shape, x.dtype) for n, x in batch.items()])
    except AttributeError:
        raise BackendError("a batch must consist of arrays") from None
