"""``ml.calibrate_ranges``: run samples through a compiled model and record the ranges of its activations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mithril import Graph, Node, Value, compile as compile_model
from mithril.backend import covers, require_match
from mithril.graph import InputError, OptionError, Output, ShapeError, unknown
from mithril_passes.quantization.groups import CODEBOOKS
from mithril_passes.quantization.ranges import Range, Ranges
from mithril_passes.quantization.static_quantization import layer_of, table_of

METHODS = ("minmax", "percentile", "entropy")
MIN_ROWS = 32  # of samples: the extremes of fewer are too narrow for later inputs; an estimate
BINS = 2048  # of the histogram of "entropy", eight for each of its 256 levels
Arrays = Mapping[str, Any]


def calibrate_ranges(
    compiled: Any,
    batches: Iterable[Arrays],
    *,
    method: str = "minmax",
    percentile: float = 99.99,
    error: float | None = None,
    keep: str | Sequence[str] = (),
    min_rows: int = MIN_ROWS,
    quantization: Mapping[str, Any] | None = None,
) -> Ranges:
    """Return the ranges of the activations that ``quantization=`` rounds, from sample inputs.

    ``compiled`` has bound parameters. ``"minmax"`` records the extremes; ``"percentile"`` and ``"entropy"`` cut rare
    numbers off. ``keep`` has names or patterns of layers that stay in float. With ``error=``, further ones do, worst
    first, until the results of the first batch differ by at most that fraction of their norm; ``quantization`` has
    other keys of the option to bound, such as 4-bit weights. ``min_rows`` is the smallest accepted number of samples.
    """
    if method not in METHODS:
        message, facts, hint = unknown("method of calibrate_ranges", method, METHODS)
        raise OptionError(message, facts=facts, hint=hint)
    if not 50 < percentile <= 100:
        raise OptionError(f"calibrate_ranges: percentile={percentile}, expected above 50 and at most 100")
    if error is not None and not 0 <= error < np.inf:
        raise OptionError(f"calibrate_ranges: error={error}, expected a fraction of the norm, such as 0.01")
    if not compiled.held_params and compiled.interface.with_role("param"):
        raise InputError("calibrate_ranges requires bound parameters", hint="call compiled.bind(params) first")
    samples = _samples(batches)
    rows = sum(max((np.shape(x)[0] for x in batch.values() if np.ndim(x)), default=1) for batch in samples)
    if rows < min_rows or not samples:
        raise InputError(
            f"calibrate_ranges got {rows} rows, expected at least {max(min_rows, 1)}",
            facts=["few samples underestimate the ranges, and larger numbers are cut off"],
            hint=f"pass more batches, or min_rows={rows}",
        )
    observed = Observed(compiled, quantization or {})
    values = {name: span(parts, method, percentile) for name, parts in observed.collect(samples).items()}
    patterns = (keep,) if isinstance(keep, str) else tuple(keep)
    for pattern in patterns:
        require_match("keep of calibrate_ranges", "layer with weights to quantize", pattern, observed.layers)
    excluded = tuple(layer for layer in observed.layers if any(covers(pattern, layer) for pattern in patterns))
    ranges = Ranges(values, method, rows, keep=excluded)
    return ranges if error is None else bounded(observed, ranges, samples[0], error)


def _samples(batches: Iterable[Arrays]) -> list[dict[str, Any]]:
    """Return the batches, which are mappings from inputs to arrays."""
    samples = [batches] if isinstance(batches, Mapping) else list(batches)
    wrong = next((batch for batch in samples if not isinstance(batch, Mapping) or not batch), None)
    if wrong is not None:
        raise InputError(
            f"calibrate_ranges: a batch is a mapping from inputs to arrays, got {type(wrong).__name__}",
            hint="pass a list such as [{'input': array}]",
        )
    return [dict(batch) for batch in samples]


# -- observation --------------------------------------------------------------------------------------------------
class Observed:
    """The graph that the pass quantizes, with its activations as additional results."""

    def __init__(self, compiled: Any, quantization: Mapping[str, Any]) -> None:
        self.compiled, self.quantization = compiled, quantization
        self.layers: list[str] = []
        settings = compiled.compiler.session.settings  # of which some decide on the results
        self.options = {name: settings[name] for name in ("outputs", "types", "constants") if name in settings.keywords}

    def model(self, batch: Arrays, quantization: Any) -> Any:
        """Compile the model with embedded parameters for the sizes of a batch."""
        settings = {} if quantization is None else {"quantization": quantization}
        compiled = compile_model(
            self.compiled.model,
            self.compiled.backend,
            shapes={name: list(np.shape(x)) for name, x in batch.items()},
            static_inference=True,
            **self.options,
            **settings,
        )
        compiled.bind(self.compiled.params or {}, self._state(batch) or None)
        return compiled

    def _state(self, batch: Arrays) -> dict[str, Any]:
        """Return the bound state, or an initial one for the sizes of a batch."""
        try:
            return dict(self.compiled.initial_state())
        except ShapeError:
            return dict(self.compiled.state_for(batch, None))

    def collect(self, samples: Sequence[Arrays]) -> dict[str, list[np.ndarray[Any, Any]]]:
        """Return the activations of all samples by the name of their value."""
        programs: dict[Any, tuple[Any, list[str]]] = {}
        parts: dict[str, list[np.ndarray[Any, Any]]] = {}
        for batch in samples:
            key = tuple((name, np.shape(x)) for name, x in sorted(batch.items()))
            if key not in programs:
                programs[key] = self._observing(batch)
            program, names = programs[key]
            results = program(dict(batch))
            for name in names:
                parts.setdefault(name, []).append(np.asarray(program.backend.to_numpy(results[name]), np.float32))
        return parts

    def _observing(self, batch: Arrays) -> tuple[Any, list[str]]:
        seen: list[tuple[Graph, Mapping[Node, Value]]] = []
        model = self.model(batch, {"observe": lambda graph, products: seen.append((graph, products))})
        model(dict(batch))
        if not seen:
            raise InputError("this model has no product with constant weights to quantize")
        graph, products = seen[-1]
        has_tables = self.quantization.get("weights") in CODEBOOKS  # which quantize them, too
        nodes = [n for n in graph.nodes if n in products or (has_tables and table_of(graph, n) is not None)]
        self.layers = list(dict.fromkeys(map(layer_of, nodes)))
        values = list(dict.fromkeys(products.values()))
        results = tuple(Output(v, v.name) for v in values)
        observing = graph.replaced(results=results, nodes=graph.nodes)
        return compile_model(observing, self.compiled.backend), [v.name for v in values]


# -- ranges -------------------------------------------------------------------------------------------------------
def span(parts: Sequence[np.ndarray[Any, Any]], method: str, percentile: float) -> Range:
    """Return the range of numbers that a method keeps."""
    numbers = np.concatenate([p.reshape(-1) for p in parts])
    numbers = numbers[np.isfinite(numbers)]
    if not numbers.size:
        return 0.0, 0.0
    low, high = float(numbers.min()), float(numbers.max())
    if method == "percentile":
        cut = np.percentile(numbers, [100 - percentile, percentile])
        return (float(cut[0]) if low < 0 else low), float(cut[1])
    return (low, high) if method == "minmax" or low == high else entropy_span(numbers, low, high)


def entropy_span(numbers: np.ndarray[Any, Any], low: float, high: float) -> Range:
    """Return the symmetric cut of a histogram whose 256 levels lose the least information (Kullback-Leibler)."""
    top = max(-low, high)
    counts, _ = np.histogram(np.abs(numbers), bins=BINS, range=(0, top))
    counts[0] = counts[1]  # exact zeros, which every range represents
    best, limit = np.inf, top
    # Cuts in steps of 64 bins: neighboring ones differ by 3 % of the range, and each costs a pass over the bins.
    for stop in range(256, BINS + 1, 64):
        p = counts[:stop].astype(np.float64)
        p[-1] += counts[stop:].sum()
        groups = np.array_split(np.arange(stop), 256)
        q = np.zeros(stop)
        for group in groups:
            filled = counts[group] > 0
            if filled.any():
                q[group[filled]] = counts[group].sum() / filled.sum()
        mask = p > 0
        q = np.maximum(q, 1e-3)  # the last bin has all numbers that are cut off
        p_, q_ = p / p.sum(), q / q.sum()
        lost = float((p_[mask] * np.log(p_[mask] / q_[mask])).sum())
        if lost < best:
            best, limit = lost, top * stop / BINS
    return max(low, -limit), min(high, limit)


# -- the bound on the error ---------------------------------------------------------------------------------------
def bounded(observed: Observed, ranges: Ranges, batch: Arrays, bound: float) -> Ranges:
    """Return the ranges with the layers that must stay in float for the results to meet the bound."""
    exact = results_of(observed.model(batch, None), batch)

    def difference(keep: Sequence[str]) -> float:
        setting = {**observed.quantization, "ranges": replace(ranges, keep=tuple(keep))}
        return relative(results_of(observed.model(batch, setting), batch), exact)

    layers = [layer for layer in observed.layers if layer not in ranges.keep]
    errors = {layer: difference([other for other in observed.layers if other != layer]) for layer in layers}
    keep = list(ranges.keep)
    for layer in sorted(layers, key=lambda name: -errors[name]):
        if difference(keep) <= bound:
            break
        keep.append(layer)
    return replace(ranges, errors=errors, keep=tuple(keep), bound=bound)


def results_of(model: Any, batch: Arrays) -> list[np.ndarray[Any, Any]]:
    return [np.asarray(model.backend.to_numpy(y), np.float64) for y in model(dict(batch)).values()]


def relative(results: Sequence[np.ndarray[Any, Any]], exact: Sequence[np.ndarray[Any, Any]]) -> float:
    """Return the largest norm of a difference, relative to the norm of the exact result."""
    pairs = zip(results, exact, strict=True)
    return max(float(np.linalg.norm(a - b) / max(float(np.linalg.norm(b)), 1e-30)) for a, b in pairs)
