"""Checks before compilation: options that conflict with each other or the model, and patterns without a match."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from mithril import ops, plugins
from mithril.backend import (
    Backend,
    BuildOptions,
    Layers,
    find_strategy,
    format_bytes,
    nbytes,
    parse_bytes,
    plugin_of,
    require_match,
    third_parties,
)
from mithril.compiler.memory_usage import MemoryUse, ProgramMemory, largest_sizes, memory_use
from mithril.compiler.option_table import Settings
from mithril.compiler.partition import TAG
from mithril.compiler.plugin_records import SHAPING
from mithril.compiler.signature import InputSpec
from mithril.compiler.unused_parts import Unused
from mithril.graph import (
    Decisions,
    Graph,
    MemoryLimitError,
    Node,
    OptionError,
    ShapeError,
    dtype as as_dtype,
    is_static,
    iterate,
    numel,
    substitute,
)
from mithril.ops import if_op, while_op
from mithril.passes import PassContext
from mithril.plugins import CompileContext, Entry, HardwareTarget, Option, PluginWarning

WITHOUT_ARENA = {
    "frees": "has no arena: it frees each value after its last use",
    "holds": "has no arena: it keeps values until the end of a call",
    "library": "has no arena: its compiler plans memory",
    "replayed": "has no arena: it keeps values until the end of a call",
}


def check_sizes(settings: Mapping[str, Any], specs: Mapping[str, InputSpec]) -> None:
    """Raise OptionError if declared sizes conflict with the batch range."""
    sizes = {name: spec.shape[0] for name, spec in specs.items() if spec.shape}
    if wrong := outside_of_batches(settings, sizes):
        name = next(iter(sizes))
        raise OptionError(f"shapes: {wrong}", hint=f"shapes={{'{name}': [None, ...]}} leaves the batch to the hint")


def outside_of_batches(settings: Mapping[str, Any], sizes: Mapping[str, Any]) -> str | None:
    """Return an error message if all first sizes of inputs are outside the hint's batch range, else None."""
    batch = settings["hints"].get("input_batch_size_range")
    if (
        batch is None
        or not sizes
        or not all(isinstance(n, int) and not batch[0] <= n <= batch[1] for n in sizes.values())
    ):
        return None
    name, rows = next(iter(sizes.items()))
    return f"'{name}' has {rows} rows, outside of hints' input_batch_size_range={tuple(batch)}"


def check_layers(settings: Mapping[str, Any], options: Iterable[Option], graph: Graph, leaves: Iterable[str]) -> None:
    """Raise OptionError if a pattern of layer names in a dictionary option matches no layer of the model."""
    patterns = [
        (f"{option.name}['{key}']", pattern)
        for option in options
        for key, kind in option.keys.items()
        if kind is Layers and isinstance(value := settings.get(option.name), Mapping)
        for pattern in _listed(value.get(key, ()))
    ]
    if not patterns:
        return
    names = {path for leaf in (*leaves, *(node.origin.path for node, _ in iterate(graph))) for path in _parents(leaf)}
    for option_key, pattern in patterns:
        require_match(option_key, "layer", pattern, names)


def check_trainable(patterns: Sequence[str] | None, graph: Graph, unused: Unused) -> None:
    """Raise OptionError if a pattern of ``trainable`` matches no parameter and no input."""
    names = {i.name for i in graph.with_role("param", "input")}
    for pattern in patterns or ():
        if not unused.is_named_by(pattern):
            require_match("trainable", "parameter or input", pattern, names)


def note_graph(graph: Graph, settings: Mapping[str, Any], decisions: Decisions) -> None:
    """Record properties of a traced graph that the user should know."""
    note_places(graph, settings, decisions)
    note_axes(graph, decisions)


def note_places(graph: Graph, settings: Mapping[str, Any], decisions: Decisions) -> None:
    """Record layers with the attribute 'backend' if ``backend_map`` is not set."""
    if settings["backend_map"]:
        return
    for name, path in {node.tags[TAG]: node.origin.path for node, _ in iterate(graph) if TAG in node.tags}.items():
        decisions.record(
            "ignored", f"set_attribute('backend', '{name}') has no effect without backend_map={{'{name}': ...}}", path
        )


def note_axes(graph: Graph, decisions: Decisions) -> None:
    """Record operations that declare no axes: they are never split, as no property can be derived for them."""
    ops: dict[Any, None] = dict.fromkeys(node.op for node, _ in iterate(graph))
    for op in ops:
        silent = op.declared_axes is None and not (op.no_axes or op.composite or op.elementwise)
        if silent:
            decisions.record("choice", f"operation '{op.name}' declares no axes: it runs on full operands")


def note_planning(settings: Mapping[str, Any], backend: Backend, decisions: Decisions) -> None:
    """Check ``memory_planning``, and record it as ignored if the backend has no arena."""
    strategy = settings["memory_planning"]
    if not isinstance(strategy, bool):
        find_strategy(strategy)
    memory = backend.capabilities.memory
    if strategy is not True and memory != "arena":
        decisions.record("ignored", f"memory_planning={strategy!r}: backend '{backend.name}' {WITHOUT_ARENA[memory]}")


FILES = ("file_path", "dump_graph", "visualize", "save_intermediates", "profile_output", "cache")


def defer(settings: Mapping[str, Any], specs: Mapping[str, InputSpec], backend: Backend, decisions: Decisions) -> None:
    """Check options that no program can have, and record output files, which wait for the first call."""
    if settings["static_shapes"]:
        for name, spec in specs.items():
            if spec.shape is None or not is_static(spec.shape):
                raise ShapeError(
                    f"Cannot infer shape for tensor '{name}'",
                    facts=[spec.where],
                    hint=f"static_shapes=True requires all sizes: shapes={{'{name}': [...]}}",
                )
    backend.check_options(BuildOptions(settings))
    values = settings.as_dict() if isinstance(settings, Settings) else settings
    if requested := [name for name in FILES if values.get(name)]:
        decisions.record(
            "deferred", f"{', '.join(requested)}: written at the first call, as shapes= does not define all sizes"
        )


def note_precision(settings: Mapping[str, Any], backend: Backend, decisions: Decisions) -> None:
    """Record inputs whose declared dtype prevents computation in ``precision``."""
    for name, declared in settings["types"].items():
        kind = as_dtype(declared)
        if backend.precision is not None and kind.is_float and kind is not backend.dtype:
            decisions.record(
                "downgrade",
                f"types={{'{name}': '{kind}'}}: parameters and values combined with it are {kind}, "
                f"not precision='{backend.precision}'",
            )


def _listed(patterns: Any) -> Sequence[str]:
    return (patterns,) if isinstance(patterns, str) else tuple(patterns)


def _parents(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[: k + 1]) for k in range(len(parts))]


def _origin(node: Node) -> str:
    return str(node.origin)


def require_static(graph: Graph) -> None:
    for i in graph.inputs:
        if not i.type.is_static:
            raise ShapeError(
                f"Cannot infer shape for tensor '{i.name}'",
                facts=[f"static_shapes=True, but it is {i.type}"],
                hint=f"pass ints: shapes={{'{i.name}': [...]}}",
            )
    for node in graph.nodes:
        for value in node.results:
            if not value.type.is_static:
                raise ShapeError(
                    f"Cannot infer shape for tensor '{value.name}'", facts=[f"it is {value.type}", _origin(node)]
                )


def require_no_promotion(graph: Graph) -> None:
    for node in graph.nodes:
        if node.op is ops.cast and node.tags.get("promotion"):
            source, target = node.operands[0], node.result
            assert source is not None
            raise OptionError(
                f"static_types=True, but '{source.name}' is promoted from {source.dtype} to {target.dtype}",
                facts=[_origin(node)],
                hint="pass matching dtypes with types=, or add a cast",
            )


def require_no_control_flow(graph: Graph) -> None:
    for node in graph.nodes:
        if node.op in (if_op, while_op):
            raise OptionError(
                f"dynamic_control_flow=False, but an '{node.op.name}' depends on values known only at run time",
                facts=[_origin(node)],
                hint="make its condition a constant (constants=, inference=True), or allow dynamic control flow",
            )


def note_target_memory(graph: Graph, target: HardwareTarget | None, decisions: Decisions) -> None:
    """Record that inputs and outputs of a program exceed the target's memory."""
    values = [*(i.type for i in graph.inputs), *(v.type for v in graph.outputs)]
    if target is None or target.memory is None or not all(t.is_static for t in values):
        return
    size = sum(nbytes(t) for t in values)
    if size > target.memory:
        decisions.record(
            "ignored",
            f"target_hardware='{target.name}' has {format_bytes(target.memory)} of memory, "
            f"inputs and outputs alone take {format_bytes(size)}",
        )


def framework_subject(
    backend: Backend, settings: Settings, outputs: Sequence[str], for_framework: bool
) -> tuple[str, str, bool] | None:
    """Return the differentiation by the backend's framework, a remedy, and whether it calls custom gradients.

    Return None if the graph is differentiated.
    """
    custom = backend.differentiates(BuildOptions(settings))
    # Read for every program, so that it is not reported as ignored.
    native = settings["autodiff"] == "native"
    if for_framework:
        return f"the autodiff of '{backend.name}'", "pass output_gradients= to evaluate instead", custom
    if outputs and native:
        return "autodiff='native'", "omit autodiff='native'", custom
    if outputs and custom:
        return f"'{backend.name}' on several devices", "replace the operation, or train on one device", custom
    return None


def record_providers(context: CompileContext, source: Any) -> None:
    """Record the backend, target, options, frontend and layers of third parties, and all deciders."""
    settings: Any = context.options
    options = {entry.spec.name: entry for entry in plugins.options()}
    parts = [
        *_of("backend", [context.backend.name], plugins.backends()),
        *_of("hardware target", [settings["target_hardware"]], plugins.targets()),
        *_of("option", settings.keywords, options),
        *([source.origin] if hasattr(source, "origin") else []),
        *_layers(source),
        *(f"{decider} takes part" for decider in plugins.deciders()),
    ]
    for part in parts:
        context.decisions.record("plugin", part)


_warned: set[str] = set()


def record_absences(context: CompileContext) -> None:
    """Record the installed plugins that are not, or not entirely, in use, and doubts; warn once per process.

    A plugin that the user disabled is not missed: it is recorded without a warning.
    """
    backend = context.backend.name
    plugins.lowerings(backend), plugins.op_names(), plugins.frontends()  # their problems count as well
    for plugin in plugins.found():
        for problem in plugin.losses(SHAPING, backend) if plugin.problems else ():
            if problem.state == "disabled":
                context.decisions.record("plugin", problem.what)
                continue
            if problem.state == "clash" and problem.hook == "mithril_lowerings":
                continue  # an error of the programs that use the operation; others lose nothing
            extent = "not in use" if plugin.loaded is None else "only partly in use"
            _record_once(context.decisions, f"{plugin.origin} is {extent}: {problem.line}")
        for doubt in plugin.doubts:
            _record_once(context.decisions, f"{plugin.origin} is doubtful: {doubt.line}")


def _record_once(decisions: Decisions, message: str) -> None:
    decisions.record("ignored", message, warning=PluginWarning, warn=message not in _warned)
    _warned.add(message)


def _of(kind: str, names: Iterable[Any], entries: Mapping[str, Entry[Any]]) -> Iterator[str]:
    for name in names:
        entry = entries.get(name)
        if entry is not None and not entry.plugin.first_party:
            yield f"{kind} '{name}' by {entry.origin}"


def _layers(source: Any) -> Iterator[str]:
    if not third_parties():
        return
    for kind in sorted(getattr(source, "layer_types", ()), key=lambda kind: kind.__name__):
        plugin = plugin_of(kind.__module__)
        if plugin is not None:
            yield f"layer '{kind.__name__}' by {plugin.origin}"


def record_operations(graph: Graph, decisions: Decisions) -> None:
    """Record the operations of third parties in a graph."""
    for name in sorted({node.op.name for node, _ in iterate(graph)}):
        plugin = plugins.op_plugin(name)
        if plugin is not None and not plugin.first_party:
            decisions.record("plugin", f"operation '{name}' by {plugin.origin}")


CHECKPOINTING = "gradient-checkpointing"
ATTEMPTS = 5  # programs that are built to find a batch that fits: each costs a compilation
PeakOf = Callable[[int], int]  # peak memory of a program for another batch, in bytes


def check_memory(
    memory: ProgramMemory,
    settings: Mapping[str, Any],
    sizes: Mapping[str, int] | None = None,
    peak_of: PeakOf | None = None,
) -> None:
    """Raise MemoryLimitError if a program exceeds ``max_memory_gb`` for these sizes, or its largest ones."""
    if settings["max_memory_gb"] is None:
        return  # do not access the graph, which may not be parsed yet
    sizes = largest_sizes(memory.graph) if sizes is None else sizes
    if sizes is not None:
        _check_peak(memory.at(sizes), memory.graph, memory.backend, settings, sizes, peak_of)


def check_arguments(graph: Graph, backend: Backend, settings: Mapping[str, Any], peak_of: PeakOf | None = None) -> None:
    """Raise MemoryLimitError before the build; if an exact check follows, only for the size of the arguments."""
    if settings["max_memory_gb"] is None or (sizes := largest_sizes(graph)) is None:
        return
    use = memory_use(graph, backend, sizes)
    if backend.capabilities.knows_memory and use.outside <= parse_bytes(settings["max_memory_gb"]):
        return
    _check_peak(use, graph, backend, settings, sizes, peak_of)


def _check_peak(
    use: MemoryUse,
    graph: Graph,
    backend: Backend,
    settings: Mapping[str, Any],
    sizes: Mapping[str, int],
    peak_of: PeakOf | None,
) -> None:
    limit = parse_bytes(settings["max_memory_gb"])
    if use.peak > limit:
        raise over_limit(use, graph, limit, sizes).with_hint(
            remedy(graph, backend, settings, use, limit, sizes, peak_of)
        )


def remedy(
    graph: Graph,
    backend: Backend,
    settings: Mapping[str, Any],
    use: MemoryUse,
    limit: int,
    sizes: Mapping[str, int],
    peak_of: PeakOf | None = None,
) -> str:
    """Return the hint for a program that exceeds the limit."""
    if CHECKPOINTING in plugins.passes() and not settings.get("gradient_checkpointing"):
        context = PassContext(backend=backend, options={"checkpoint_segments": None})
        smaller = plugins.load_pass(CHECKPOINTING)(graph, context)
        needed = use.peak if smaller is graph else memory_use(smaller, backend, sizes).peak
        if needed <= limit:
            return f"gradient_checkpointing=True needs {format_bytes(needed)}"
    batch = _batch_that_fits(graph, use, limit, sizes, peak_of)
    if batch is not None:
        return f"a batch of {'about ' if peak_of is None else ''}{batch} fits"
    if use.parameters > limit:
        return f"the parameters alone are {format_bytes(use.parameters)}: use a smaller dtype or a smaller model"
    return "a smaller batch, a smaller dtype, or mixed_precision=True needs less"


def _batch_that_fits(
    graph: Graph, use: MemoryUse, limit: int, sizes: Mapping[str, int], peak_of: PeakOf | None
) -> int | None:
    """Return a batch that fits: confirmed by a program for it, or else an estimate."""
    heads = {i.type.shape[0] for i in graph.with_role("input") if i.type.shape}
    if len(heads) != 1:
        return None
    batch, peak = int(numel((substitute(heads.pop(), sizes),))), use.peak
    fixed: float = use.parameters + use.state
    for attempt in range(ATTEMPTS):
        fitting = int((limit - fixed) * batch / (peak - fixed)) if peak > fixed else 0
        if not 0 < fitting < batch:
            return None
        if peak_of is None or (smaller := peak_of(fitting)) <= limit:
            return fitting
        # Memory that does not scale with the batch, such as packed weights and blocks of a fixed size, shows in the
        # programs of two batches. The first figure can be an estimate from before the build: it gives no line.
        if attempt > 0:
            fixed = max(fixed, peak - batch * (peak - smaller) / (batch - fitting))
        batch, peak = fitting, smaller
    return None


def over_limit(use: MemoryUse, graph: Graph, limit: int, sizes: Mapping[str, int] | None = None) -> MemoryLimitError:
    """Return the error for a program that exceeds the limit, with its largest values."""
    values = [
        (nbytes(v.type, sizes), v)
        for v in (*(v for n in graph.nodes for v in n.results), *(i.value for i in graph.inputs))
    ]
    largest = sorted(values, key=lambda row: -row[0])[:5]
    qualifier = "" if use.exact else "about "
    return MemoryLimitError(
        f"this program needs {qualifier}{format_bytes(use.peak)}, but max_memory_gb allows {format_bytes(limit)}",
        facts=[
            (
                f"parameters and inputs {format_bytes(use.outside)}; "
                f"values and results {format_bytes(use.workspace)} ({use.source})"
            ),
            "largest: " + "; ".join(f"'{v.name}' {v.type} {format_bytes(size)}" for size, v in largest),
        ],
    )
