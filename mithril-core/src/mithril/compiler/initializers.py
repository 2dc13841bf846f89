"""Initializers by name. The portable generator returns the same numbers for a seed and a name on every platform."""

from __future__ import annotations

import ast
import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from mithril.backend import EncodedWeight, to_numpy
from mithril.graph import Input, ModelError, ShapeError, TensorType, equal, float32, is_static, unknown
from mithril.ops import Draws

# A NumPy array.
Array = np.ndarray[Any, Any]
# The part of a parameter that a device holds.
Index = tuple[slice, ...]
SLICE = 1 << 20  # elements of a parameter that ``norms`` of a region draws at once
Initializer = Callable[..., Array]
INITIALIZERS: dict[str, Initializer] = {}


def initialize(
    inputs: Iterable[Input], seed: int, pretrained: Mapping[str, Any] | None = None, index: Index | None = None
) -> dict[str, Array]:
    """Return arrays for inputs by name: pretrained, else drawn with a key derived from seed and name.

    With ``index`` only this region of each is loaded or drawn.
    """
    arrays = pretrained or {}
    return {
        i.name: _loaded(i, arrays[i.name], index)
        if i.name in arrays
        else initial(i.name, i.type, str(i.tags.get("init", "zeros")), seed, index)
        for i in inputs
    }


def _loaded(declared: Input, array: Any, index: Index | None) -> Any:
    """Return a pretrained array with the dtype of the input, if possible without a copy; quantized values stay."""
    is_encoded = isinstance(array, EncodedWeight) and index is None and declared.type.dtype is float32
    loaded = array if is_encoded else to_numpy(array)
    shape = declared.type.shape
    if len(shape) != loaded.ndim or any(equal(a, b) is False for a, b in zip(shape, loaded.shape, strict=True)):
        raise ShapeError(
            f"the pretrained array of '{declared.name}' has shape {list(loaded.shape)}, expected {list(shape)}",
            hint="replace or remove it in the pretrained mapping of the layer",
        )
    if is_encoded:
        return loaded
    region = np.asarray(loaded[index or ...])
    # Mapped files may align elements to no address.
    return np.require(region, declared.type.dtype.numpy, ["C", "A"])


def initial(name: str, type: TensorType, init: str, seed: int, index: Index | None = None) -> Array:
    """Return one array, or a region; ``init`` names an initializer, with optional arguments: ``"normal(std=0.02)"``."""
    if not is_static(type.shape):
        raise ShapeError(
            f"Cannot infer shape for tensor '{name}'",
            facts=[f"it is {type}"],
            hint="give the shapes of the inputs: shapes=... when compiling, or sample inputs",
        )
    shape: tuple[int, ...] = type.shape  # type: ignore[assignment]
    function, arguments = parse(init)
    draws = Draws(seed, name, shape, index)
    array = function(draws, shape, **dict(arguments))
    return np.asarray(array, dtype=type.dtype.numpy, order="C").reshape(draws.part)


@lru_cache(maxsize=4096)
def parse(init: str) -> tuple[Initializer, tuple[tuple[str, Any], ...]]:
    """Parse an initializer to its function and keyword arguments."""
    name = init.partition("(")[0]
    if name not in INITIALIZERS:
        message, facts, hint = unknown("initializer", name, list(INITIALIZERS))
        raise ModelError(message, facts=facts, hint=hint)
    function = INITIALIZERS[name]
    parameters = [p for p in inspect.signature(function).parameters if p not in ("draws", "shape")]
    try:
        call = ast.parse(init, mode="eval").body
        pairs = [(k.arg, ast.literal_eval(k.value)) for k in call.keywords] if isinstance(call, ast.Call) else []
        arguments = tuple((str(n), v) for n, v in pairs)
        if (isinstance(call, ast.Call) and call.args) or any(n not in parameters for n, _ in arguments):
            raise ValueError("arguments are given by name")
    # Python's parser raises MemoryError where its stack ends, and ValueError for null bytes.
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise ModelError(
            f"cannot parse the initializer '{init}'",
            facts=[str(error), f"arguments of {name}: {', '.join(parameters) or 'none'}"],
            hint="write it like 'normal(std=0.02)'",
        ) from None
    return function, arguments


def initializer(function: Initializer) -> Initializer:
    """Register a function ``(draws, shape, **arguments) -> array`` of the drawn region under its name."""
    INITIALIZERS[function.__name__] = function
    return function


def fans(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return fan-in and fan-out of weights [out, in, *kernel]."""
    if len(shape) < 2:
        size = shape[0] if shape else 1
        return size, size
    window = math.prod(shape[2:])
    return shape[1] * window, shape[0] * window


@initializer
def zeros(draws: Draws, shape: tuple[int, ...]) -> Array:
    return np.zeros(draws.part, np.float32)


@initializer
def ones(draws: Draws, shape: tuple[int, ...]) -> Array:
    return np.ones(draws.part, np.float32)


@initializer
def constant(draws: Draws, shape: tuple[int, ...], value: float = 0.0) -> Array:
    return np.full(draws.part, value)


@initializer
def uniform(draws: Draws, shape: tuple[int, ...], low: float = 0.0, high: float = 1.0) -> Array:
    out = draws.uniform()
    out *= np.float32(high - low)
    out += np.float32(low)
    return out


@initializer
def normal(draws: Draws, shape: tuple[int, ...], mean: float = 0.0, std: float = 1.0) -> Array:
    out = draws.normal()
    if std != 1.0:
        out *= np.float32(std)
    if mean:
        out += np.float32(mean)
    return out


@initializer
def trunc_normal(
    draws: Draws, shape: tuple[int, ...], mean: float = 0.0, std: float = 1.0, low: float = -2.0, high: float = 2.0
) -> Array:
    """Return normal numbers between ``low`` and ``high`` standard deviations, by rejection."""
    # Few numbers fall into a narrow range, so that rejection would draw for long.
    if high - low < 0.1:
        raise ModelError(f"trunc_normal: the range {low} to {high} is too narrow", hint="use uniform")
    out = draws.normal()
    bad = np.flatnonzero((out < low) | (out > high))
    while bad.size:
        draws = draws.next()
        out[bad] = draws.normal_at(bad)
        bad = bad[(out[bad] < low) | (out[bad] > high)]
    out *= np.float32(std)
    out += np.float32(mean)
    return out


@initializer
def fan_in_uniform(draws: Draws, shape: tuple[int, ...], fan_in: int) -> Array:
    """Return uniform numbers in +-1 / sqrt(fan_in), torch's default for linear layers and convolutions."""
    bound = 1.0 / math.sqrt(fan_in) if fan_in else 0.0
    return uniform(draws, shape, -bound, bound)


@initializer
def xavier_uniform(draws: Draws, shape: tuple[int, ...], gain: float = 1.0) -> Array:
    bound = gain * math.sqrt(6.0 / sum(fans(shape)))
    return uniform(draws, shape, -bound, bound)


@initializer
def xavier_normal(draws: Draws, shape: tuple[int, ...], gain: float = 1.0) -> Array:
    return normal(draws, shape, 0.0, gain * math.sqrt(2.0 / sum(fans(shape))))


@initializer
def kaiming_uniform(draws: Draws, shape: tuple[int, ...], a: float = 0.0, mode: str = "fan_in") -> Array:
    bound = math.sqrt(6.0 / ((1 + a * a) * fans(shape)[mode == "fan_out"]))
    return uniform(draws, shape, -bound, bound)


@initializer
def kaiming_normal(draws: Draws, shape: tuple[int, ...], a: float = 0.0, mode: str = "fan_in") -> Array:
    return normal(draws, shape, 0.0, math.sqrt(2.0 / ((1 + a * a) * fans(shape)[mode == "fan_out"])))


@initializer
def lecun_normal(draws: Draws, shape: tuple[int, ...]) -> Array:
    return normal(draws, shape, 0.0, math.sqrt(1.0 / fans(shape)[0]))


@initializer
def orthogonal(draws: Draws, shape: tuple[int, ...], gain: float = 1.0) -> Array:
    """Return orthonormal rows or columns of the matrix [first axis, all reduced], which is drawn completely."""
    if len(shape) < 2:
        raise ModelError("orthogonal needs at least two axes", facts=[f"shape {list(shape)}"])
    rows, columns = shape[0], math.prod(shape[1:])
    flat = draws.complete().normal().astype(np.float64).reshape(max(rows, columns), min(rows, columns))
    q, r = np.linalg.qr(flat)
    # The signs of a QR decomposition are the choice of LAPACK; with a positive diagonal, all
    # orthogonal matrices are equally likely.
    q = q * np.sign(np.diagonal(r))
    matrix: Array = gain * (q if rows >= columns else q.T)
    return draws.cut(matrix)


@initializer
def identity(draws: Draws, shape: tuple[int, ...], gain: float = 1.0) -> Array:
    if len(shape) != 2:
        raise ModelError("identity needs two axes", facts=[f"shape {list(shape)}"])
    diagonal: Array = gain * np.equal.outer(*draws.ranges)
    return diagonal


@initializer
def key(draws: Draws, shape: tuple[int, ...]) -> Array:
    """Return a random key, for the state ``rng``."""
    return draws.cut(draws.key)


@initializer
def norms(draws: Draws, shape: tuple[int, ...], parameter: str, sizes: list[int], init: str, axis: int = 0) -> Array:
    """Return the norms along an axis of the initial values of another parameter, of which a slice is drawn at once."""
    type = TensorType(float32, tuple(sizes))
    if not sizes:
        return norms_of(initial(parameter, type, init, draws.seed), axis)
    rows = draws.ranges[axis]
    step = max(1, SLICE * sizes[axis] // max(1, math.prod(sizes)))
    starts = range(rows.start, rows.stop, step) or [rows.start]
    slices = [slice(start, min(start + step, rows.stop)) for start in starts]
    indices = [tuple(s if k == axis else slice(None) for k in range(len(sizes))) for s in slices]
    return np.concatenate([norms_of(initial(parameter, type, init, draws.seed, i), axis) for i in indices], axis)


def norms_of(array: Array, axis: int) -> Array:
    """Return the Euclidean norms of the slices at each index of ``axis``."""
    reduced = tuple(k for k in range(array.ndim) if k != axis)
    return np.asarray(np.sqrt(np.sum(np.square(array, dtype=np.float64), axis=reduced, keepdims=True)))
