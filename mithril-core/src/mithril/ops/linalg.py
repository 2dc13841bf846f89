"""Linear algebra of matrices [..., n, m]: factorizations, solutions of linear systems, determinants.

Factors are unique: triangular factors have non-negative diagonals, and the first large element of each eigenvector and
of each left singular vector is positive. 16-bit floats are computed in float32. A matrix without the factorization or
the solution gives nan, never an exception.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from mithril.graph import (
    Shape,
    ShapeError,
    Size,
    TensorType,
    at_most,
    composite,
    exactly,
    expect_equal,
    floating,
    minimum as smaller_size,
    op,
    operation,
    product,
    sample,
    shape_text,
)
from mithril.ops.basic import downcast, to_float32, upcast
from mithril.ops.creation import eye, full, tril
from mithril.ops.elementwise import exp, where
from mithril.ops.products import matmul
from mithril.ops.reduction import max
from mithril.ops.shape import broadcast_to, concat, transpose, unsqueeze
from mithril.ops.slicing import narrow

Array = np.ndarray[Any, Any]
LARGE = 0.618  # of the largest magnitude; no simple ratio such as 1/2, so that rounding does not decide signs

POSITIVE_DEFINITE = exactly(*(4.0, 1.0, 0.5, 1.0, 3.0, -0.5, 0.5, -0.5, 2.0), shape=(3, 3))
TWO_POSITIVE_DEFINITE = exactly(*(2.0, 0.5, 0.5, 1.0), *(3.0, -1.0, -1.0, 4.0), shape=(2, 2, 2))
REGULAR = exactly(*(1.0, 2.0, -1.0, 0.5, -3.0, 1.5, 2.0, 0.25, 4.0), shape=(3, 3))
TWO_REGULAR = exactly(*(1.0, 2.0, -1.5, 0.5), *(0.25, -2.0, 3.0, 1.0), shape=(2, 2, 2))
TALL = exactly(*(1.0, 2.0, -1.0, 0.5, 3.0, 1.5, 0.25, -2.0), shape=(4, 2))
WIDE = exactly(*(1.0, 2.0, -1.0, 0.5, 3.0, 1.5, 0.25, -2.0), shape=(2, 4))


# -- rules --------------------------------------------------------------------------------------------------------
def _matrix(x: Shape) -> tuple[Size, Size]:
    if len(x) < 2:
        raise ShapeError(f"a matrix has at least two axes, got shape {shape_text(x)}")
    return x[-2], x[-1]


def _square(x: Shape, **_: Any) -> Shape:
    n, m = _matrix(x)
    expect_equal("rows and columns of a square matrix", n, m)
    return x


def _solution(a: Shape, b: Shape, **_: Any) -> Shape:
    _square(a)
    if len(a) != len(b):
        raise ShapeError(
            f"both operands must have the same rank, got {shape_text(a)} and {shape_text(b)}",
            hint="a vector is a matrix of one column: unsqueeze(b, axis=(-1,))",
        )
    for k, (m, n) in enumerate(zip(a[:-1], b[:-1], strict=True)):
        expect_equal(f"axis {k} of the matrix and of the right-hand side", m, n)
    return b


def _least(x: Shape) -> Size:
    n, m = _matrix(x)
    if at_most(n, m):
        return n
    if at_most(m, n):
        return m
    raise ShapeError(f"the smaller of {n} and {m} is unknown", hint="give one of the sizes: shapes=... when compiling")


def _cubic(count: float) -> Callable[..., Size]:
    """Return a cost rule: ``count`` n m min(n, m) operations per matrix."""

    def flops(types: Sequence[Any], results: Sequence[TensorType], attributes: Mapping[str, Any]) -> Size:
        shape = types[0].shape
        smaller = shape[-1] if at_most(shape[-1], shape[-2]) else shape[-2]
        return product(shape) * smaller * count

    return flops


# -- references ---------------------------------------------------------------------------------------------------
def _guarded(function: Callable[..., Any], *operands: Array) -> Any:
    """Apply a function of numpy.linalg to stacked matrices; matrices for which it raises give nan."""
    try:
        return function(*operands)
    except np.linalg.LinAlgError:
        if operands[0].ndim > 2:
            # NumPy raises for the whole stack if one matrix fails, so that the stack is computed matrix
            # by matrix.
            rows = [_guarded(function, *parts) for parts in zip(*operands, strict=True)]
            return tuple(map(np.stack, zip(*rows, strict=True))) if isinstance(rows[0], tuple) else np.stack(rows)
        results = function(*(np.eye(*x.shape, dtype=x.dtype) for x in operands))
        if isinstance(results, tuple):
            return tuple(np.full_like(r, np.nan) for r in results)
        return np.full_like(results, np.nan)


def _symmetric(x: Array) -> Array:
    z = to_float32(x)
    return (z + np.swapaxes(z, -1, -2)) / 2


def _signs(vectors: Array) -> Array:
    """Return for each column the sign of its first large element, as a row."""
    magnitude = np.abs(vectors)
    # Vectors are unique up to their sign, which libraries choose freely. The first element that is
    # large in itself decides, since the sign of a tiny one is a matter of rounding.
    large = magnitude >= LARGE * magnitude.max(axis=-2, keepdims=True)
    first = np.argmax(large, axis=-2, keepdims=True)
    return np.where(np.take_along_axis(vectors, first, axis=-2) < 0, -1, 1).astype(vectors.dtype)


def _flip(x: Any) -> Any:
    """Transpose the last two axes."""
    rank = len(x.shape)
    return transpose(x, perm=(*range(rank - 2), rank - 1, rank - 2))


def _identity(x: Any) -> Any:
    return broadcast_to(eye(n=x.shape[-1], dtype=x.dtype), shape=tuple(x.shape))


# -- triangular matrices ------------------------------------------------------------------------------------------
@op(
    shape=_square,
    dtype=floating,
    flops=_cubic(1 / 3),
    tolerance=8.0,
    samples=[
        sample(POSITIVE_DEFINITE, dtypes=False),
        sample(TWO_POSITIVE_DEFINITE, label="batch", dtypes=False),
        sample(exactly(1.0, 2.0, 2.0, 1.0, shape=(2, 2)), label="indefinite", gradient=False, dtypes=False),
    ],
    axes="*b n m -> *b n m | n m whole",
    precision="full",
)
def cholesky(x):
    """The lower triangular factor of (x + x^T) / 2 = L L^T, with a positive diagonal; nan if there is none."""
    return np.tril(_guarded(np.linalg.cholesky, _symmetric(x)))


@cholesky.vjp
def _(g, y, x):
    factor = upcast(y)
    inner = tril(matmul(_flip(factor), upcast(g)))
    inner = inner - 0.5 * inner * _identity(inner)  # halves the diagonal
    left = triangular_solve(factor, inner, transposed=True)
    full = _flip(triangular_solve(factor, _flip(left), transposed=True))
    return (downcast((full + _flip(full)) * 0.5, x),)


@op(
    shape=_solution,
    dtype=floating,
    promotes="same",
    flops=_cubic(1),
    tolerance=8.0,
    samples=[
        sample(REGULAR, (3, 2), dtypes=False),
        sample(REGULAR, (3, 2), lower=False, label="upper", dtypes=False),
        sample(TWO_REGULAR, (2, 2, 3), transposed=True, label="transposed batch", dtypes=False),
        sample(REGULAR, (3, 1), lower=False, unit_diagonal=True, transposed=True, label="unit", dtypes=False),
    ],
    axes="*b n m, *b n k -> *b n k | n m whole",
    precision="full",
)
def triangular_solve(a, b, *, lower: bool = True, transposed: bool = False, unit_diagonal: bool = False):
    """The solution x of a x = b, or a^T x = b if ``transposed``; only the lower (or upper) triangle of a is read."""
    factor = np.tril(to_float32(a)) if lower else np.triu(to_float32(a))
    factor = np.swapaxes(factor, -1, -2) if transposed else factor
    x = np.array(to_float32(b))
    n = a.shape[-1]
    forward = lower != transposed
    for i in range(n) if forward else reversed(range(n)):
        solved = slice(0, i) if forward else slice(i + 1, n)
        x[..., i, :] -= (factor[..., i : i + 1, solved] @ x[..., solved, :])[..., 0, :]
        if not unit_diagonal:
            x[..., i, :] /= factor[..., i, i, None]
    return x


@triangular_solve.vjp
def _(g, y, a, b, *, lower, transposed, unit_diagonal):
    gb = triangular_solve(a, g, lower=lower, transposed=not transposed, unit_diagonal=unit_diagonal)
    full = -matmul(y, _flip(gb)) if transposed else -matmul(gb, _flip(y))
    ga = tril(full, k=-1 if unit_diagonal else 0) if lower else _flip(tril(_flip(full), k=-1 if unit_diagonal else 0))
    return ga, gb


# -- general systems ----------------------------------------------------------------------------------------------
@op(
    shape=_solution,
    dtype=floating,
    promotes="same",
    flops=_cubic(2 / 3),
    tolerance=8.0,
    samples=[sample(REGULAR, (3, 2), dtypes=False), sample(TWO_REGULAR, (2, 2, 3), label="batch", dtypes=False)],
    axes="*b n m, *b n k -> *b n k | n m whole",
    precision="full",
)
def solve(a, b):
    """The solution x of a x = b for square matrices a; b is a matrix [..., n, k]."""
    return _guarded(np.linalg.solve, to_float32(a), to_float32(b))


@solve.vjp
def _(g, y, a, b):
    gb = solve(_flip(a), g)
    return -matmul(gb, _flip(y)), gb


@composite(
    samples=[sample(REGULAR, dtypes=False), sample(TWO_REGULAR, label="batch", dtypes=False)],
    tolerance=8.0,
    precision="full",
)
def inv(x):
    """The inverse of square matrices."""
    return solve(x, _identity(x))


@op(
    shape=lambda x: (_square(x)[:-2], x[:-2]),
    dtype=floating,
    results=("sign", "logabs"),
    flops=_cubic(2 / 3),
    tolerance=8.0,
    samples=[
        sample(REGULAR, dtypes=False),
        sample(TWO_REGULAR, label="batch", dtypes=False),
        sample(exactly(1.0, 2.0, 2.0, 4.0, shape=(2, 2)), label="singular", gradient=False, dtypes=False),
    ],
    axes="*b n m -> *b, *b | n m whole",
    precision="full",
)
def slogdet(x):
    """Sign and logarithm of the magnitude of the determinant: 0 and -inf for a singular matrix."""
    sign, logabs = np.linalg.slogdet(to_float32(x))
    return sign, logabs


@slogdet.vjp
def _(g, y, x):
    slope = unsqueeze(upcast(g[1]), axis=(-1, -2))
    return (downcast(_flip(inv(upcast(x))) * slope, x),)


@composite(samples=[sample(REGULAR, dtypes=False), sample(TWO_REGULAR, label="batch", dtypes=False)], tolerance=16.0)
def det(x):
    """The determinant of square matrices."""
    sign, logabs = slogdet(upcast(x))
    return downcast(sign * exp(logabs), x)


# -- orthogonal factors -------------------------------------------------------------------------------------------
@op(
    shape=lambda x: ((*x[:-1], _least(x)), (*x[:-2], _least(x), x[-1])),
    dtype=floating,
    results=("q", "r"),
    flops=_cubic(4),
    tolerance=8.0,
    samples=[
        sample(REGULAR, dtypes=False),
        sample(TALL, label="tall", dtypes=False),
        sample(WIDE, label="wide", dtypes=False),
        sample(TWO_REGULAR, label="batch", dtypes=False),
    ],
    axes="*b n m -> *b n k, *b k m | n m k whole",
    precision="full",
)
def qr(x):
    """Orthonormal columns q and an upper triangular r with a non-negative diagonal: x = q r."""
    q, r = np.linalg.qr(to_float32(x))
    diagonal = np.diagonal(r, axis1=-2, axis2=-1)
    # LAPACK leaves the signs of the diagonal open; a non-negative one makes the factors unique.
    signs = np.where(diagonal < 0, -1, 1).astype(r.dtype)
    return q * signs[..., None, :], r * signs[..., :, None]


@qr.vjp
def _(g, y, x):
    (gq, gr), (q, r) = ((upcast(v) for v in pair) for pair in (g, y))
    n, m = x.shape[-2:]
    if not at_most(m, n):  # the columns beyond the n-th depend on q only
        gr_rest = gr[..., n:]
        gq = gq + matmul(upcast(x)[..., n:], _flip(gr_rest))
        return (downcast(concat(_qr_gradient(gq, gr[..., :n], q, r[..., :n]), matmul(q, gr_rest), axis=-1), x),)
    return (downcast(_qr_gradient(gq, gr, q, r), x),)


def _qr_gradient(gq: Any, gr: Any, q: Any, r: Any) -> Any:
    inner = matmul(r, _flip(gr)) - matmul(_flip(gq), q)
    symmetric = tril(inner) + _flip(tril(inner, k=-1))
    return _flip(triangular_solve(r, _flip(gq + matmul(q, symmetric)), lower=False))


@op(
    shape=lambda x: (_square(x)[:-1], x),
    dtype=floating,
    results=("values", "vectors"),
    flops=_cubic(9),
    tolerance=16.0,
    samples=[sample(POSITIVE_DEFINITE, dtypes=False), sample(TWO_POSITIVE_DEFINITE, label="batch", dtypes=False)],
    axes="*b n m -> *b n, *b n m | n m whole",
    precision="full",
)
def eigh(x):
    """Eigenvalues in ascending order and eigenvectors (columns) of the symmetric matrices (x + x^T) / 2."""
    values, vectors = _guarded(np.linalg.eigh, _symmetric(x))
    return values, vectors * _signs(vectors)


@eigh.vjp
def _(g, y, x):
    (gw, gv), (w, v) = ((upcast(t) for t in pair) for pair in (g, y))
    gaps = unsqueeze(w, axis=(-2,)) - unsqueeze(w, axis=(-1,))
    inner = matmul(_flip(v), gv) * _reciprocal_off_diagonal(gaps) + unsqueeze(gw, axis=(-1,)) * _identity(v)
    full = matmul(matmul(v, inner), _flip(v))
    return (downcast((full + _flip(full)) * 0.5, x),)


def _reciprocal_off_diagonal(gaps: Any) -> Any:
    """Return 1 / gaps with a zero diagonal."""
    unit = _identity(gaps)
    # Equal eigenvalues stay infinite: there the vectors have no derivative.
    return (1.0 - unit) / (gaps + unit)


@op(
    shape=lambda x: ((*x[:-1], _least(x)), (*x[:-2], _least(x)), (*x[:-2], _least(x), x[-1])),
    dtype=floating,
    results=("u", "s", "vh"),
    flops=_cubic(20),
    tolerance=16.0,
    samples=[
        sample(REGULAR, dtypes=False),
        sample(TALL, label="tall", dtypes=False),
        sample(WIDE, label="wide", dtypes=False),
        sample(TWO_REGULAR, label="batch", dtypes=False),
    ],
    axes="*b n m -> *b n k, *b k, *b k m | n m k whole",
    precision="full",
)
def svd(x):
    """Singular values s in descending order with left vectors u (columns) and right vectors vh (rows)."""
    u, s, vh = _guarded(_thin_svd, to_float32(x))
    signs = _signs(u)
    return u * signs, s, vh * np.swapaxes(signs, -1, -2)


def _thin_svd(x: Array) -> tuple[Array, ...]:
    return tuple(np.linalg.svd(x, full_matrices=False))


@svd.vjp
def _(g, y, x):
    (gu, gs, gvh), (u, s, vh) = ((upcast(t) for t in pair) for pair in (g, y))
    row, column = unsqueeze(s, axis=(-2,)), unsqueeze(s, axis=(-1,))
    slopes = _reciprocal_off_diagonal((row - column) * (row + column))
    left, right = matmul(_flip(u), gu), matmul(vh, _flip(gvh))
    inner = slopes * (left - _flip(left)) * row + column * (slopes * (right - _flip(right)))
    inner = inner + unsqueeze(gs, axis=(-1,)) * _identity(inner)
    full = matmul(matmul(u, inner), vh)
    outer_left = (gu - matmul(u, left)) / row
    outer_right = (gvh - matmul(_flip(right), vh)) / column
    return (downcast(full + matmul(outer_left, vh) + matmul(u, outer_right), x),)


@composite(
    samples=[sample(TALL, dtypes=False), sample(WIDE, label="wide", dtypes=False)], tolerance=16.0, precision="full"
)
def pinv(x, *, rcond: float = 1e-6):
    """The pseudo-inverse; singular values below ``rcond`` times the largest count as zero."""
    u, s, vh = svd(upcast(x))
    used = s > max(s, axis=-1, keepdims=True) * rcond
    # The inner selection keeps the gradient of the unused side finite.
    inverse = where(used, 1.0 / where(used, s, 1.0), 0.0)
    return downcast(matmul(_flip(vh) * unsqueeze(inverse, axis=(-2,)), _flip(u)), x)


@composite(
    samples=[sample(TALL, (4, 2), dtypes=False), sample(WIDE, (2, 1), label="wide", dtypes=False)],
    tolerance=16.0,
    precision="full",
)
def lstsq(a, b, *, rcond: float = 1e-6):
    """The x of least norm that minimizes |a x - b|, by the pseudo-inverse of a."""
    return matmul(pinv(a, rcond=rcond), b)


# -- diagonals ----------------------------------------------------------------------------------------------------
@composite(
    samples=[
        sample((3,)),
        sample((3,), k=-1, label="below"),
        sample((3, 4), label="of a matrix"),
        sample((3, 4), k=2, label="above, of a matrix"),
    ]
)
def diag(x, *, k: int = 0):
    """A matrix with the vector x on diagonal ``k`` and zeros elsewhere, or diagonal ``k`` of the matrix x."""
    if x.ndim == 1:
        if k:
            rest = full(shape=(abs(k),), value=0, dtype=x.dtype)
            x = concat(x, rest, axis=0) if k > 0 else concat(rest, x, axis=0)
        return where(eye(n=x.shape[0], k=k, dtype="bool"), unsqueeze(x, axis=(1,)), 0)
    if x.ndim != 2:
        raise ShapeError(f"diag takes a vector or a matrix, got shape {shape_text(x.shape)}")
    n, m = x.shape
    below, above = (-k, 0) if k < 0 else (0, k)
    rows = operation("sum")(where(eye(n=n, m=m, k=k, dtype="bool"), x, 0), axis=1)
    if not k and n is m:  # also where the size is symbolic
        return rows
    return narrow(rows, 0, below, below + smaller_size(n - below, m - above))


@composite(samples=[sample((3, 3)), sample((2, 3, 4), label="batch")])
def trace(x):
    """The sum of the main diagonal of matrices [..., n, m]."""
    n, m = _matrix(x.shape)
    return operation("sum")(where(eye(n=n, m=m, dtype="bool"), x, 0), axis=(-2, -1))


@composite(samples=[sample((3,), (4,))])
def outer(x, y):
    """All products of the elements of two vectors, as a matrix."""
    if x.ndim != 1 or y.ndim != 1:
        raise ShapeError(f"outer takes two vectors, got shapes {shape_text(x.shape)} and {shape_text(y.shape)}")
    return unsqueeze(x, axis=(1,)) * unsqueeze(y, axis=(0,))


__all__ = [
    "cholesky",
    "det",
    "diag",
    "eigh",
    "inv",
    "lstsq",
    "outer",
    "pinv",
    "qr",
    "slogdet",
    "solve",
    "svd",
    "trace",
    "triangular_solve",
]
