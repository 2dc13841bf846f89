"""Products of arrays, and the extension ``linalg``.

Factorizations of complex matrices, full factors of matrices that are not square, and empty matrices are computed by
NumPy on the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from mithril import ops
from mithril.graph import DTypeError, InputError, ShapeError, normalize_axis, shape_text
from mithril_array import complex_numbers as pairs
from mithril_array.array import Array, as_array, call, moved, on_host
from mithril_array.complex_numbers import Pair
from mithril_array.dtypes import joined, limits, part_of
from mithril_array.elementwise import FUNCTIONS as ELEMENTWISE, NUMBERS, astype, broadcast, cast
from mithril_array.manipulation import expand_dims, matrix_transpose, reshape
from mithril_array.statistics import max as maximum, min as minimum, sum as total

conj, multiply, absolute = ELEMENTWISE["conj"], ELEMENTWISE["multiply"], ELEMENTWISE["abs"]
_guarded = np.linalg.LinAlgError


# -- products --------------------------------------------------------------------------------------------------------
def _numbers(name: str, *arrays: Array) -> tuple[Array, ...]:
    for k, x in enumerate(arrays):
        if as_array(x, f"x{k + 1}").dtype.kind not in NUMBERS:
            raise DTypeError(f"{name} is not defined for {x.dtype}", hint="convert the operand: xp.astype(x, ...)")
    return arrays


def _matmul(a: Any, b: Any) -> Any:
    dtype = joined(a.dtype, b.dtype)
    a, b = cast(a, dtype), cast(b, dtype)
    return pairs.matmul(a, b) if isinstance(a, Pair) else ops.matmul(a, b)


def matmul(x1: Array, x2: Array, /) -> Array:
    a, b = _numbers("matmul", x1, x2)
    if not a.ndim or not b.ndim:
        raise _NoAxes(f"a product of shapes {shape_text(a.shape)} and {shape_text(b.shape)}", hint="x1 * x2")
    rows = b.shape[-2] if b.ndim > 1 else b.shape[0]
    if a.shape[-1] != rows:
        raise _NoAxes(
            f"a product of shapes {shape_text(a.shape)} and {shape_text(b.shape)}",
            facts=[f"columns of the first: {a.shape[-1]}, rows of the second: {rows}"],
            hint="xp.matrix_transpose(x2)",
        )
    return call(_matmul, a, b)  # type: ignore[no-any-return]


class _NoAxes(ShapeError, ValueError):
    """The axes of the operands of a product differ."""


def _dot(a: Any, b: Any, *, first: tuple[int, ...], second: tuple[int, ...]) -> Any:
    dtype = joined(a.dtype, b.dtype)
    a, b = cast(a, dtype), cast(b, dtype)

    def dot(x: Any, y: Any) -> Any:
        return ops.dot(x, y, contract_a=first, contract_b=second)

    if isinstance(a, Pair):
        return Pair(dot(a.re, b.re) - dot(a.im, b.im), dot(a.re, b.im) + dot(a.im, b.re))
    return dot(a, b)


def tensordot(x1: Array, x2: Array, /, *, axes: int | tuple[Sequence[int], Sequence[int]] = 2) -> Array:
    a, b = _numbers("tensordot", x1, x2)
    if isinstance(axes, int):
        first, second = tuple(range(a.ndim - axes, a.ndim)), tuple(range(axes))
    else:
        first = tuple(normalize_axis(k, a.ndim) for k in axes[0])
        second = tuple(normalize_axis(k, b.ndim) for k in axes[1])
    if [a.shape[k] for k in first] != [b.shape[k] for k in second]:
        raise _NoAxes(
            f"axes {list(first)} of {shape_text(a.shape)} and {list(second)} of {shape_text(b.shape)} differ in size"
        )
    return call(_dot, a, b, first=first, second=second)  # type: ignore[no-any-return]


def vecdot(x1: Array, x2: Array, /, *, axis: int = -1) -> Array:
    """Return the sum of conj(x1) * x2 along an axis."""
    a, b = _numbers("vecdot", x1, x2)
    if axis >= 0 or -axis > min(a.ndim, b.ndim):
        raise ShapeError(f"the axis of vecdot counts from the end, got {axis}", hint="axis=-1")
    if a.shape[axis] != b.shape[axis]:
        raise _NoAxes(f"axis {axis} of {shape_text(a.shape)} and of {shape_text(b.shape)} differ in size")
    dtype = joined(a.dtype, b.dtype)
    return total(multiply(conj(a), b), axis=axis, dtype=dtype)


# -- parts of matrices -----------------------------------------------------------------------------------------------
def _matrix(x: Array, square: bool = False) -> Array:
    x = as_array(x)
    if x.ndim < 2 or (square and x.shape[-1] != x.shape[-2]):
        kind = "square matrices" if square else "matrices"
        raise ShapeError(f"expected {kind}, got shape {shape_text(x.shape)}", hint="xp.expand_dims(x, axis=-1)")
    return x


def _floats(x: Array, square: bool = False) -> Array:
    x = _matrix(x, square)
    if x.dtype.kind not in ("float", "complex"):
        raise DTypeError(f"the function is not defined for {x.dtype}", hint="xp.astype(x, xp.float64)")
    return x


def _diagonal(x: Any, *, offset: int) -> Any:
    *lead, n, m = x.shape
    count = max(min(n, m - offset) if offset >= 0 else min(n + offset, m), 0)
    start = offset if offset >= 0 else -offset * m
    flat = ops.reshape(x, shape=(*lead, n * m))
    if not count:
        return flat[..., :0]
    return flat[..., start : start + (count - 1) * (m + 1) + 1 : m + 1]


def diagonal(x: Array, /, *, offset: int = 0) -> Array:
    return moved(_diagonal, _matrix(x), offset=offset)


def trace(x: Array, /, *, offset: int = 0, dtype: Any = None) -> Array:
    return total(diagonal(x, offset=offset), axis=-1, dtype=dtype)


def outer(x1: Array, x2: Array, /) -> Array:
    a, b = _numbers("outer", x1, x2)
    if a.ndim != 1 or b.ndim != 1:
        raise ShapeError(f"outer is of vectors, got shapes {shape_text(a.shape)} and {shape_text(b.shape)}")
    return multiply(expand_dims(a, axis=1), b)  # type: ignore[no-any-return]


def cross(x1: Array, x2: Array, /, *, axis: int = -1) -> Array:
    a, b = _numbers("cross", x1, x2)
    shape = broadcast(a.shape, b.shape)
    k = normalize_axis(axis, len(shape)) - len(shape)
    if a.shape[k] != 3 or b.shape[k] != 3:
        raise ShapeError(f"cross products have 3 elements, got {shape_text(a.shape)} and {shape_text(b.shape)}")

    def turned(x: Array, order: tuple[int, ...]) -> Array:
        index = x._xp.asarray(order)
        return x[(..., index, *[slice(None)] * (-k - 1))]

    subtract = ELEMENTWISE["subtract"]
    first = multiply(turned(a, (1, 2, 0)), turned(b, (2, 0, 1)))
    return subtract(first, multiply(turned(a, (2, 0, 1)), turned(b, (1, 2, 0))))  # type: ignore[no-any-return]


# -- factorizations --------------------------------------------------------------------------------------------------
def _factored(kernel: Callable[..., Any], host: Callable[..., Any], *arrays: Array) -> Any:
    """Run an operation; complex and empty matrices are computed by NumPy, where a failure gives nan."""
    if all(x.dtype.kind == "float" and x.size for x in arrays):
        return call(kernel, *arrays)

    def run(*operands: Any) -> Any:
        try:
            return host(*operands)
        except _guarded:
            results = host(*(np.broadcast_to(np.eye(*x.shape[-2:], dtype=x.dtype), x.shape) for x in operands))
            if isinstance(results, tuple):
                return tuple(np.full_like(r, np.nan) for r in results)
            return np.full_like(results, np.nan)

    return on_host(run, *arrays)


class Eigh(NamedTuple):
    """Eigenvalues and eigenvectors."""

    eigenvalues: Array
    eigenvectors: Array


class QR(NamedTuple):
    """An orthonormal and a triangular factor."""

    Q: Array
    R: Array


class Slogdet(NamedTuple):
    """The sign of a determinant, and the logarithm of its magnitude."""

    sign: Array
    logabsdet: Array


class SVD(NamedTuple):
    """Left vectors, singular values, right vectors."""

    U: Array
    S: Array
    Vh: Array


def _cholesky(x: Any) -> Any:
    return ops.cholesky(x)


def cholesky(x: Array, /, *, upper: bool = False) -> Array:
    y: Array = _factored(_cholesky, np.linalg.cholesky, _floats(x, square=True))
    return conj(matrix_transpose(y)) if upper else y


def _det(x: Any) -> Any:
    return ops.det(x)


def det(x: Array, /) -> Array:
    return _factored(_det, np.linalg.det, _floats(x, square=True))  # type: ignore[no-any-return]


def _slogdet(x: Any) -> Any:
    return tuple(ops.slogdet(x))


def slogdet(x: Array, /) -> Slogdet:
    return Slogdet(*_factored(_slogdet, lambda a: tuple(np.linalg.slogdet(a)), _floats(x, square=True)))


def _eigh(x: Any) -> Any:
    return tuple(ops.eigh(x))


def eigh(x: Array, /) -> Eigh:
    return Eigh(*_factored(_eigh, lambda a: tuple(np.linalg.eigh(a)), _floats(x, square=True)))


def eigvalsh(x: Array, /) -> Array:
    return eigh(x).eigenvalues


def _inv(x: Any) -> Any:
    return ops.inv(x)


def inv(x: Array, /) -> Array:
    return _factored(_inv, np.linalg.inv, _floats(x, square=True))  # type: ignore[no-any-return]


def _qr(x: Any) -> Any:
    return tuple(ops.qr(x))


def qr(x: Array, /, *, mode: str = "reduced") -> QR:
    x = _floats(x)
    if mode not in ("reduced", "complete"):
        raise InputError(f"mode cannot be {mode!r}", facts=["accepted: 'reduced', 'complete'"])
    if mode == "complete" and x.shape[-2] > x.shape[-1]:
        return QR(*on_host(lambda a: tuple(np.linalg.qr(a, "complete")), x))
    return QR(*_factored(_qr, lambda a: tuple(np.linalg.qr(a)), x))


def _solve(a: Any, b: Any) -> Any:
    return ops.solve(a, b)


def solve(x1: Array, x2: Array, /) -> Array:
    a, b = _floats(x1, square=True), as_array(x2, "x2")
    dtype = joined(a.dtype, b.dtype)
    a, b = astype(a, dtype, copy=False), astype(b, dtype, copy=False)
    is_vector = b.ndim == 1
    b = expand_dims(b, axis=1) if is_vector else b
    if b.shape[-2] != a.shape[-1]:
        raise _NoAxes(f"matrices {shape_text(a.shape)} have no right-hand side of shape {shape_text(x2.shape)}")
    lead = broadcast(a.shape[:-2], b.shape[:-2])
    a, b = (_spread(x, (*lead, *x.shape[-2:])) for x in (a, b))
    y: Array = _factored(_solve, np.linalg.solve, a, b)
    return reshape(y, y.shape[:-1]) if is_vector else y


def _spread(x: Array, shape: tuple[int, ...]) -> Array:
    return x if x.shape == shape else x._xp.broadcast_to(x, shape)


def _svd(x: Any) -> Any:
    return tuple(ops.svd(x))


def svd(x: Array, /, *, full_matrices: bool = True) -> SVD:
    x = _floats(x)
    if full_matrices and x.shape[-1] != x.shape[-2]:
        return SVD(*on_host(lambda a: tuple(np.linalg.svd(a)), x))
    return SVD(*_factored(_svd, lambda a: tuple(np.linalg.svd(a, full_matrices=False)), x))


def svdvals(x: Array, /) -> Array:
    return svd(x, full_matrices=False).S


def _cutoff(x: Array, rtol: Any) -> Any:
    """Return the share of the largest singular value below which values count as zero, for each matrix."""
    if rtol is None:
        return max(x.shape[-2:]) * float(limits(part_of(x.dtype)).eps)
    return expand_dims(rtol, axis=-1) if isinstance(rtol, Array) and rtol.ndim else rtol


def pinv(x: Array, /, *, rtol: Any = None) -> Array:
    x = _floats(x)
    u, s, vh = svd(x, full_matrices=False)
    if not s.shape[-1]:
        return x._xp.zeros((*x.shape[:-2], x.shape[-1], x.shape[-2]), dtype=x.dtype)  # type: ignore[no-any-return]
    used = s > maximum(s, axis=-1, keepdims=True) * _cutoff(x, rtol)
    inverse = ELEMENTWISE["where"](used, 1.0 / ELEMENTWISE["where"](used, s, 1.0), 0.0)
    left = multiply(conj(matrix_transpose(vh)), astype(expand_dims(inverse, axis=-2), x.dtype))
    return matmul(left, conj(matrix_transpose(u)))


def matrix_rank(x: Array, /, *, rtol: Any = None) -> Array:
    x = _floats(x)
    s = svdvals(x)
    if not s.shape[-1]:
        return x._xp.zeros(x.shape[:-2], dtype=x._xp.default_int)  # type: ignore[no-any-return]
    used = s > maximum(s, axis=-1, keepdims=True) * _cutoff(x, rtol)
    return total(astype(used, x._xp.default_int), axis=-1)


def matrix_power(x: Array, n: int, /) -> Array:
    x = _matrix(x, square=True)
    if n < 0:
        x, n = inv(x), -n
    y = _spread(x._xp.eye(x.shape[-1], dtype=x.dtype), x.shape)
    while n:
        if n & 1:
            y = matmul(y, x)
        n >>= 1
        x = matmul(x, x) if n else x
    return y


# -- norms -----------------------------------------------------------------------------------------------------------
def matrix_norm(x: Array, /, *, keepdims: bool = False, ord: Any = "fro") -> Array:
    x = _floats(x)
    if ord == "fro":
        return vector_norm(x, axis=(-2, -1), keepdims=keepdims)
    if ord in (1, -1, math.inf, -math.inf):
        axis = -2 if abs(ord) == 1 else -1
        y = total(absolute(x), axis=axis, keepdims=True)
        return _extreme(ord)(y, axis=(-2, -1), keepdims=keepdims)
    if ord in (2, -2, "nuc"):
        s = svdvals(x)
        y = total(s, axis=-1) if ord == "nuc" else _extreme(ord)(s, axis=-1)
        return expand_dims(y, axis=(-2, -1)) if keepdims else y
    raise InputError(
        f"a matrix has no norm of order {ord!r}", facts=["accepted: 'fro', 'nuc', 1, -1, 2, -2, inf, -inf"]
    )


def _extreme(ord: float) -> Callable[..., Array]:
    return maximum if ord > 0 else minimum


def vector_norm(
    x: Array, /, *, axis: int | Sequence[int] | None = None, keepdims: bool = False, ord: float = 2
) -> Array:
    x = as_array(x)
    if x.dtype.kind not in ("float", "complex"):
        raise DTypeError(f"vector_norm is not defined for {x.dtype}", hint="xp.astype(x, xp.float64)")
    size = absolute(x)
    reduced: Any = {"axis": axis, "keepdims": keepdims}
    if ord in (math.inf, -math.inf):
        return _extreme(ord)(size, **reduced)
    if ord == 0:
        return total(astype(size != 0, size.dtype), **reduced)
    if ord == 1:
        return total(size, **reduced)
    if ord == 2:
        return call(_norm, size, axis=tuple(range(x.ndim)) if axis is None else axis, keepdims=keepdims)  # type: ignore[no-any-return]
    return ELEMENTWISE["pow"](total(ELEMENTWISE["pow"](size, float(ord)), **reduced), 1.0 / ord)  # type: ignore[no-any-return]


def _norm(size: Any, *, axis: Any, keepdims: bool) -> Any:
    return ops.sqrt(ops.sum(size * size, axis=axis, keepdims=keepdims))


FUNCTIONS: dict[str, Callable[..., Any]] = {f.__name__: f for f in (matmul, matrix_transpose, tensordot, vecdot)}
LINALG: dict[str, Callable[..., Any]] = FUNCTIONS | {
    f.__name__: f
    for f in (
        *(cholesky, cross, det, diagonal, eigh, eigvalsh, inv, matrix_norm, matrix_power, matrix_rank, outer, pinv),
        *(qr, slogdet, solve, svd, svdvals, trace, vector_norm),
    )
}
