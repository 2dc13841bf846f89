"""``ml.compile``: seven steps from a model to an executable program.

flatten -> resolve terminals -> infer shapes -> infer types -> optimize -> generate code -> build functions. The first
two run once per model (``Session``), the others once per program, that is for each combination of input types: three
to five in ``Pipeline``, six and seven in ``Builder``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from os import PathLike
from typing import Any, NamedTuple

from mithril import plugins
from mithril.backend import Backend, BuildOptions, LazyGraph, checked
from mithril.compiler.batch_buckets import Buckets, find_buckets
from mithril.compiler.bound_weights import marked, note_early, rebound, split_off
from mithril.compiler.builder import Builder
from mithril.compiler.compiled_model import CompiledModel
from mithril.compiler.deadline import Deadline, time_limit
from mithril.compiler.frontend import backend_names, learn, make_backend, model_of
from mithril.compiler.index_checks import IndexCheckedExecutable
from mithril.compiler.initializers import Array, Index
from mithril.compiler.input_types import check_known_part, probe_types
from mithril.compiler.memory_usage import largest_sizes, memory_use
from mithril.compiler.observers import Observers, Progress
from mithril.compiler.option_table import Settings, resolve_options, split_options
from mithril.compiler.pass_pipeline import optimization_level
from mithril.compiler.pipeline import Pipeline, ProgramGraphs
from mithril.compiler.program import BoundArrays, Interface, Program, ProgramKey, Results
from mithril.compiler.program_cache import Graphs, exact_sizes_saved, lowered_once
from mithril.compiler.requirements import check_memory, check_trainable, defer, outside_of_batches
from mithril.compiler.session import Session
from mithril.compiler.signature import CALL_OPTIONS, known_types
from mithril.compiler.unused_parts import Unused
from mithril.graph import Decision, Decisions, DTypeError, Graph, Input, InputError, OptionError, TensorType, bind
from mithril.passes import PassContext, PassManager
from mithril.plugins import CompileContext


@checked()
def compile(model: Any, backend: Backend | type[Backend] | str, **options: Any) -> CompiledModel:
    """Compile ``model`` for ``backend`` (an instance, a class or a name such as ``"jax"``).

    ``model`` can be the path of a file in a format of a plugin, such as ``"model.onnx"``.
    `mithril options` lists the keywords and their owners. If the shapes of the inputs are known, the model is compiled
    immediately; otherwise at the first call, once per signature.
    """
    with Deadline(time_limit(options)) as deadline:
        settings = resolve_options(options)
        deadline.watch_plugins(settings["plugin_patience"], settings["timeout"])
        if isinstance(model, str | PathLike):
            model = model_of(model)
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
    # Advice comes before the context exists: observers and cache keys see the options that are in
    # force.
    for origin, advice in plugins.advise(model, instance, settings, options, decisions):
        applicable |= advice
        settings = resolve_options(applicable)
        instance = make_backend(backend, settings)
        decisions.record("choice", f"options from {origin}: {', '.join(f'{n}={v!r}' for n, v in advice.items())}")
    context = CompileContext(model, instance, settings, optimization_level(settings), None, decisions)
    observers = Observers(context, deadline)
    observers.begin()
    try:
        compiled = _compiled_model(Session(context, settings, deadline, observers), observers)
    except BaseException as error:  # observers get an end for each begin, also after Ctrl-C
        observers.end(None, error)
        raise
    observers.end(compiled, None)
    return compiled


def _compiled_model(session: Session, observers: Observers) -> CompiledModel:
    """Return the compiled model, with its first program if all input types are known."""
    settings = session.settings
    compiler = ModelCompiler(session, observers)
    of_calls = {option.name: settings[option.name] for option in CALL_OPTIONS}
    compiled = CompiledModel(
        session.backend,
        session.specs,
        compiler,
        decisions=session.decisions,
        options={**settings.as_dict(), **of_calls, "inference": session.inference},
        name=session.source.name,
        watchers=observers.watchers,
    )
    _prepare(compiled, compiler)
    if session.source.pretrained and not compiled.held_params:
        compiled.bind_pretrained()
    return compiled


def _prepare(compiled: CompiledModel, compiler: ModelCompiler) -> None:
    """Compile the first program if the input types are known."""
    session = compiler.session
    settings, specs, backend, decisions = session.settings, session.specs, session.backend, session.decisions
    types = known_types(specs, backend.dtype)
    if types is None or not (backend.capabilities.symbolic or all(t.is_static for t in types.values())):
        check_known_part(session.source, specs, settings["constants"], backend.dtype)
        defer(settings, specs, backend, decisions)
        return
    if settings["trainable"]:
        check_trainable(settings["trainable"], compiled.interface, session.unused)
    assumed = [name for name in types if specs[name].dtype is None]
    try:
        if compiled.awaits_parameters(types):
            request = compiled.defer(types)
            if settings["static_inference"]:
                # raise errors now; parameters come later
                lowered_once(session.cache, request, compiler.lowered_and_checked)
        else:
            compiled.prepare(types)
    except DTypeError:
        # Only a dtype that was guessed may be wrong without an error of the user; if tracing succeeds,
        # the types are right, and the error has another cause.
        if not assumed or compiler.can_trace(types):
            raise
        names = ", ".join(f"'{name}'" for name in assumed)
        decisions.record("assumed", f"the dtype of {names} is taken from the first call")


class _Prepared(NamedTuple):
    """Graphs of a program that is built later, and the decisions that were made for them."""

    graphs: ProgramGraphs
    decisions: list[Decision]


def _key(request: ProgramKey) -> tuple[Any, ...]:
    return request.types, request.kind, request.stored


class ModelCompiler:
    """The ``Compiler`` of one model for one backend, which creates programs on request."""

    def __init__(self, session: Session, observers: Observers) -> None:
        self.session, self.observers = session, observers
        self.pipeline = Pipeline(session, observers)
        self.builder = Builder(self.pipeline)
        # For all graphs except those of a new program: observers see each program once.
        self._unreported = Builder(Pipeline(session, Progress(session.deadline)))
        self._buckets: dict[tuple[bool, bool], Buckets | None] = {}
        self._folds: dict[Any, bool] = {}  # by types, kind, sparse inputs and statistics
        self._prepared: dict[Any, _Prepared] = {}  # by types, kind, sparse inputs, and whether it is of a binding
        self._written: set[str] = set()  # kinds of programs written to file_path

    # -- a program ---------------------------------------------------------------------------------------------------
    def specialize(self, request: ProgramKey) -> Program:
        """Return the program for one combination of input types, from the cache or by steps three to seven."""
        session, cache = self.session, self.session.cache
        # Programs for a hint are too expensive where a compiler for another machine works for minutes.
        is_cheap = session.backend.capabilities.local and not session.settings["backend_map"]
        peak_of = partial(self._peak_of, request) if is_cheap else None
        with session.deadline:
            cached = cache.load(request, self._graphs(request)) if cache is not None else None
            if cached is not None:
                self.observers.stage("cached", None)
                return cached if request.bound is None else rebound(cached, request.binding, request.bound)
            # Decisions of this program are stored with it, so that a program from the cache explains
            # itself as well.
            num_decisions = len(session.decisions)
            is_of_binding = request.bound is not None
            prepared = None if request.embeds else self._prepared.pop((*_key(request), is_of_binding), None)
            graphs = self.pipeline.graphs(request) if prepared is None else prepared.graphs
            with exact_sizes_saved(cache, request):
                native = (request.kind.of, graphs.wrt) if graphs.native else None
                early: list[Graph] = []
                graph, split = graphs.optimized, None
                if request.bound is not None:
                    graph = split_off(graph, session.backend, request.bound.statistics, early)
                    split = partial(self._late, request.bound, early)
                executable = self.builder.build(graph, native, peak_of, split)
            self._note_file("gradients" if request.kind.of else "", request)
        program = Program(
            request,
            LazyGraph(graphs.traced),
            LazyGraph(graph),
            Interface.of(graphs.traced, graph if request.bound is None else executable.graph),
            executable,
            graphs.results,
            graphs.report,
            backend=session.backend,
        )
        if request.bound is not None:
            program.folded = tuple(map(LazyGraph, early))
            program.pack = partial(session.backend.packed_weights, executable, self.builder.options())
            note_early(early, session.decisions)
            program = rebound(program, request.binding, request.bound)
        self.observers.built(program)
        with session.deadline:
            check_memory(program.memory, session.settings, peak_of=peak_of)
        self._report_unused()
        if graphs.checks:
            program.checked = IndexCheckedExecutable(executable, graphs.checks, program.types, session.backend)
        if cache is not None:
            earlier = [] if prepared is None else prepared.decisions
            later = list(session.decisions)[num_decisions:]
            cache.save(program, [d for d in (*earlier, *later) if d.kind != "observer"])  # of this process
        if request.embeds:
            self._release(program)
        return program

    def _late(self, bound: BoundArrays, early: list[Graph], lowered: Graph) -> Graph:
        """Return the part of a decomposed graph that calls run; append the other to ``early``."""
        return marked(split_off(lowered, self.session.backend, bound.statistics, early))

    def _peak_of(self, request: ProgramKey, batch: int) -> int:
        """Return the peak memory of a program like that of the request for another batch, in bytes."""
        types = [(n, TensorType(t.dtype, (batch, *t.shape[1:])) if t.shape else t) for n, t in request.types]
        graph, backend = self.lowered(replace(request, types=tuple(types))), self.session.backend
        executable = backend.build(graph, self._unreported.options()) if backend.capabilities.knows_memory else None
        return memory_use(graph, backend, largest_sizes(graph), executable).peak

    def folds(self, request: ProgramKey) -> bool:
        """Whether the program of a request contains expressions of its parameters alone.

        The answer takes a run of the passes. Its graphs are used for the program that is requested next: of the
        binding, or, without such expressions, of any parameters, where bound ones make no difference.
        """
        key = *_key(request), tuple(request.bound.statistics if request.bound else ())
        if key not in self._folds:
            cache = self.session.cache
            key_of_entry = None if cache is None else cache.key(request)
            stored = None if cache is None or key_of_entry is None else cache.read_folds(key_of_entry)
            if stored is None:
                early: list[Graph] = []
                num_decisions = len(self.session.decisions)
                with self.session.deadline:
                    graphs = self.pipeline.graphs(request)
                    decisions = list(self.session.decisions)[num_decisions:]
                    self._check_early(self._lowered(request, graphs.optimized, early))
                stored = bool(early)
                self._prepared[*_key(request), stored] = _Prepared(graphs, decisions)
                if cache is not None and key_of_entry is not None:
                    cache.save_folds(key_of_entry, stored)
            self._folds[key] = stored
        return self._folds[key]

    def _release(self, program: Program) -> None:
        """Release graphs that contain weights, which the executable has copied; they are recompiled on access."""
        traced, optimized, lowered = self._graphs(program.request)
        program.before, program.after = LazyGraph(traced), LazyGraph(optimized)
        release = getattr(program.executable, "release", None)
        if release is not None:
            release(lowered)

    def _graphs(self, request: ProgramKey) -> Graphs:
        """Return functions that compile the traced, optimized and lowered graphs of a request again."""

        def graphs() -> ProgramGraphs:
            with self.session.deadline:
                return self._unreported.pipeline.graphs(request)

        def optimized() -> Graph:
            graph = graphs().optimized
            return (
                graph if request.bound is None else split_off(graph, self.session.backend, request.bound.statistics, [])
            )

        return lambda: graphs().traced, optimized, lambda: self.lowered(request)

    def differentiable(self, request: ProgramKey) -> tuple[Interface, Results, Callable[..., Any]]:
        """Return the generated function of a request for the framework's own differentiation, and its interface."""
        if self.session.settings["static_inference"]:
            raise InputError(
                "static_inference=True embeds the parameters in the program: it has no gradients",
                hint="use inference=True instead",
            )
        if self.session.settings["backend_map"]:
            raise OptionError(
                "a function of one framework requires a single backend, but backend_map names others",
                hint="compile without backend_map=",
            )
        builder, backend, options = self._unreported, self.session.backend, self.builder.options()
        with self.session.deadline:
            graphs = builder.pipeline.graphs(request, for_framework=True)
            forward = backend.differentiable(builder.decomposed(graphs.optimized, backend, options), options)
        return Interface.of(graphs.traced, graphs.optimized), graphs.results, forward

    def buckets(self, training: bool, *, recompiles: bool) -> Buckets | None:
        """Return the batch buckets if hints bound the batch and the backend compiles for each size, else None."""
        settings = self.session.settings
        if (training, recompiles) not in self._buckets:
            is_bucketed = recompiles and "input_batch_size_range" in settings["hints"]
            if is_bucketed and settings["optimize_for"] == "latency":
                self.session.decisions.record(
                    "choice", "optimize_for='latency': each batch size is compiled separately"
                )
                is_bucketed = False
            types = (
                known_types(self.session.specs, self.session.backend.dtype)
                if is_bucketed and settings["jit"] is not False
                else None
            )
            graph = None if types is None else self._unreported.pipeline.trace(types, training=training)
            self._buckets[training, recompiles] = None if graph is None else find_buckets(graph, self.session.decisions)
        return self._buckets[training, recompiles]

    def lowered(self, request: ProgramKey) -> Graph:
        """Run steps three to five and return the decomposed graph, the input of code generation."""
        with self.session.deadline:
            return self._lowered(request, self._unreported.pipeline.graphs(request).optimized, [])

    def lowered_and_checked(self, request: ProgramKey) -> Graph:
        """Return the decomposed graph of a program that is built later; raise the errors that building would raise."""
        graph = self.lowered(request)
        self._check_early(graph)
        return graph

    def _check_early(self, graph: Graph) -> None:
        settings, backend = self.session.settings, self.session.backend
        backend.check_options(BuildOptions(settings))
        if not settings["backend_map"]:
            backend.check(graph)

    def _lowered(self, request: ProgramKey, graph: Graph, early: list[Graph]) -> Graph:
        """Return the optimized graph decomposed, and append those that ``bind`` computes to ``early``."""
        builder, backend = self._unreported, self.session.backend
        if request.bound is None:
            return builder.decomposed(graph, backend, builder.options())
        statistics = request.bound.statistics
        graph = builder.decomposed(split_off(graph, backend, statistics, early), backend, builder.options())
        return split_off(graph, backend, statistics, early)

    def probe(self, types: Mapping[str, TensorType] | None, *, training: bool = True) -> Graph:
        """Return a graph of the interface: names, parameters and shapes; default types are those the layers expect."""
        session = self.session
        input_types = types if types is not None else probe_types(session.specs, session.source, session.backend.dtype)
        try:
            return self._unreported.pipeline.trace(input_types, training=training)
        except DTypeError as error:
            assumed = [n for n, spec in session.specs.items() if spec.dtype is None and n in input_types]
            # A call would provide the dtypes, but not one that a layer names and that does not exist.
            if types is None and assumed and not error.what.startswith("unknown dtype"):
                error.with_facts(
                    f"assumed without a declaration: {', '.join(f'{n}: {input_types[n]}' for n in assumed)}"
                )
                error.with_hint(f"if it is of integers, declare it: types={{'{assumed[0]}': 'int32'}}")
            raise

    def can_trace(self, types: Mapping[str, TensorType]) -> bool:
        """Whether the layers accept inputs of these dtypes."""
        try:
            self.probe(types, training=False)
        except DTypeError:
            return False
        return True

    def check_call(self, program: Program, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise an error if the sizes of a call are outside the hint's batch range or exceed ``max_memory_gb``."""
        if wrong := outside_of_batches(self.session.settings, {n: shape[0] for n, shape in shapes.items() if shape}):
            raise InputError(wrong)
        if self.session.settings["max_memory_gb"] is not None and largest_sizes(program.memory.graph) is None:
            types = program.types
            sizes = bind({n: t.shape for n, t in types.items()}, {n: shapes[n] for n in types})
            check_memory(program.memory, self.session.settings, sizes)

    def passes(self) -> tuple[PassManager, PassContext]:
        """Return the passes of the level with the changes of user and plugins, and their context."""
        return self.session.manager, self.session.pass_context()

    # -- the model ---------------------------------------------------------------------------------------------------
    @property
    def model(self) -> Any:
        """The model that was compiled."""
        return self.session.model

    @property
    def unused(self) -> Unused:
        """The part of the model that no output depends on."""
        return self.session.unused

    @property
    def pretrained(self) -> Mapping[str, Any]:
        """The arrays that the model provides for parameters and states."""
        return self.session.source.pretrained

    def initial(self, inputs: Iterable[Input], seed: int, index: Index | None = None) -> dict[str, Array]:
        """Return the model's initial values of parameters and states, or a region of each."""
        return self.session.source.initial(inputs, seed, index)

    def learn(self, shapes: Mapping[str, Any]) -> bool:
        """Let layers take unknown sizes from parameters of these shapes; return whether the model has layers."""
        has_layers = learn(self.session.source, shapes)
        if self.session.cache is not None:
            # The keys of cached programs contain the sizes that the model has learned.
            self.session.cache.refresh()
        return has_layers

    def _report_unused(self) -> None:
        """Record the options that were never read during compilation."""
        unused = self.session.settings.unused()
        if unused:
            message = f"nothing on backend '{self.session.backend.name}' reads the option {', '.join(unused)}"
            self.session.decisions.record("ignored", message)

    def _note_file(self, part: str, request: ProgramKey) -> None:
        """Record that another program overwrites the same file."""
        if self.session.settings.as_dict()["file_path"] is not None:
            if part in self._written:
                types = ", ".join(f"{n}: {t}" for n, t in request.types)
                message = f"file_path contains the latest program{part and ' with '}{part}, for {types}"
                self.session.decisions.record("choice", message)
            self._written.add(part)
