"""``ml.verify``: an imported model and its source side by side, and the first node of the source that differs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from itertools import islice
from typing import Any, Protocol, runtime_checkable

import numpy as np

from mithril.backend import Backend, checked
from mithril.compiler import TraceRequest, make_backend, resolve_options, source_of
from mithril.graph import Graph, InputError, TensorType, Value, dtype as as_dtype, evaluate
from mithril_tools.diff import (
    CHUNK,
    Arrays,
    DiffReport,
    Divergence,
    allowed,
    divergence,
    graph_to,
    relative_error,
    run_on,
)

Run = Callable[[Graph], Arrays]


@runtime_checkable
class Verifiable(Protocol):
    """A layer whose importer can run its source."""

    def recorded(self) -> AbstractContextManager[dict[str, Any]]:
        """Within this context a trace enters its values by their names in the source into the dictionary."""

    def run_source(
        self, source: Any, inputs: Mapping[str, np.ndarray[Any, Any]]
    ) -> tuple[Iterator[tuple[str, np.ndarray[Any, Any]]], Mapping[str, np.ndarray[Any, Any]]]:
        """Return the arrays that the source computes, in order and by name, and its outputs."""


@checked()
def verify(
    imported: Any, source: Any, inputs: Mapping[str, Any], *, backend: Backend | type[Backend] | str | None = None
) -> DiffReport:
    """Run an imported model and its source, and find the first node of the source that differs.

    ``source`` is what was imported: the module, function or file. Without a ``backend``, the imported model runs by the
    definitions of its operations. Both run as for inference, with the weights that each has.
    """
    layer = next((x for x in (imported, *(x for _, x in imported.walk())) if isinstance(x, Verifiable)), None)
    if layer is None:
        raise InputError(
            f"ml.verify compares an imported model with its source; {imported!r} was not imported",
            hint="give the model that ml.from_torch, ml.from_jax or ml.from_onnx returned",
        )
    view = source_of(imported, outputs=None, inference=True)
    arrays = {name: np.asarray(x) for name, x in inputs.items()}
    missing = [d.name for d in view.inputs if d.required and d.name not in arrays]
    if missing:
        raise InputError(
            f"verify needs an array for input '{missing[0]}'",
            facts=[f"inputs: {', '.join(d.name for d in view.inputs)}"],
        )
    nodes, expected = layer.run_source(source, arrays)
    with layer.recorded() as values:
        graph = view.graph({n: TensorType(as_dtype(a.dtype), a.shape) for n, a in arrays.items()}, TraceRequest())
    arguments = {**view.initial((*graph.with_role("param"), *graph.with_role("state")), 0), **arrays}
    engine = None if backend is None else make_backend(backend, resolve_options({}))

    def run(part: Graph) -> Arrays:
        return evaluate(part, arguments) if engine is None else run_on(engine, part, arguments)

    actual = run(graph)
    between = ("the source", "the imported model")
    shared = [name for name in expected if name in actual]
    report = DiffReport(between, {name: relative_error(expected[name], actual[name]) for name in shared})
    outputs = dict(zip(graph.output_names, graph.outputs, strict=True))
    if all(error <= allowed(outputs[name]) for name, error in report.outputs.items()):
        return report
    report.first = _first(graph, nodes, values, run, between)
    if report.first is None:
        report.notes.append(
            "no node differs, but outputs do: the source computes other outputs than when it was imported"
        )
    return report


def _first(
    graph: Graph,
    nodes: Iterator[tuple[str, np.ndarray[Any, Any]]],
    values: Mapping[str, Any],
    run: Run,
    between: tuple[str, str],
) -> Divergence | None:
    """Return the first node of the source whose value in the graph differs beyond its tolerance."""
    computed = {v: node for node in graph.nodes for v in node.results}
    while chunk := list(islice(nodes, CHUNK)):
        pairs = [(name, array, values.get(name)) for name, array in chunk]
        to_compute = list(dict.fromkeys(v for _, _, v in pairs if isinstance(v, Value) and v in computed))
        results = run(graph_to(graph, to_compute)) if to_compute else {}
        computed_arrays: dict[Any, Any] = {v: results[f"v{k}"] for k, v in enumerate(to_compute)}
        for name, expected, v in pairs:
            if isinstance(v, np.ndarray) and v.dtype.kind != "O":  # computed at import
                actual, value = v, Value(name, TensorType(as_dtype(v.dtype), v.shape))
            elif isinstance(v, Value) and v in computed_arrays:
                actual, value = computed_arrays[v], v
            else:
                continue
            if relative_error(expected, actual) > allowed(value):
                node = f"node '{name}' of the source"
                return divergence(value, computed.get(value), between, expected, actual, source=node)
    return None
