"""Conformance of passes: results and gradients at every optimization level against those at level ``none``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from mithril.compiler import compile
from mithril.derivatives import gradients
from mithril.graph import Builder, DType, Graph, Value, dtype as as_dtype, evaluate, result_name
from mithril.models import Layer, Model
from mithril_testing.compare import tolerance
from mithril_testing.sample_arrays import special_array

REFERENCE = "reference"
LEVELS = ("low", "medium", "high")
FACTOR = 256.0  # of the tolerance of a dtype: passes may reorder a whole program
ULPS = 4.0  # rounding errors of an operation, in units of its last place
LARGE = 1e4  # elements above do not count where cancellation is allowed for
MODERATE = 40.0  # squares of smaller numbers add up within the range of float16
NUDGE = 4e-6  # relative change of all inputs that shows how much rounding a result amplifies

Arrays = Mapping[str, np.ndarray[Any, Any]]


class WholeBackend(Layer):
    """A graph as a layer."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.inputs = tuple(f"in{k}" for k, _ in enumerate(graph.arguments))
        self.outputs = tuple(f"out{k}" for k, _ in enumerate(graph.outputs))

    def build(self, *operands: Value) -> tuple[Value, ...]:
        return Builder.current().inline(self.graph, operands)


class Levels:
    """A graph compiled at several levels for one backend, called with the same arguments and cotangents."""

    def __init__(self, graph: Graph, backend: Any, **options: Any) -> None:
        self.graph, self.backend, self.options = graph, backend, options
        self.layer = WholeBackend(graph)
        arguments = list(graph.arguments)
        self.names = {i.name: name for i, name in zip(arguments, self.layer.inputs, strict=True)}
        self.shapes = {name: i.type.shape for i, name in zip(arguments, self.layer.inputs, strict=True)}
        self.types = {name: i.type.dtype.name for i, name in zip(arguments, self.layer.inputs, strict=True)}
        self.wrt = [self.names[i.name] for i in arguments if i.type.dtype.is_float]
        self.of = {o: v.type for o, v in zip(self.layer.outputs, graph.outputs, strict=True) if v.dtype.is_float}
        self._compiled: dict[str, Any] = {}
        self._expected: tuple[Any, ...] = (None, None, None, None)  # base, arguments and gradient; the results

    def compiled(self, level: Any) -> Any:
        if level not in self._compiled:
            model = Model()
            model |= self.layer(**{n: n for n in (*self.layer.inputs, *self.layer.outputs)})
            self._compiled[level] = compile(
                model,
                self.backend,
                shapes=self.shapes,
                types=self.types,
                optimization_level=level,
                **self.options,
            )
        return self._compiled[level]

    def results(self, level: str, arguments: Arrays, *, gradient: bool) -> dict[str, np.ndarray[Any, Any]]:
        """Outputs by name, and gradients by ``result_name``; level ``reference`` is the references' own."""
        if level == REFERENCE:
            return self._evaluated(arguments, gradient)
        compiled = self.compiled(level)
        inputs = {self.names[n]: a for n, a in arguments.items()}
        if not gradient:
            outputs, slopes = compiled.evaluate({}, inputs), {}
        else:
            cotangents = {o: cotangent(o, t) for o, t in self.of.items()}
            outputs, slopes = compiled.evaluate({}, inputs, output_gradients=cotangents, wrt=self.wrt)
        results = {**outputs, **{result_name("gradient", n): g for n, g in slopes.items()}}
        return {n: self.backend.to_numpy(a) for n, a in results.items()}

    def _base_results(self, base: str, arguments: Arrays, gradient: bool) -> dict[str, np.ndarray[Any, Any]]:
        """Return the results of a base level, computed once for consecutive comparisons of the same arguments."""
        key = (base, arguments, gradient)
        if not (self._expected[1] is arguments and self._expected[0] == base and self._expected[2] == gradient):
            self._expected = (*key, self.results(base, arguments, gradient=gradient))
        return self._expected[3]  # type: ignore[no-any-return]

    def _evaluated(
        self, arguments: Arrays, gradient: bool, rounding: Callable[[Any], Any] | None = None
    ) -> dict[str, np.ndarray[Any, Any]]:
        renamed = dict(zip(self.graph.output_names, self.layer.outputs, strict=True))
        if not gradient:
            return {renamed[n]: a for n, a in evaluate(self.graph, arguments, rounding).items()}
        differentiated = {n: renamed[n] for n in self.graph.output_names if renamed[n] in self.of}
        wrt = [n for n, name in self.names.items() if name in self.wrt]
        backward = gradients(self.graph, differentiated, wrt)
        cotangent_names = [i.name for i in backward.arguments if i.name not in self.names]
        cotangents = {
            n: cotangent(o, self.of[o]) for n, o in zip(cotangent_names, differentiated.values(), strict=True)
        }
        results = evaluate(backward, {**arguments, **cotangents}, rounding)
        renamed |= {result_name("gradient", n): result_name("gradient", self.names[n]) for n in wrt}
        return {renamed[n]: a for n, a in results.items()}

    def differences(self, level: str, arguments: Arrays, *, gradient: bool, base: str = "none") -> list[str]:
        """Return a line for each result that differs from level ``base`` by more than rounding explains."""
        expected = self._base_results(base, arguments, gradient)
        actual = self.results(level, arguments, gradient=gradient)
        if not any(self._mismatch(actual[n], e, 0.0).any() for n, e in expected.items()):
            return []
        shifted = [self.results(base, nudged(arguments, seed), gradient=gradient) for seed in range(3)]
        reference = self._evaluated(arguments, gradient)
        rounded = [self._evaluated(arguments, gradient, one_ulp(seed)) for seed in range(8)]
        lines = []
        for name, e in expected.items():
            unsure = sensitivity(e, [m[name] for m in shifted])
            spread = sensitivity(reference[name], [m[name] for m in rounded], factor=ULPS)
            unsure = np.maximum(unsure, np.where(np.isinf(spread), 0.0, spread))  # rounding breaks ties, as of max
            wrong = self._mismatch(actual[name], e, unsure)
            if wrong.any():
                index = np.unravel_index(int(np.argmax(wrong)), wrong.shape)
                lines.append(
                    f"{name} at level {level}: {int(wrong.sum())} of {wrong.size} differ, "
                    f"first {actual[name][index]!r} instead of {e[index]!r} at {[int(i) for i in index]}"
                )
        return lines

    def _mismatch(self, actual: Any, expected: Any, unsure: Any) -> Any:
        assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape), "dtype or shape differs"
        if not as_dtype(expected.dtype).is_float:
            return np.asarray(actual != expected) & ~np.isinf(unsure)
        allowed = tolerance(as_dtype(expected.dtype), FACTOR)
        a, e = actual.astype(np.float64), expected.astype(np.float64)
        with np.errstate(all="ignore"):
            scale = np.max(np.abs(e), where=np.abs(e) < LARGE, initial=0.0)
            close = np.abs(a - e) <= allowed.relative * np.abs(e) + allowed.absolute / FACTOR * scale + unsure
            denormal = np.maximum(np.abs(a), np.abs(e)) < float(ml_dtypes.finfo(expected.dtype).tiny)
            return ~(close | denormal | (a == e) | (np.isnan(a) & np.isnan(e)) | np.isinf(unsure))


def sensitivity(expected: Any, shifted: list[Any], factor: float = 16.0) -> Any:
    """Return how far elements go in the shifted results, times a factor; infinite where finiteness changes."""
    e = expected.astype(np.float64)
    unsure = np.zeros(e.shape)
    for other in shifted:
        m = other.astype(np.float64)
        with np.errstate(all="ignore"):
            step = np.where((e == m) | (np.isnan(e) & np.isnan(m)), 0.0, factor * np.abs(m - e))
        unsure = np.maximum(unsure, np.where(np.isnan(step), np.inf, step))
    return unsure


def one_ulp(seed: int) -> Callable[[Any], Any]:
    """Return a function that changes all elements of an intermediate result by up to one unit in the last place."""
    rng = np.random.default_rng(seed)

    def rounding(x: Any) -> Any:
        kind = as_dtype(x.dtype)
        if not kind.is_float:
            return x
        eps = float(ml_dtypes.finfo(kind.numpy).eps)
        with np.errstate(all="ignore"):
            return (np.asarray(x, np.float64) * rng.uniform(1 - eps, 1 + eps, np.shape(x))).astype(x.dtype)

    return rounding


def nudged(arguments: Arrays, seed: int) -> dict[str, np.ndarray[Any, Any]]:
    """Return the arguments with all floats changed in their last places."""
    rng = np.random.default_rng(seed)
    changed = {}
    for name, x in arguments.items():
        kind = as_dtype(x.dtype)
        size = max(NUDGE, 2.0 * tolerance(kind).relative) if kind.is_float else 0.0
        with np.errstate(all="ignore"):
            factor = rng.uniform(1 - size, 1.0, x.shape)  # the largest numbers stay finite
            changed[name] = (x.astype(np.float64) * factor).astype(x.dtype) if kind.is_float else x
    return changed


def cotangent(name: str, type: Any) -> np.ndarray[Any, Any]:
    """Return a cotangent whose elements all differ."""
    shape = tuple(int(d) for d in type.shape)
    return (
        np.linspace(0.5, 1.5, int(np.prod(shape)) or 1)[: int(np.prod(shape))].reshape(shape).astype(type.dtype.numpy)
    )


def extremes(kind: DType) -> np.ndarray[Any, Any]:
    """Return the awkward values of a dtype: signed zeros, kinks, infinities, nan, the largest, denormals."""
    values = special_array(kind)
    if not kind.is_float:
        return values

    limits = ml_dtypes.finfo(kind.numpy)
    largest, smallest = float(limits.max), float(limits.tiny)
    more = [11.5, 200.0, largest**0.6, largest, smallest, smallest / 4]
    return np.concatenate([values, np.array([*more, *(-x for x in more)]).astype(kind.numpy)])


def special_arguments(
    graph: Graph, seed: int, *, overflow: bool = True, finite: Collection[str] = ()
) -> dict[str, np.ndarray[Any, Any]]:
    """Return arguments drawn from the awkward values of their dtypes; integers stay small, as they may be places.

    Without ``overflow`` no finite number is so large that sums of products overflow, whose results are unspecified.
    Inputs named in ``finite`` get neither infinities nor nan: weights of convolutions, which padding zeros
    are multiplied with.
    """
    rng = np.random.default_rng(seed)
    drawn = {}
    for i in graph.arguments:
        shape, kind = tuple(int(d) for d in i.type.shape), i.type.dtype
        if kind.is_float:
            values = extremes(kind)
            if i.name in finite:
                values = values[np.isfinite(values)]
            if not overflow:
                values = values[~np.isfinite(values) | (np.abs(values.astype(np.float64)) < MODERATE)]
            drawn[i.name] = rng.choice(values, shape).astype(kind.numpy)
        else:
            drawn[i.name] = rng.integers(0, 2, shape).astype(kind.numpy)
    return drawn
