"""``ml.compile``: seven steps from a model to an executable program.

flatten -> resolve terminals -> infer shapes -> infer types -> optimize -> generate code -> build functions. The first
two run once per model, the others once per program, that is for each combination of input types.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike
from typing import Any, NamedTuple

from mithril import plugins
from mithril.backend import Backend, BuildOptions, Executable, LazyGraph, checked
from mithril.compiler.batch_buckets import Buckets, find_buckets
from mithril.compiler.bound_checks import with_bounds
from mithril.compiler.compiled_model import CompiledModel
from mithril.compiler.deadline import Deadline
from mithril.compiler.frontend import TraceRequest, backend_names, learn, make_backend, model_of, source_of
from mithril.compiler.graph_source import with_fixed_parameters
from mithril.compiler.index_checks import IndexCheckedExecutable, with_checks
from mithril.compiler.initializers import Array, Index
from mithril.compiler.input_types import check_known_part, input_specs, known_types, probe_types
from mithril.compiler.memory_usage import largest_sizes
from mithril.compiler.observers import Observers
from mithril.compiler.option_table import Settings, declared_options, resolve_options, split_options
from mithril.compiler.partition import Partitioned
from mithril.compiler.pass_pipeline import make_pipeline, optimization_level, record_clashes, select_passes
from mithril.compiler.program import Interface, Program, ProgramKey, Results
from mithril.compiler.program_cache import Graphs, ProgramCache, exact_sizes_saved, lowered_once
from mithril.compiler.requirements import (
    check_arguments,
    check_layers,
    check_memory,
    check_sizes,
    check_trainable,
    defer,
    framework_subject,
    inventory,
    note_graph,
    note_planning,
    note_precision,
    note_target_memory,
    outside_of_batches,
    record_absences,
    record_operations,
    record_providers,
    require_no_control_flow,
    require_no_promotion,
    require_static,
)
from mithril.compiler.signature import CALL_OPTIONS
from mithril.compiler.updated_states import with_updates
from mithril.derivatives import gradients, require_framework_gradients, with_marked_surrogates
from mithril.graph import (
    BackendError,
    Decisions,
    DTypeError,
    Graph,
    Input,
    InputError,
    OptionError,
    Output,
    TensorType,
    bind,
    result,
    verify,
)
from mithril.passes import PassContext, PassManager, PipelineReport
from mithril.plugins import CompileContext, HardwareTarget

Names = tuple[str, ...]


@checked()
def compile(model: Any, backend: Backend | type[Backend] | str, **options: Any) -> CompiledModel:
    """Compile ``model`` for ``backend`` (an instance, a class or a name such as ``"jax"``).

    ``model`` can be the path of a file in a format of a plugin, such as ``"model.onnx"``.
    `mithril options` lists the keywords and their owners. If the shapes of the inputs are known, the model is compiled
    immediately; otherwise at the first call, once per signature.
    """
    settings = resolve_options(options)
    if isinstance(model, str | PathLike):
        model = model_of(model)
    with Deadline(settings["timeout"], settings["plugin_patience"]) as deadline:
        return _compile(model, backend, options, settings, deadline)


def _compile(
    model: Any, backend: Any, options: Mapping[str, Any], settings: Settings, deadline: Deadline
) -> CompiledModel:
    instance = make_backend(backend, settings)
    decisions = Decisions(strict=settings["strict"])
    applicable, foreign = split_options(options, backend_names(instance, settings))
    if foreign:
        settings = resolve_options(applicable)
        for keyword, readers in foreign.items():
            message = f"nothing on backend '{instance.name}' reads the option {keyword}, which is for: {readers}"
            decisions.record("ignored", message)
    for origin, advice in plugins.advise(model, instance, settings, options):
        applicable |= advice
        settings = resolve_options(applicable)
        instance = make_backend(backend, settings)
        decisions.record("choice", f"options from {origin}: {', '.join(f'{n}={v!r}' for n, v in advice.items())}")
    context = CompileContext(model, instance, settings, optimization_level(settings), None, decisions)
    observers = Observers(context)
    plugins.compile_begin(context)
    try:
        compiled = Compiler(context, settings, observers, deadline).start()
    except BaseException as error:
        observers.end(None, error)
        plugins.compile_end(context, None, error)
        raise
    observers.end(compiled, None)
    plugins.compile_end(context, compiled, None)
    return compiled


class _Optimized(NamedTuple):
    """The result of steps three to five."""

    traced: Graph
    graph: Graph
    results: Results
    wrt: Names
    native: bool  # whether the backend's framework computes gradients
    report: PipelineReport
    checks: list[Any]  # of runtime.index_checks and runtime.bound_checks


class Compiler:
    """The compiler of one model for one backend, which creates programs on request."""

    def __init__(self, context: CompileContext, settings: Settings, observers: Observers, deadline: Deadline) -> None:
        self.observers, self.deadline = observers, deadline
        self.context, self.model = context, context.model
        self.settings = settings
        self.backend: Backend = context.backend
        self.decisions: Decisions = context.decisions
        self.context.target = self._target()
        self._buckets: dict[tuple[bool, bool], Buckets | None] = {}
        self._written: set[str] = set()  # kinds of programs written to file_path
        self._typed = False  # whether the last requested program was traced
        self._quiet = 0  # nesting depth of work that is not reported to observers

    def start(self) -> CompiledModel:
        """Run steps one and two and, if all input types are known, compile the first program."""
        settings = self.settings
        with self.deadline:
            self.inference = settings["inference"] or settings["static_inference"]
            self.source = source_of(self.context.model, outputs=settings["outputs"], inference=self.inference)
            self._stage("flatten", None)
            passes = select_passes(settings, self.context)  # fail early on invalid names
            record_clashes(self.context)
            record_providers(self.context, self.source)
            record_absences(self.context)
            self.specs = input_specs(self.source, settings)
            note_planning(settings, self.backend, self.decisions)
            note_precision(settings, self.backend, self.decisions)
            check_sizes(settings, self.specs)
            self._stage("resolve", None)
            is_cached = settings["cache"] and not settings["checks"]
            self.cache = ProgramCache(self.context, self.source, passes) if is_cached else None
            if settings["cache"] and not is_cached:
                self.decisions.record("ignored", "cache=True: programs with checks are not cached")
            of_calls = {option.name: settings[option.name] for option in CALL_OPTIONS}
            compiled = CompiledModel(
                self.backend,
                self.specs,
                self,
                decisions=self.decisions,
                plugins=inventory(self.backend.name),
                options={**settings.as_dict(), **of_calls, "inference": self.inference},
                name=self.source.name,
                watchers=self.observers.watchers,
            )
            self._prepare(compiled)
            if self.source.pretrained and not compiled.held_params:
                compiled.bind_pretrained()
        return compiled

    def _prepare(self, compiled: CompiledModel) -> None:
        """Compile the first program if the input types are known."""
        types = known_types(self.specs, self.backend.dtype)
        if types is None or not (self.backend.capabilities.symbolic or all(t.is_static for t in types.values())):
            check_known_part(self.source, self.specs, self.settings["constants"], self.backend.dtype)
            defer(self.settings, self.specs, self.backend, self.decisions)
            return
        if self.settings["trainable"]:
            check_trainable(self.settings["trainable"], compiled.interface)
        assumed = [name for name in types if self.specs[name].dtype is None]
        try:
            if compiled.awaits_parameters():
                lowered_once(self.cache, compiled.defer(types), self.lowered)  # raise errors now; parameters come later
            else:
                compiled.prepare(types)
        except DTypeError:
            if not assumed or self._typed:
                raise
            names = ", ".join(f"'{name}'" for name in assumed)
            self.decisions.record("assumed", f"the dtype of {names} is taken from the first call")

    # -- a program ---------------------------------------------------------------------------------------------------
    def specialize(self, request: ProgramKey) -> Program:
        """Return the program for one combination of input types, from the cache or by steps three to seven."""
        with self.deadline:
            cached = self.cache.load(request, self._graphs(request)) if self.cache is not None else None
            if cached is not None:
                self._stage("cached", None)
                return cached
            num_decisions = len(self.decisions)
            optimized = self._optimized(request)
            with exact_sizes_saved(self.cache, request):
                executable = self.build(optimized.graph, (request.kind.of, optimized.wrt) if optimized.native else None)
            self._note_file("gradients" if request.kind.of else "", request)
        interface = Interface.of(optimized.traced, optimized.graph)
        graphs = LazyGraph(optimized.traced), LazyGraph(optimized.graph)
        results, report = optimized.results, optimized.report
        program = Program(request, *graphs, interface, executable, results, report, backend=self.backend)
        self.observers.built(program)
        check_memory(program.memory, self.settings)
        self._report_unused()
        if optimized.checks:
            program.checked = IndexCheckedExecutable(executable, optimized.checks, program.types, self.backend)
        if self.cache is not None:
            self.cache.save(program, list(self.decisions)[num_decisions:])
        if request.binding:
            self._release(program)
        return program

    def _release(self, program: Program) -> None:
        """Release graphs that contain weights, which the executable has copied; they are recompiled on access."""
        traced, optimized, lowered = self._graphs(program.request)
        program.before, program.after = LazyGraph(traced), LazyGraph(optimized)
        release = getattr(program.executable, "release", None)
        if release is not None:
            release(lowered)

    def _graphs(self, request: ProgramKey) -> Graphs:
        """Return functions that compile the traced, optimized and lowered graphs of a request again."""

        def graphs() -> _Optimized:
            with self.deadline, self._quietly():
                return self._optimized(request)

        return lambda: graphs().traced, lambda: graphs().graph, lambda: self.lowered(request)

    def differentiable(self, request: ProgramKey) -> tuple[Interface, Results, Callable[..., Any]]:
        """Return the generated function of a request for the framework's own differentiation, and its interface."""
        if self.settings["static_inference"]:
            raise InputError(
                "static_inference=True embeds the parameters in the program: it has no gradients",
                hint="use inference=True instead",
            )
        if self.settings["backend_map"]:
            raise OptionError("a function of one framework requires a single backend, but backend_map names others")
        with self.deadline, self._quietly():
            optimized = self._optimized(request, for_framework=True)
            options = BuildOptions(self.settings, inference=self.inference, decisions=self.decisions)
            lowered = self._decomposed(optimized.graph, self.backend, options)
            forward = self.backend.differentiable(lowered, options)
        return Interface.of(optimized.traced, optimized.graph), optimized.results, forward

    def buckets(self, training: bool, *, recompiles: bool) -> Buckets | None:
        """Return the batch buckets if hints bound the batch and the backend compiles for each size, else None."""
        if (training, recompiles) not in self._buckets:
            is_bucketed = recompiles and "input_batch_size_range" in self.settings["hints"]
            if is_bucketed and self.settings["optimize_for"] == "latency":
                self.decisions.record("choice", "optimize_for='latency': each batch size is compiled separately")
                is_bucketed = False
            types = (
                known_types(self.specs, self.backend.dtype)
                if is_bucketed and self.settings["jit"] is not False
                else None
            )
            with self._quietly():
                graph = None if types is None else self.trace(types, training=training)
            self._buckets[training, recompiles] = None if graph is None else find_buckets(graph, self.decisions)
        return self._buckets[training, recompiles]

    def lowered(self, request: ProgramKey) -> Graph:
        """Run steps three to five and return the decomposed graph, the input of code generation."""
        with self.deadline, self._quietly():
            graph = self._optimized(request).graph
            options = BuildOptions(self.settings, inference=self.inference, decisions=self.decisions)
            return self._decomposed(graph, self.backend, options)

    def _decomposed(self, graph: Graph, backend: Backend, options: BuildOptions) -> Graph:
        """Decompose a graph to operations of the backend; clean it, as decompositions repeat subexpressions."""
        decomposed = backend.decomposed(with_marked_surrogates(graph), options)
        return decomposed if decomposed is graph else self.optimize(decomposed, only="clean")[0]

    def _optimized(self, request: ProgramKey, *, for_framework: bool = False) -> _Optimized:
        self.observers.begin()
        self._typed = False
        traced = self.trace(dict(request.types), training=request.kind.training)
        if request.binding:
            traced = with_fixed_parameters(traced, request.constants, self.backend)
        self._typed = True
        if request.kind.of:
            check_trainable(self.settings["trainable"], traced)
        check_layers(self.settings.as_dict(), declared_options(), traced, self.source.layers)
        note_graph(traced, self.settings, self.decisions)
        record_operations(traced, self.decisions)
        self._stage("types", traced)
        kind = request.kind
        keeps = kind.training or kind.of or for_framework
        graph, checks = self._with_checks(traced if keeps else with_updates(traced, self.decisions))
        derivatives: Sequence[Output] = ()
        wrt = kind.wrt if kind.wrt is not None else self._default_wrt(traced) if kind.of else ()
        native = (subject := framework_subject(self.backend, self.settings, kind.of, for_framework)) is not None
        if kind.of:
            if native:
                derivatives = [result("gradient", name, traced.input(name).value) for name in wrt]
            else:
                # Fuse first: the gradient of a composite is better than that of its decomposition.
                before = self.optimize(graph, only="fuse", then_gradients=True)[0]
                graph = gradients(before, kind.of, wrt, None if self.settings["backend_map"] else self.backend.lowers)
                derivatives = graph.results[len(before.results) :]
                self._stage("gradients", graph)
        graph, report = self.optimize(graph, then_gradients=native)
        self._stage("optimize", graph)
        note_target_memory(graph, self.context.target, self.decisions)
        if subject is not None:
            require_framework_gradients(graph, *subject)
        return _Optimized(traced, graph, Results.of(traced, derivatives), wrt, native, report, checks)

    def _with_checks(self, traced: Graph) -> tuple[Graph, list[Any]]:
        """Add the results of run-time checks to the graph: loop bounds and, with ``checks=True``, indices."""
        graph, bounds = with_bounds(traced)
        if not self.settings["checks"]:
            return graph, [*bounds]
        graph, checks, has_regions = with_checks(graph)
        if has_regions:
            self.decisions.record("ignored", "checks=True does not check indices inside branches and loops")
        return graph, [*bounds, *checks]

    def _report_unused(self) -> None:
        """Record the options that were never read during compilation."""
        unused = self.settings.unused()
        if unused:
            message = f"nothing on backend '{self.backend.name}' reads the option {', '.join(unused)}"
            self.decisions.record("ignored", message)

    def trace(self, types: Mapping[str, Any], *, training: bool) -> Graph:
        """Run steps three and four and return the typed graph."""
        settings = self.settings
        request = TraceRequest(
            training=training and not self.inference,
            constants=settings["constants"],
            trainable=settings["trainable"],
            dtype=self.backend.dtype,
        )
        graph = self.source.graph(types, request)
        self._stage("shapes", graph)
        verify(graph)
        if settings["static_shapes"]:
            require_static(graph)
        if settings["static_types"]:
            require_no_promotion(graph)
        if not settings["dynamic_control_flow"]:
            require_no_control_flow(graph)
        return graph

    def probe(self, types: Mapping[str, TensorType] | None, *, training: bool = True) -> Graph:
        """Return a graph of the interface: names, parameters and shapes; default types are those the layers expect."""
        input_types = types if types is not None else probe_types(self.specs, self.source, self.backend.dtype)
        with self._quietly():
            return self.trace(input_types, training=training and not self.inference)

    def initial(self, inputs: Iterable[Input], seed: int, index: Index | None = None) -> dict[str, Array]:
        """Return the model's initial values of parameters and states, or a region of each."""
        return self.source.initial(inputs, seed, index)

    def learn(self, shapes: Mapping[str, Any]) -> bool:
        """Let layers take unknown sizes from parameters of these shapes; return whether the model has layers."""
        has_layers = learn(self.source, shapes)
        if self.cache is not None:
            self.cache.refresh()
        return has_layers

    @property
    def pretrained(self) -> Mapping[str, Any]:
        """The arrays that the model provides for parameters and states."""
        return self.source.pretrained

    def pipeline(self) -> tuple[PassManager, PassContext]:
        """Return the passes of the level with the changes of user and plugins, and their context."""
        context = PassContext(
            backend=self.backend,
            target=self.context.target,
            level=self.context.level,
            options=self.settings,
            decisions=self.decisions,
        )
        return make_pipeline(self.settings, self.context), context

    def optimize(self, graph: Graph, only: str = "", *, then_gradients: bool = False) -> tuple[Graph, PipelineReport]:
        """Run step five: all passes, or those of the stage ``only``."""
        manager, context = self.pipeline()
        context.gradients_follow = then_gradients
        manager = PassManager([p for p in manager.passes if only in ("", p.stage)], check=manager.check)
        return manager.run(graph, context, runner=self._run_pass)

    def _run_pass(self, pass_: Any, graph: Graph, context: Any, last: Callable[..., Graph]) -> Graph:
        self.deadline.check(f"pass '{pass_.name}'")
        start = time.perf_counter()
        after = plugins.run_pass(pass_, graph, context, last)
        if not self._quiet:
            self.observers.passed(pass_.name, graph, after, start, time.perf_counter() - start)
        return after

    def _note_file(self, part: str, request: ProgramKey) -> None:
        """Record that another program overwrites the same file."""
        if self.settings.as_dict()["file_path"] is not None:
            if part in self._written:
                types = ", ".join(f"{n}: {t}" for n, t in request.types)
                message = f"file_path contains the latest program{part and ' with '}{part}, for {types}"
                self.decisions.record("choice", message)
            self._written.add(part)

    def build(self, graph: Graph, native: tuple[Names, Names] | None = None) -> Executable:
        """Run steps six and seven: decompose to operations of the backend, generate code, build.

        With ``native`` (outputs with cotangents, inputs to differentiate) the backend's framework computes gradients.
        """
        options = BuildOptions(self.settings, inference=self.inference, decisions=self.decisions)
        backend_map = {name: make_backend(b, self.settings) for name, b in self.settings["backend_map"].items()}
        if backend_map and native is not None:
            raise OptionError("autodiff='native' requires a single backend, but backend_map names others")

        def single(graph: Graph, backend: Backend) -> Executable:
            return backend.build(self._decomposed(graph, backend, options), options)

        def last(graph: Graph, backend: Backend, target: HardwareTarget | None) -> Any:
            if backend_map:
                return Partitioned(graph, backend, backend_map, single)
            lowered = self._decomposed(graph, backend, options)
            self._stage("generate", lowered)
            check_arguments(lowered, self.backend, self.settings)
            if native is not None:
                return backend.build_with_gradients(lowered, *native, options)
            return backend.build(lowered, options)

        executable: Executable = plugins.build(graph, self.backend, self.context.target, last)
        self._stage("build", executable.graph)
        return executable

    def check_call(self, program: Program, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise an error if the sizes of a call are outside the hint's batch range or exceed ``max_memory_gb``."""
        if wrong := outside_of_batches(self.settings, {n: shape[0] for n, shape in shapes.items() if shape}):
            raise InputError(wrong)
        if self.settings["max_memory_gb"] is not None and largest_sizes(program.memory.graph) is None:
            types = program.types
            sizes = bind({n: t.shape for n, t in types.items()}, {n: shapes[n] for n in types})
            check_memory(program.memory, self.settings, sizes)

    # -- helpers -----------------------------------------------------------------------------------------------------
    def _default_wrt(self, graph: Graph) -> tuple[str, ...]:
        """Return the inputs that are differentiated by default: parameters and trainable inputs."""
        return tuple(
            i.name
            for i in graph.with_role("param", "input")
            if i.type.dtype.is_float and i.tags.get("trainable", i.role == "param")
        )

    def _target(self) -> HardwareTarget | None:
        name = self.settings["target_hardware"]
        if name is None:
            return None
        target = plugins.target(name).spec
        families = self.backend.capabilities.families
        if target.family not in families:
            raise BackendError(
                f"target_hardware='{name}' conflicts with the backend's device",
                facts=[
                    f"'{name}' belongs to the family '{target.family}'",
                    f"{self.backend!r} runs on: {', '.join(families)}",
                ],
                hint="choose a backend and device of that family, or omit target_hardware",
            )
        if target.family == self.backend.capabilities.family and self.backend.capabilities.local:
            message = f"target_hardware='{name}': the backend compiles for its {target.family} in any case"
            self.decisions.record("choice", message)
        return target

    def _stage(self, name: str, graph: Graph | None) -> None:
        self.deadline.check(f"step '{name}'")
        if not self._quiet:
            self.observers.stage(name, graph)
            plugins.compile_stage(self.context, name, graph)

    @contextmanager
    def _quietly(self) -> Iterator[None]:
        self._quiet += 1
        try:
            yield
        finally:
            self._quiet -= 1
