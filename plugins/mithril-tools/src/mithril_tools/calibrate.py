"""``ml.calibrate``: measure how fast a backend runs common operations; ``ml.estimate``: predict the time of a model.

Small models of the common kinds run interleaved with programs that repeat each of their operations. The times of the
operations are the samples of a cost model; its coefficients are fitted to the times of the models. Both are stored on
disk.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mithril.backend import checked
from mithril.compiler import CompiledModel, compile as compile_model, make_backend, resolve_options
from mithril.graph import Graph, InputError
from mithril.system import (
    Lap,
    Stopwatch,
    Store,
    fingerprint,
    lower_quartile,
    read_measured,
    save_measured,
    this_machine,
)
from mithril_tools.calibration_models import Case, corpus
from mithril_tools.cost_model import PLAIN, CostModel, Estimate, Sample
from mithril_tools.op_timing import repeated_ops
from mithril_tools.tuning_cache import stamps

if TYPE_CHECKING:
    from mithril.backend import Backend

ROUNDS = 10  # of all calibration models
TRUSTED = 0.5  # relative error that is not treated as an outlier
PRIOR = 0.03  # weight of the prior against the calibration models
Progress = Callable[[str], None]


class _Case(NamedTuple):
    """A calibration model, ready to run, and the graph that the backend runs."""

    graph: Graph
    call: Callable[[], Any]


class Measured(NamedTuple):
    """Seconds of whole models, and samples of their operations."""

    graphs: list[Graph]
    call_seconds: list[float]
    samples: list[Sample]


@checked()
def calibrate(
    backend: Backend | type[Backend] | str,
    *,
    store: Store | str | os.PathLike[str] | bool = True,
    rounds: int = ROUNDS,
    progress: Progress = lambda line: None,
) -> CostModel:
    """Measure the calibration models on a backend, and store the cost model for ``estimate``.

    Takes half a minute, or minutes on a backend that compiles every operation.
    """
    instance = make_backend(backend, resolve_options({}))
    model = fit_coefficients(measure(instance, corpus(), rounds, progress))
    target_store = _store(store)
    if target_store is not None:
        save_measured(target_store, _key(instance), _stored(model))
    return model


def calibration(
    backend: Backend | type[Backend] | str, store: Store | str | os.PathLike[str] | bool = True
) -> CostModel | None:
    """Return the cost model that ``calibrate`` stored for this backend, versions and machine, or None."""
    source_store = _store(store)
    if source_store is None:
        return None
    return _read(read_measured(source_store, _key(make_backend(backend, resolve_options({})))))


@checked()
def estimate(
    compiled: CompiledModel,
    inputs: Mapping[str, Any] | None = None,
    *,
    store: Store | str | os.PathLike[str] | bool = True,
    progress: Progress | None = None,
) -> Estimate:
    """Estimate the seconds of a call, by layer, without running it.

    ``inputs`` are arrays or shapes by name, required if sizes are symbolic. A backend that was never calibrated on this
    machine is calibrated first, which takes a minute or more: ``progress`` is called with a line for each stage; by
    default lines go to stderr.
    """
    if not compiled.programs:
        raise InputError(
            "no program has been made yet, so there is nothing to estimate",
            hint="give shapes= to ml.compile, or run the model once",
        )
    shapes = {n: tuple(getattr(x, "shape", x)) for n, x in (inputs or {}).items()}
    graph = compiled.concrete(compiled.programs[-1], shapes)
    model = calibration(compiled.backend, store)
    if model is None:
        tell = progress or _to_stderr
        name = compiled.backend.name
        tell(f"'{name}' was never calibrated on this machine: measuring it once, which takes a minute or more")
        start = time.perf_counter()
        model = calibrate(compiled.backend, store=store, progress=progress or _rounds_to_stderr)
        tell(f"calibrated '{name}' in {time.perf_counter() - start:.0f} s")
    return model.estimate(graph)


def _to_stderr(line: str) -> None:
    print(f"ml.estimate: {line}", file=sys.stderr, flush=True)


def _rounds_to_stderr(line: str) -> None:
    """Print the measurement rounds; the many models compiled before them would flood a log."""
    if line.startswith(("round", "warming")):
        _to_stderr(line)


# -- measuring ----------------------------------------------------------------------------------------------------
def measure(
    backend: Backend, models: Mapping[str, Case], rounds: int, progress: Progress = lambda line: None
) -> Measured:
    """Run models and copies of their operations in sequence, round by round."""
    cases = []
    for name, (model, inputs) in models.items():
        progress(f"compiling {name}")
        cases.append(_case(model, inputs, backend))
    progress("compiling their operations")
    operations = repeated_ops([case.graph for case in cases], backend)
    calls = [*(o.call for o in operations), *(c.call for c in cases)]
    laps: list[list[Lap]] = [[] for _ in calls]
    for turn in range(rounds + 1):
        progress(f"round {turn} of {rounds}" if turn else "warming up")
        for k, call in enumerate(calls):
            if not turn or k >= len(operations):
                call()  # untimed call: in repeated use the weights are still in the CPU cache
            if turn:
                watch = Stopwatch()
                call()
                laps[k].append(watch.lap())
    seconds = [lower_quartile(lap) for lap in laps]
    nothing = min(seconds[: len(operations)])
    samples = [o.sample(t, nothing) for o, t in zip(operations, seconds, strict=False)]
    return Measured([case.graph for case in cases], seconds[len(operations) :], samples)


def _case(model: Any, inputs: Mapping[str, np.ndarray[Any, Any]], backend: Backend) -> _Case:
    shapes = {n: list(a.shape) for n, a in inputs.items()}
    compiled = compile_model(model, backend, shapes=shapes, inference=True)
    params = compiled.randomize_params(0)
    arguments = {n: backend.array(a) for n, a in inputs.items()}
    program, _ = compiled.bound_call(params, arguments)
    graph = compiled.concrete(program, {n: tuple(a.shape) for n, a in inputs.items()})
    return _Case(graph, lambda: backend.synchronize(compiled.evaluate(params, arguments)))


# -- fitting ------------------------------------------------------------------------------------------------------
def fit_coefficients(measured: Measured) -> CostModel:
    """Fit the coefficients to minimize the relative error of predicted calls.

    Coefficients that the calibration models do not determine stay near those of a backend that runs operations in
    sequence.
    """
    model = CostModel(measured.samples)
    rows = np.array([model.terms(graph) for graph in measured.graphs])
    call_seconds = np.array(measured.call_seconds)
    coefficients = np.array(PLAIN)
    for _ in range(10):
        estimates = np.maximum(rows @ coefficients, 1e-9)
        deviation = np.abs(np.log(estimates / call_seconds))
        trust = 1 / np.maximum(
            deviation / TRUSTED, 1.0
        )  # an outlier was disturbed by other processes, or differs from the other cases
        scaled = rows * (trust / np.sqrt(estimates * call_seconds))[:, None]
        weight = PRIOR * np.linalg.norm(scaled, axis=0)
        a = np.vstack([scaled, np.diag(weight)])
        b = np.concatenate([trust * np.sqrt(call_seconds / estimates), weight * PLAIN])
        coefficients = nonnegative(a, b)
    deviation = np.quantile(np.abs(rows @ coefficients / call_seconds - 1), 0.9)
    return CostModel(model.samples, tuple(map(float, coefficients)), float(deviation))


def nonnegative(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Solve min |a x - b| with x >= 0 by Lawson and Hanson's active-set method."""
    scale = np.linalg.norm(a, axis=0)
    scale[scale == 0] = 1.0
    a = a / scale
    x, free = np.zeros(a.shape[1]), np.zeros(a.shape[1], bool)
    for _ in range(10 * len(x)):
        slope = np.where(free, -np.inf, a.T @ (b - a @ x))
        if slope.max(initial=0.0) <= 1e-10 * np.linalg.norm(b):
            break
        free[slope.argmax()] = True
        while True:
            candidate = np.zeros_like(x)
            candidate[free] = np.linalg.lstsq(a[:, free], b, rcond=None)[0]
            below = free & (candidate <= 0)
            if not below.any():
                break
            step = (x[below] / (x[below] - candidate[below])).min()
            x = x + step * (candidate - x)
            free &= x > 1e-12
            x[~free] = 0.0
        x = candidate
    solution: np.ndarray[Any, Any] = x / scale
    return solution


# -- keeping ------------------------------------------------------------------------------------------------------
def _store(store: Store | str | os.PathLike[str] | bool) -> Store | None:
    if isinstance(store, Store):
        return store
    return None if store is False else Store(None if store is True else store)


def _key(backend: Backend) -> str:
    return fingerprint("cost model", backend.identity(), this_machine(), stamps(backend))


def _stored(model: CostModel) -> dict[str, Any]:
    samples = [list(asdict(s).values()) for s in model.samples]
    return {"samples": samples, "coefficients": list(model.coefficients), "relative_error": model.relative_error}


def _read(data: Any) -> CostModel | None:
    try:
        samples = [Sample(op, kind, tuple(size), seconds) for op, kind, size, seconds in data["samples"]]
        coefficients, error = tuple(map(float, data["coefficients"])), float(data["relative_error"])
    except (ValueError, KeyError, TypeError):
        return None
    return CostModel(samples, coefficients, error) if len(coefficients) == len(PLAIN) else None
