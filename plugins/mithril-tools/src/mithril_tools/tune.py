"""``ml.tune``: measure which options are fastest for a model, its shapes and this machine.

Options are varied in sequence; each alternative is interleaved with the best setting so far. A winner must be faster by
more than the noise and give the same results. The result is cached on disk until the model, the shapes, the backend, a
version or the machine changes. ``optimization_level="high"`` uses it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from mithril.backend import checked
from mithril.compiler import compile as compile_model, make_backend, resolve_options
from mithril.graph import LEVELS, MithrilError, OptionError, dtype as as_dtype
from mithril.models import flatten
from mithril.system import (
    Store,
    UnhashableObject,
    fingerprint,
    read_measured,
    save_measured,
    this_machine,
    time_interleaved,
)
from mithril_tools.diff import TOLERANCE, relative_error
from mithril_tools.tuning_cache import save_best, stamps, tuning_in_progress

if TYPE_CHECKING:
    from mithril.compiler import CompiledModel
    from mithril.models import Model

MARGIN = 0.03  # of the time: smaller gains are noise
CHOICES: Mapping[str, Sequence[Any]] = {
    "jit": (None, False, True),
    "optimization_level": ("medium", "high", "low"),
    "optimizations": ({}, {"operator-fusion": False}, {"linear-activation": False}),
    "num_threads": (None, 1, 2, 4),
}


@dataclass
class TuningResult:
    """The fastest ``options`` for ``ml.compile``; printing it shows the table of all trials."""

    options: dict[str, Any]
    seconds: float
    default_seconds: float
    tried: list[tuple[str, Any, float | None, str]] = field(default_factory=list)  # option, value, seconds, remark
    from_store: bool = False
    compiled: CompiledModel | None = None

    @property
    def speedup(self) -> float:
        return self.default_seconds / self.seconds

    def __str__(self) -> str:
        settings = ", ".join(f"{n}={v!r}" for n, v in self.options.items()) or "the defaults"
        lines = [f"best: {settings}; {1e3 * self.seconds:.3f} ms, {self.speedup:.2f} times as fast as the defaults"]
        for knob, value, seconds, remark in self.tried:
            time = "-" if seconds is None else f"{1e3 * seconds:.3f} ms"
            lines.append(f"  {knob}={value!r}: {time}" + (f"  {remark}" if remark else ""))
        return "\n".join(lines)


@checked()
def tune(
    model: Model,
    backend: Any,
    inputs: Mapping[str, Any],
    *,
    choices: Mapping[str, Sequence[Any]] | None = None,
    gradients_of: str | None = None,
    seconds: float = 0.5,
    store: Store | str | os.PathLike[str] | bool = True,
    **options: Any,
) -> TuningResult:
    """Measure options of ``ml.compile`` on sample ``inputs`` and keep the fastest that give the same results.

    ``choices`` maps an option to the values to try, the default first. ``gradients_of`` names a scalar output whose
    gradients are also timed. ``seconds`` is the time per option. ``store=False`` ignores the cache.
    """
    knobs = {n: tuple(v) for n, v in (CHOICES if choices is None else choices).items() if n not in options}
    settings = resolve_options(options)
    instance = make_backend(backend, settings)
    if choices is None and not instance.capabilities.threads:
        knobs.pop("num_threads", None)
    arrays = {n: instance.to_numpy(x) if instance.is_array(x) else np.asarray(x) for n, x in inputs.items()}
    options.setdefault("shapes", {n: list(a.shape) for n, a in arrays.items()})
    cache = store
    if not isinstance(store, Store) and store is not False:
        cache = Store(settings["cache_dir"] if store is True else store)
    key = _key(model, instance, arrays, options, knobs, gradients_of) if isinstance(cache, Store) else None
    entry = read_measured(cache, key) if isinstance(cache, Store) and key is not None else None
    with tuning_in_progress():
        if entry is not None:
            result = _read(entry, knobs)
            if result is not None:
                result.compiled = compile_model(model, instance, **{**options, **result.options})
                return result
        result = _search(model, instance, arrays, options, knobs, gradients_of, seconds)
    if isinstance(cache, Store) and key is not None:
        save_measured(cache, key, _stored(result))
        shapes = {n: a.shape for n, a in arrays.items()}
        save_best(
            cache,
            model,
            instance,
            shapes,
            {n: resolve_options({**options, **result.options}).as_dict()[n] for n in knobs},
        )
    return result


def _search(
    model: Model,
    backend: Any,
    arrays: Mapping[str, np.ndarray[Any, Any]],
    options: Mapping[str, Any],
    knobs: Mapping[str, Sequence[Any]],
    gradients_of: str | None,
    seconds: float,
) -> TuningResult:
    """Vary the options in sequence and keep the winners."""
    best: dict[str, Any] = {}
    base = _Candidate(model, backend, arrays, options, gradients_of)
    current = base
    tried: list[tuple[str, Any, float | None, str]] = []
    for knob, values in knobs.items():
        racing: dict[int, _Candidate] = {}  # by position among the values, which need not be hashable
        for k, value in enumerate(values):
            if value == resolve_options({**options, **best}).as_dict().get(knob):
                continue
            try:
                racing[k] = _Candidate(model, backend, arrays, {**options, **best, knob: value}, gradients_of)
                wrong = racing[k].differs(base)
            except MithrilError as error:
                wrong = error.what
            if wrong:
                tried.append((knob, value, None, wrong))
                racing.pop(k, None)
        if not racing:
            continue
        calls: dict[int | None, Callable[[], Any]] = {None: current.call, **{k: c.call for k, c in racing.items()}}
        times = time_interleaved(calls, backend.synchronize, seconds=seconds)
        tried += [(knob, values[k], times[k], "") for k in racing]
        winner = min(racing, key=lambda k: times[k])
        if times.is_faster(winner, None, MARGIN):
            best[knob], current = values[winner], racing[winner]
    last = {"best": current.call, "default": base.call}
    final = time_interleaved(last, backend.synchronize, seconds=seconds)
    if final["best"] > final["default"]:  # the winners of single comparisons lost the final one
        best, current = {}, base
        final["best"] = final["default"]
    return TuningResult(best, final["best"], final["default"], tried, False, current.compiled)


class _Candidate:
    """The model compiled with one setting, and a call of it."""

    def __init__(
        self, model: Model, backend: Any, arrays: Any, options: Mapping[str, Any], gradients_of: str | None
    ) -> None:
        self.compiled = compile_model(model, backend, **options)
        self.params = self.compiled.randomize_params(0, arrays)
        self.inputs = {n: self.compiled.backend.array(a) for n, a in arrays.items()}
        self.of = gradients_of

    def call(self) -> Any:
        return self.compiled.evaluate(self.params, self.inputs, self.of, training=False)

    def results(self) -> dict[str, np.ndarray[Any, Any]]:
        results = self.call()
        parts = results if isinstance(results, tuple) else (results,)
        to_numpy = self.compiled.backend.to_numpy
        return {f"{k}/{n}": to_numpy(v) for k, part in enumerate(parts) for n, v in part.items()}

    def differs(self, other: _Candidate) -> str:
        """Describe how the results differ from another candidate's beyond rounding; empty if they agree."""
        actual, theirs = self.results(), other.results()
        floats = [a for a in theirs.values() if a.size and as_dtype(a.dtype).is_float]
        largest = max((float(np.abs(a).max()) for a in floats), default=1.0)
        for name, expected in theirs.items():
            allowed = 10 * TOLERANCE.get(as_dtype(expected.dtype).name, 0.0)
            error = relative_error(expected, actual[name])
            absolute = error * float(np.abs(expected).max(initial=0.0)) / (largest or 1.0)
            if min(error, absolute) > allowed:
                return f"its results differ by {error:.2g} in '{name.partition('/')[2]}'"
        return ""


# -- keeping ------------------------------------------------------------------------------------------------------
def _key(model: Any, backend: Any, arrays: Any, options: Any, knobs: Any, gradients_of: Any) -> str | None:
    """Return a key of everything that the result depends on, or None if that cannot be determined."""
    shapes = [(n, a.dtype.name, a.shape) for n, a in arrays.items()]
    try:
        flat, backend_key = flatten(model), (type(backend), backend.identity())
        return fingerprint(
            "tune", flat, backend_key, shapes, dict(options), dict(knobs), gradients_of, this_machine(), stamps(backend)
        )
    except UnhashableObject:
        return None


def _stored(tuned: TuningResult) -> dict[str, Any]:
    for name, value in tuned.options.items():
        if not isinstance(value, (bool, int, float, str, dict, type(None))):
            raise OptionError(
                f"tune: cannot store the choice {name}={value!r}", hint="pass store=False to measure without storing"
            )
    return {"options": tuned.options, "seconds": tuned.seconds, "default": tuned.default_seconds}


def _read(data: Any, knobs: Mapping[str, Sequence[Any]]) -> TuningResult | None:
    try:
        options = dict(data["options"])
        if any(name not in knobs or value not in knobs[name] for name, value in options.items()):
            return None
        return TuningResult(options, float(data["seconds"]), float(data["default"]), from_store=True)
    except (ValueError, KeyError, TypeError):
        return None


assert set(CHOICES["optimization_level"]) <= set(LEVELS)
