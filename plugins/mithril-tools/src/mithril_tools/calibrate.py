"""``ml.calibrate``: how fast a backend is here at what models consist of; ``ml.estimate``: what a model will take.

Small models of every common kind run, and programs of several copies of each of their operations, in turns. What the
operations took is the samples of a cost model; how their sums compare with the models gives its coefficients. Both are
kept on disk.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mithril.backend.checked_calls import checked
from mithril.base.cpu_stopwatch import Lap, Stopwatch, typical
from mithril.base.disk_cache import Store
from mithril.base.errors import InputError
from mithril.base.fingerprint import fingerprint
from mithril.compiler.steps import compile as compile_model, make_backend
from mithril.ir import Graph
from mithril.plugins.option_table import resolve
from mithril.runtime.compiled_model import CompiledModel
from mithril_tools.calibration_models import Case, corpus
from mithril_tools.cost_model import PLAIN, CostModel, Estimate, Sample
from mithril_tools.op_timing import distinct
from mithril_tools.tuning_cache import machine, stamps

if TYPE_CHECKING:
    from mithril.backend.base import Backend

ROUNDS = 10  # of the whole corpus
TRUSTED = 0.5  # how far off, as a share, is nothing strange
PRIOR = 0.03  # how much the corpus is doubted
Progress = Callable[[str], None]


class _Case(NamedTuple):
    """A model of the corpus, ready to run, and the graph that the backend runs."""

    graph: Graph
    call: Callable[[], Any]


class Measured(NamedTuple):
    """Seconds of whole models, and samples of their operations."""

    graphs: list[Graph]
    whole: list[float]
    samples: list[Sample]


@checked()
def calibrate(
    backend: Backend | type[Backend] | str,
    *,
    store: Store | str | os.PathLike[str] | bool = True,
    rounds: int = ROUNDS,
    progress: Progress = lambda line: None,
) -> CostModel:
    """Measure the corpus on a backend, and keep the cost model for ``estimate``.

    Takes half a minute; minutes where every operation has to be compiled by itself.
    """
    made = make_backend(backend, resolve({}))
    model = fitted(measure(made, corpus(), rounds, progress))
    kept = _store(store)
    if kept is not None:
        kept.put(_key(made), {"cost_model": _written(model)})
    return model


def calibration(
    backend: Backend | type[Backend] | str, store: Store | str | os.PathLike[str] | bool = True
) -> CostModel | None:
    """What ``calibrate`` has found here for this backend in these versions, or None."""
    kept = _store(store)
    parts = kept.get(_key(make_backend(backend, resolve({})))) if kept is not None else None
    return _read(parts["cost_model"]) if parts is not None and "cost_model" in parts else None


@checked()
def estimate(
    compiled: CompiledModel,
    inputs: Mapping[str, Any] | None = None,
    *,
    store: Store | str | os.PathLike[str] | bool = True,
    progress: Progress | None = None,
) -> Estimate:
    """Estimate the seconds of a call, by layer, without running it.

    ``inputs`` are arrays or shapes by name, needed where sizes were left open. A backend that was never calibrated on
    this machine is calibrated first, which takes a minute or more: ``progress`` is called with a line for each stage;
    by default lines go to stderr.
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
    """Print the rounds; the many models that are compiled before would flood a log."""
    if line.startswith(("round", "warming")):
        _to_stderr(line)


# -- measuring ----------------------------------------------------------------------------------------------------
def measure(
    backend: Backend, models: Mapping[str, Case], rounds: int, progress: Progress = lambda line: None
) -> Measured:
    """Run models and copies of their operations, one after the other, round by round."""
    cases = []
    for name, (model, inputs) in models.items():
        progress(f"compiling {name}")
        cases.append(_case(model, inputs, backend))
    progress("compiling their operations")
    operations = distinct([case.graph for case in cases], backend)
    calls = [*(o.call for o in operations), *(c.call for c in cases)]
    laps: list[list[Lap]] = [[] for _ in calls]
    for turn in range(rounds + 1):
        progress(f"round {turn} of {rounds}" if turn else "warming up")
        for k, call in enumerate(calls):
            if not turn or k >= len(operations):
                call()  # a model finds its weights where its last call left them
            if turn:
                watch = Stopwatch()
                call()
                laps[k].append(watch.lap())
    seconds = [typical(found) for found in laps]
    nothing = min(seconds[: len(operations)])
    samples = [o.sample(t, nothing) for o, t in zip(operations, seconds, strict=False)]
    return Measured([case.graph for case in cases], seconds[len(operations) :], samples)


def _case(model: Any, inputs: Mapping[str, np.ndarray[Any, Any]], backend: Backend) -> _Case:
    shapes = {n: list(a.shape) for n, a in inputs.items()}
    compiled = compile_model(model, backend, shapes=shapes, inference=True)
    params = compiled.randomize_params(0)
    given = {n: backend.array(a) for n, a in inputs.items()}
    program, _ = compiled.bound_call(params, given)
    graph = compiled.concrete(program, {n: tuple(a.shape) for n, a in inputs.items()})
    return _Case(graph, lambda: backend.synchronize(compiled.evaluate(params, given)))


# -- fitting ------------------------------------------------------------------------------------------------------
def fitted(measured: Measured) -> CostModel:
    """The samples, and the coefficients that bring sums of samples closest to whole calls, relative to these.

    Where the corpus does not tell coefficients apart, they stay near those of a backend that does one operation after
    the other.
    """
    model = CostModel(measured.samples)
    rows = np.array([model.terms(graph) for graph in measured.graphs])
    whole = np.array(measured.whole)
    found = np.array(PLAIN)
    for _ in range(10):
        told = np.maximum(rows @ found, 1e-9)
        apart = np.abs(np.log(told / whole))
        trust = 1 / np.maximum(apart / TRUSTED, 1.0)  # a case far off was disturbed, or is unlike the others
        scaled = rows * (trust / np.sqrt(told * whole))[:, None]
        weight = PRIOR * np.linalg.norm(scaled, axis=0)
        a = np.vstack([scaled, np.diag(weight)])
        b = np.concatenate([trust * np.sqrt(whole / told), weight * PLAIN])
        found = nonnegative(a, b)
    apart = np.quantile(np.abs(rows @ found / whole - 1), 0.9)
    return CostModel(model.samples, tuple(map(float, found)), float(apart))


def nonnegative(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The x >= 0 with the smallest error of a x = b, by Lawson and Hanson's active sets."""
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
            wanted = np.zeros_like(x)
            wanted[free] = np.linalg.lstsq(a[:, free], b, rcond=None)[0]
            below = free & (wanted <= 0)
            if not below.any():
                break
            step = (x[below] / (x[below] - wanted[below])).min()
            x = x + step * (wanted - x)
            free &= x > 1e-12
            x[~free] = 0.0
        x = wanted
    found: np.ndarray[Any, Any] = x / scale
    return found


# -- keeping ------------------------------------------------------------------------------------------------------
def _store(store: Store | str | os.PathLike[str] | bool) -> Store | None:
    if isinstance(store, Store):
        return store
    return None if store is False else Store(None if store is True else store)


def _key(backend: Backend) -> str:
    own = {n: str(v) for n, v in vars(backend).items() if not n.startswith("_")}
    return fingerprint("cost model", backend.name, own, machine(), stamps(backend))


def _written(model: CostModel) -> bytes:
    samples = [list(asdict(s).values()) for s in model.samples]
    return json.dumps({"samples": samples, "coefficients": list(model.coefficients), "apart": model.apart}).encode()


def _read(text: bytes) -> CostModel | None:
    try:
        data = json.loads(text)
        samples = [Sample(op, kind, tuple(size), seconds) for op, kind, size, seconds in data["samples"]]
        coefficients, apart = tuple(map(float, data["coefficients"])), float(data["apart"])
    except (ValueError, KeyError, TypeError):
        return None
    return CostModel(samples, coefficients, apart) if len(coefficients) == len(PLAIN) else None
