"""``ml.diff``: the first operation for which backends or passes differ, located by layer."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from mithril.backend import Backend, BuildOptions, checked
from mithril.compiler import CompiledModel, compile as compile_model, save_file, subgraph_to
from mithril.graph import (
    Decisions,
    Graph,
    InputError,
    Node,
    OptionError,
    Output,
    Value,
    dtype as as_dtype,
    evaluate,
    to_text,
)
from mithril.system import files

Arrays = dict[str, np.ndarray[Any, Any]]
CHUNK = 256  # values compared per run: bounds the memory that keeping intermediate results takes
TOLERANCE = {"float64": 1e-9, "float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}


@dataclass(frozen=True)
class Divergence:
    """The first value that differs."""

    value: Value
    node: Node | None
    between: tuple[str, str]
    error: float  # largest difference relative to the largest element
    ulp: float  # largest difference in units of the last place of the expected element
    histogram: tuple[tuple[str, int], ...]
    largest: tuple[tuple[int, ...], Any, Any] | None = None  # where the difference is largest: both elements
    local: float | None = None  # the operation's own error on identical operands
    source: str = ""  # the node of an imported model's source

    def __str__(self) -> str:
        location = str(self.node.origin) if self.node is not None else ""
        lines = [
            (f"{self.source}: " if self.source else "")
            + f"%{self.value.name} = {self.node.op.name if self.node else 'input'}: {self.value.type}"
            + (f", {location}" if location else ""),
            (
                f"  {self.between[1]} departs from {self.between[0]} by {self.error:.3g} of the largest element, "
                f"{self.ulp:.3g} ulp"
            ),
            "  " + ", ".join(f"{name}: {n}" for name, n in self.histogram if n),
        ]
        if self.largest is not None:
            place, expected, actual = self.largest
            lines.append(f"  at {list(place)}: {self.between[0]} {expected}, {self.between[1]} {actual}")
        if self.local is not None:
            kind = "the operation itself differs" if self.local > allowed(self.value) else "it inherits the difference"
            lines.append(f"  on identical operands: {self.local:.3g} ({kind})")
        return "\n".join(lines)


@dataclass
class DiffReport:
    """The result of ``diff``; truthy if everything agrees."""

    compared: tuple[str, ...]
    outputs: dict[str, float]  # largest relative difference per output
    first: Divergence | None = None
    culprit_pass: str | None = None
    reproducer: str | None = None
    notes: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return self.first is None and self.culprit_pass is None and not self.notes

    def __str__(self) -> str:
        lines = [f"compared: {', '.join(self.compared)}"]
        lines += [f"output '{name}': largest relative difference {error:.3g}" for name, error in self.outputs.items()]
        if self.culprit_pass:
            lines.append(f"first pass that changes the result: {self.culprit_pass}")
        if self.first is not None:
            lines += ["first operation that departs:", str(self.first)]
        if self.reproducer:
            lines.append(f"reproducer: {self.reproducer}")
        lines += self.notes
        return "\n".join(lines if not self else [*lines, "everything agrees"])


@checked()
def diff(
    model: Any,
    backends: Sequence[Backend | type[Backend] | str],
    inputs: Mapping[str, Any],
    *,
    params: Mapping[str, Any] | None = None,
    seed: int = 0,
    across: Literal["backends", "passes"] = "backends",
    reproducer: str | os.PathLike[str] | None = None,
    **options: Any,
) -> DiffReport:
    """Run ``model`` on several backends, or after each pass of one, and find the first difference.

    The first backend is the reference. If ``reproducer`` is a directory, the differing operation is written there as
    graph text with its operands as safetensors.
    """
    if not backends or (across == "backends" and len(backends) < 2):
        raise OptionError(
            f"diff across {across} needs {'one backend' if across == 'passes' else 'two backends'} at least",
            facts=[f"got {len(backends)}"],
            hint='ml.diff(model, [ml.NumpyBackend(), "jax"], inputs)',
        )
    compiled = [compile_model(model, b, **options) for b in backends]
    first = compiled[0]
    weights = params if params is not None else first.randomize_params(seed, inputs)
    plain = {
        name: first.backend.to_numpy(p) if first.backend.is_array(p) else np.asarray(p) for name, p in weights.items()
    }
    results = [_outputs(c, plain, inputs) for c in compiled]
    graph = compiled[0].programs[-1].traced
    arguments = {**plain, **_inputs(first, inputs), **{n: first.backend.to_numpy(a) for n, a in _state(first).items()}}
    if across == "passes":
        return _across_passes(compiled[0], graph, arguments)
    names = _distinct([c.backend.name for c in compiled])
    report = DiffReport(tuple(names), _worst(results))
    outputs = dict(zip(graph.output_names, graph.outputs, strict=True))
    if all(error <= allowed(outputs[name]) for name, error in report.outputs.items()):
        return report
    for other, name in zip(compiled[1:], names[1:], strict=True):
        culprit = _locate(graph, arguments, first.backend, other.backend, (names[0], name))
        if culprit is not None:
            report.first = culprit
            if reproducer is not None and culprit.node is not None:
                report.reproducer = _write(graph, culprit.node, arguments, first.backend, Path(reproducer))
            return report
    report.notes.append("no single operation departs: the passes make the difference; try diff(..., across='passes')")
    return report


# -- across backends ----------------------------------------------------------------------------------------------
def _locate(graph: Graph, arguments: Arrays, a: Backend, b: Backend, between: tuple[str, str]) -> Divergence | None:
    """Return the first value, in order of computation, that differs beyond its tolerance."""
    nodes = [n for n in graph.nodes if not n.is_constant]
    for start in range(0, len(nodes), CHUNK):
        chunk = nodes[start : start + CHUNK]
        values = [v for n in chunk for v in n.results]
        part = graph_to(graph, values)
        left, right = run_on(a, part, arguments), run_on(b, part, arguments)
        for k, value in enumerate(values):
            expected, actual = left[f"v{k}"], right[f"v{k}"]
            error = relative_error(expected, actual)
            if error > allowed(value):
                node = graph.producers[value]
                local = _local_error(graph, node, arguments, a, b)
                return divergence(value, node, between, expected, actual, local=local)
    return None


def divergence(
    value: Value, node: Node | None, between: tuple[str, str], expected: Any, actual: Any, **more: Any
) -> Divergence:
    """Describe two arrays of one value."""
    error, (ulp, histogram) = relative_error(expected, actual), _ulps(expected, actual)
    return Divergence(value, node, between, error, ulp, histogram, _largest(expected, actual), **more)


def _largest(expected: Any, actual: Any) -> tuple[tuple[int, ...], Any, Any] | None:
    """Return the index at which two arrays differ most, and both elements."""
    if expected.shape != actual.shape or not expected.size:
        return None
    e, a = expected.astype(np.float64), actual.astype(np.float64)
    with np.errstate(all="ignore"):
        distance = np.where((e == a) | (np.isnan(e) & np.isnan(a)), 0.0, np.nan_to_num(np.abs(e - a), nan=np.inf))
    place = tuple(int(k) for k in np.unravel_index(int(distance.argmax()), e.shape))
    return place, expected[place], actual[place]


def graph_to(graph: Graph, values: Sequence[Value]) -> Graph:
    """Return the subgraph that computes the values, with outputs ``v0, v1, ...``."""
    return subgraph_to(graph, values, [f"v{k}" for k in range(len(values))])


def _single_op_graph(graph: Graph, node: Node) -> Graph:
    """Return a graph of one operation."""
    from mithril.graph import Input

    operands = dict.fromkeys(v for v in node.operands if v is not None)
    inputs = tuple(graph.input_of[v] if v in graph.input_of else Input(v) for v in operands)
    return Graph(inputs, (node,), tuple(Output(v, f"v{k}") for k, v in enumerate(node.results)), node.op.name)


def _operands(graph: Graph, node: Node, arguments: Arrays, backend: Backend) -> Arrays:
    values = list(dict.fromkeys(v for v in node.operands if v is not None and v not in graph.input_of))
    results = run_on(backend, graph_to(graph, values), arguments) if values else {}
    operands = {
        v.name: arguments[v.name]
        for v in node.operands
        if v is not None and v.name in arguments and v in graph.input_of
    }
    return {**operands, **{v.name: results[f"v{k}"] for k, v in enumerate(values)}}


def _local_error(graph: Graph, node: Node, arguments: Arrays, a: Backend, b: Backend) -> float:
    operands = _operands(graph, node, arguments, a)
    single = _single_op_graph(graph, node)
    left, right = run_on(a, single, operands), run_on(b, single, operands)
    return max(relative_error(left[n], right[n]) for n in left)


def run_on(backend: Backend, graph: Graph, arguments: Mapping[str, np.ndarray[Any, Any]]) -> Arrays:
    """Run a graph on a backend without any pass; arguments and results are NumPy arrays."""
    options = BuildOptions(jit=False, decisions=Decisions())
    executable = backend.build(backend.decomposed(graph, options), options)
    arrays = {i.name: backend.array(arguments[i.name]) for i in graph.arguments}
    params = {i.name: arrays.pop(i.name) for i in graph.with_role("param")}
    return {name: backend.to_numpy(v) for name, v in executable(params, arrays).items()}


def _write(graph: Graph, node: Node, arguments: Arrays, backend: Backend, folder: Path) -> str:
    """Write the differing operation as text and its operands as safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    files.write(folder / "graph.txt", to_text(_single_op_graph(graph, node)) + "\n")
    save_file(_operands(graph, node, arguments, backend), folder / "operands.safetensors", {"operation": node.op.name})
    return os.fspath(folder)


# -- across passes ------------------------------------------------------------------------------------------------
def _across_passes(compiled: CompiledModel, graph: Graph, arguments: Arrays) -> DiffReport:
    """Evaluate the graph after each pass; the first change of the result names the pass."""
    manager, context = compiled.compiler.passes()
    expected = evaluate(graph, arguments)
    types = dict(zip(graph.output_names, graph.outputs, strict=True))
    report = DiffReport((compiled.backend.name, *manager.names), {})
    current = graph
    for one in manager.passes:
        after = manager.run_one(one, current, context)
        actual = evaluate(after, arguments)
        worst = {n: relative_error(expected[n], actual[n]) for n in expected}
        report.outputs = worst
        changed = [n for n, e in worst.items() if e > allowed(types[n])]
        if changed:
            report.culprit_pass = one.name
            report.notes.append(f"pass '{one.name}' changes output '{changed[0]}' by {worst[changed[0]]:.3g}")
            return report
        current = after
    return report


# -- numbers ------------------------------------------------------------------------------------------------------
def relative_error(expected: np.ndarray[Any, Any], actual: np.ndarray[Any, Any]) -> float:
    """Return the largest difference over the largest element; infinite if nan, infinities or shapes differ."""
    if expected.shape != actual.shape or expected.dtype != actual.dtype:
        return float("inf")
    if not expected.size:
        return 0.0
    if not as_dtype(expected.dtype).is_float:
        return float("inf") if (expected != actual).any() else 0.0
    e, g = expected.astype(np.float64), actual.astype(np.float64)
    finite = np.isfinite(e) & np.isfinite(g)
    alike = finite | (np.isnan(e) & np.isnan(g)) | (e == g)
    if not alike.all():
        return float("inf")
    if not finite.any():
        return 0.0
    scale = float(np.abs(e[finite]).max()) or 1.0
    return float(np.abs(e - g)[finite].max()) / scale


def _ulps(expected: np.ndarray[Any, Any], actual: np.ndarray[Any, Any]) -> tuple[float, tuple[tuple[str, int], ...]]:
    if expected.shape != actual.shape or not as_dtype(expected.dtype).is_float:
        return float("inf"), (("different", int(expected.size)),)
    e, g = expected.astype(np.float64), actual.astype(np.float64)
    with np.errstate(all="ignore"):
        spacing = np.spacing(np.abs(expected)).astype(np.float64)
        ulps = np.abs(e - g) / np.where(spacing > 0, spacing, 1)
    ulps = np.where((e == g) | (np.isnan(e) & np.isnan(g)), 0.0, np.where(np.isfinite(ulps), ulps, np.inf))
    edges = (("equal", 0.0), ("<= 1 ulp", 1.0), ("<= 16 ulp", 16.0), ("<= 1024 ulp", 1024.0), ("more", np.inf))
    rows, below = [], 0
    for name, edge in edges:
        count = int((ulps <= edge).sum())
        rows.append((name, count - below))
        below = count
    return float(ulps.max(initial=0.0)), tuple(rows)


def allowed(value: Value) -> float:
    return TOLERANCE.get(value.dtype.name, 0.0)


def _worst(results: Sequence[Arrays]) -> dict[str, float]:
    first = results[0]
    return {n: max(relative_error(first[n], other[n]) for other in results[1:]) for n in first}


def _outputs(compiled: CompiledModel, params: Arrays, inputs: Mapping[str, Any]) -> Arrays:
    array, to_numpy = compiled.backend.array, compiled.backend.to_numpy
    arrays = {name: array(p) for name, p in params.items()}
    return {name: to_numpy(v) for name, v in compiled.evaluate(arrays, dict(inputs)).items()}


def _inputs(compiled: CompiledModel, inputs: Mapping[str, Any]) -> Arrays:
    types = compiled.programs[-1].types
    missing = [name for name in types if name not in inputs]
    if missing:
        raise InputError(f"diff needs an array for input '{missing[0]}'")
    return {name: np.asarray(inputs[name], dtype=t.dtype.numpy) for name, t in types.items()}


def _state(compiled: CompiledModel) -> Mapping[str, Any]:
    return compiled.initial_state() if compiled.interface.with_role("state") else {}


def _distinct(names: Iterable[str]) -> list[str]:
    seen: dict[str, int] = {}
    out = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        out.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return out
