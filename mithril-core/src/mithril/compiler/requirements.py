"""Checks before compilation: options that conflict with each other or the model, and patterns without a match."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mithril import ops
from mithril.backend import Backend, BuildOptions, Layers, find_strategy, format_bytes, nbytes, require_match
from mithril.base import Decisions, OptionError, ShapeError, dtype as as_dtype, is_static
from mithril.compiler.option_table import Settings
from mithril.compiler.partition import TAG
from mithril.ir import Graph, Node, iterate
from mithril.ops import if_op, while_op
from mithril.plugins import HardwareTarget, Option
from mithril.runtime import InputSpec

WITHOUT_ARENA = {
    "frees": "has no arena: it frees each value after its last use",
    "holds": "has no arena: it keeps values until the end of a call",
    "library": "has no arena: its compiler plans memory",
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


def check_trainable(patterns: Sequence[str] | None, graph: Graph) -> None:
    """Raise OptionError if a pattern of ``trainable`` matches no parameter and no input."""
    names = {i.name for i in graph.with_role("param", "input")}
    for pattern in patterns or ():
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
        name, spec = next((n, s) for n, s in specs.items() if s.shape is None or not is_static(s.shape))
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
    native = settings["autodiff"] == "native"  # read for every program, so that it is not reported as ignored
    if for_framework:
        return f"the autodiff of '{backend.name}'", "pass output_gradients= to evaluate instead", custom
    if outputs and native:
        return "autodiff='native'", "omit autodiff='native'", custom
    if outputs and custom:
        return f"'{backend.name}' on several devices", "replace the operation, or train on one device", custom
    return None
