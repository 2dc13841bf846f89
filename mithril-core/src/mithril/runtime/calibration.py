"""``ml.calibrate``: how fast a backend is here at what models consist of; ``ml.estimate``: what a model will take.

Small models of every common kind run whole, and operation by operation, in turns. What their operations took is the
samples of a cost model; how the sums compare with the whole gives its coefficients. Both are kept on disk.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mithril.compiler import compile as compile_model, make_backend
from mithril.errors import InputError
from mithril.graph import Node
from mithril.options import resolve
from mithril.runtime.compiled import CompiledModel
from mithril.runtime.corpus import Case, corpus
from mithril.runtime.cost_model import PLAIN, CostModel, Estimate, Sample, kind_of, logarithms
from mithril.runtime.fingerprint import fingerprint
from mithril.runtime.stepping import Stepped
from mithril.runtime.store import Store
from mithril.runtime.undisturbed import Lap, Stopwatch, typical
from mithril.runtime.winners import machine, stamps

if TYPE_CHECKING:
    from mithril.runtime.backend import Backend

ROUNDS = 10  # of the whole corpus
TRUSTED = 0.5  # how far off, as a share, is nothing strange
PRIOR = 0.03  # how much the corpus is doubted
Progress = Callable[[str], None]


class _Case(NamedTuple):
    """A model of the corpus, ready to run both ways."""

    name: str
    compiled: CompiledModel
    params: Mapping[str, Any]
    inputs: Mapping[str, Any]
    stepped: Stepped
    arguments: Mapping[str, Any]


class Measured(NamedTuple):
    """A corpus run many times: seconds of each case, and of each of its nodes."""

    cases: list[_Case]
    whole: list[float]
    nodes: list[dict[Node, float]]


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


def estimate(
    compiled: CompiledModel,
    inputs: Mapping[str, Any] | None = None,
    *,
    store: Store | str | os.PathLike[str] | bool = True,
) -> Estimate:
    """Seconds that a call will take, by layer, without running it. The backend is calibrated first where it never was.

    ``inputs`` are arrays or shapes by name, needed where sizes were left open.
    """
    model = calibration(compiled.backend, store) or calibrate(compiled.backend, store=store)
    if not compiled.programs:
        raise InputError(
            "no program has been made yet, so there is nothing to estimate",
            hint="give shapes= to ml.compile, or run the model once",
        )
    shapes = {n: tuple(getattr(x, "shape", x)) for n, x in (inputs or {}).items()}
    return model.estimate(compiled.concrete(compiled.programs[-1], shapes))


# -- measuring ----------------------------------------------------------------------------------------------------
def measure(
    backend: Backend,
    models: Mapping[str, Case],
    rounds: int,
    progress: Progress = lambda line: None,
) -> Measured:
    """Run models whole and operation by operation, one after the other, round by round."""
    cases = []
    for name, (model, inputs) in models.items():
        progress(f"compiling {name}")
        cases.append(_case(name, model, inputs, backend))
    whole: list[list[Lap]] = [[] for _ in cases]
    nodes: list[dict[Node, list[Lap]]] = [{} for _ in cases]
    for turn in range(rounds + 1):
        progress(f"round {turn} of {rounds}" if turn else "warming up")
        for k, case in enumerate(cases):
            calls, steps = _run(case)
            if turn:  # what happens at a first call happened in the one before
                whole[k] += calls
                for node, spent in steps:
                    nodes[k].setdefault(node, []).append(spent)
    return Measured(cases, [typical(t) for t in whole], [{n: typical(t) for n, t in found.items()} for found in nodes])


def _case(name: str, model: Any, inputs: Mapping[str, np.ndarray[Any, Any]], backend: Backend) -> _Case:
    shapes = {n: list(a.shape) for n, a in inputs.items()}
    compiled = compile_model(model, backend, shapes=shapes, inference=True)
    params = compiled.randomize_params(0)
    given = {n: backend.array(a) for n, a in inputs.items()}
    program, arguments = compiled.bound_call(params, given)
    graph = compiled.concrete(program, {n: tuple(a.shape) for n, a in inputs.items()})
    return _Case(name, compiled, params, given, Stepped(graph, backend), arguments)


def _run(case: _Case) -> tuple[list[Lap], list[tuple[Node, Lap]]]:
    """Calls whose weights are where the call before left them, and each operation."""
    backend, calls, steps = case.compiled.backend, [], []
    backend.synchronize(case.compiled.evaluate(case.params, case.inputs))
    watch = Stopwatch()
    for _ in range(2):
        backend.synchronize(case.compiled.evaluate(case.params, case.inputs))
        calls.append(watch.lap())
    case.stepped.run(case.arguments, lambda node, start, spent: steps.append((node, watch.lap(spent))))
    return calls, steps


# -- fitting ------------------------------------------------------------------------------------------------------
def fitted(measured: Measured) -> CostModel:
    """The samples, and the coefficients that bring sums of samples closest to whole calls, relative to these.

    Where the corpus does not tell coefficients apart, they stay near those of a backend that does one operation after
    the other.
    """
    model = CostModel(list(_samples(measured)))
    rows = np.array([model.terms(case.stepped.graph) for case in measured.cases])
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


def _samples(measured: Measured) -> Iterator[Sample]:
    """Equal operations count once, with their median."""
    groups: dict[tuple[str, str, tuple[float, ...]], list[float]] = {}
    for nodes in measured.nodes:
        for node, seconds in nodes.items():
            groups.setdefault((node.op.name, kind_of(node), logarithms(node)), []).append(seconds)
    for (op, kind, size), times in groups.items():
        yield Sample(op, kind, size, float(np.median(times)))


def nonnegative(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The x >= 0 with the smallest \\|a x - b\\|, one coordinate after the other until nothing moves."""
    scale = np.linalg.norm(a, axis=0)
    used = scale > 0
    a = a[:, used] / scale[used]
    gram, goal = a.T @ a, a.T @ b
    x = np.zeros(a.shape[1])
    for _ in range(20_000):
        before = x.copy()
        for k in range(len(x)):
            x[k] = max(x[k] + (goal[k] - gram[k] @ x) / gram[k, k], 0.0)
        if np.abs(x - before).max(initial=0.0) < 1e-10:
            break
    out = np.zeros(len(used))
    out[used] = x / scale[used]
    return out


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
