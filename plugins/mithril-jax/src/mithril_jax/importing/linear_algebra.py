"""JAX's primitives of linear algebra, and the gamma function."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np

from mithril import ops
from mithril.graph import UnsupportedError
from mithril_jax.importing.table import cast, kind_of, row


def _swapped(x: Any) -> Any:
    rank = len(x.shape)
    return ops.transpose(x, perm=(*range(rank - 2), rank - 1, rank - 2))


@row("cholesky")
def cholesky(x: Any, **_: Any) -> Any:
    return ops.cholesky(_symmetric(x, lower=True))


def _symmetric(x: Any, lower: bool) -> Any:
    """Return the symmetric matrix of one triangle, the only one that is read."""
    triangle = ops.tril(x) if lower else ops.triu(x)
    other = ops.tril(x, k=-1) if lower else ops.triu(x, k=1)
    return triangle + _swapped(other)


@row("triangular_solve")
def triangular_solve(
    a: Any, b: Any, left_side: bool, lower: bool, transpose_a: bool, conjugate_a: bool, unit_diagonal: bool
) -> Any:
    """Solve a x = b, or x a = b from the right side, which is the transposed equation."""
    del conjugate_a  # of real numbers
    if left_side:
        return ops.triangular_solve(a, b, lower=lower, transposed=transpose_a, unit_diagonal=unit_diagonal)
    settings = {"lower": lower, "transposed": not transpose_a, "unit_diagonal": unit_diagonal}
    return _swapped(ops.triangular_solve(a, _swapped(b), **settings))


@row("qr")
def qr(x: Any, full_matrices: bool, pivoting: bool = False, **_: Any) -> Any:
    """Return q and r; the diagonal of r is not negative, so that signs can differ from those of JAX."""
    rows, columns = x.shape[-2:]
    if pivoting or (full_matrices and rows != columns):
        raise UnsupportedError("qr with pivoting or full_matrices is not supported", hint="use mode='reduced'")
    return ops.qr(x)


@row("eigh")
def eigh(x: Any, lower: bool = True, subset_by_index: Any = None, **_: Any) -> Any:
    """Return eigenvectors and eigenvalues."""
    if subset_by_index is not None:
        raise UnsupportedError("eigh with subset_by_index is not supported", hint="compute all, and take a slice")
    values, vectors = ops.eigh(_symmetric(x, lower))
    return vectors, values


@row("svd")
def svd(x: Any, full_matrices: bool, compute_uv: bool, subset_by_index: Any = None, **_: Any) -> Any:
    """Return singular values, and vectors unless only values are requested."""
    rows, columns = x.shape[-2:]
    if subset_by_index is not None or (compute_uv and full_matrices and rows != columns):
        raise UnsupportedError("svd with full_matrices or a subset is not supported", hint="full_matrices=False")
    u, s, vh = ops.svd(x)
    return (s, u, vh) if compute_uv else (s,)


# -- the gamma function -------------------------------------------------------------------------------------------
SHIFT = 6
STIRLING = (1 / 12, -1 / 360, 1 / 1260, -1 / 1680)
EULER = (1 / 12, -1 / 120, 1 / 252, -1 / 240)


def _in_32_bits(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a function that computes floats of 16 bits in 32: its terms cancel."""

    @wraps(function)
    def computed(x: Any) -> Any:
        return cast(function(cast(x, np.float32)), kind_of(x)) if kind_of(x) in ("float16", "bfloat16") else function(x)

    return computed


@row("lgamma")
@_in_32_bits
def lgamma(x: Any) -> Any:
    """Return the logarithm of the size of the gamma function, by Stirling's series and reflection."""
    negative = ops.less(x, 0.5)
    z = ops.where(negative, 1.0 - x, x)
    product, w = z, z + float(SHIFT)
    for k in range(1, SHIFT):
        product = product * (z + float(k))
    inverse = ops.reciprocal(w)
    series = _polynomial(ops.square(inverse), STIRLING) * inverse
    positive = (w - 0.5) * ops.log(w) - w + 0.5 * math.log(2 * math.pi) + series - ops.log(product)
    fraction = x - ops.floor(x)
    reflected = math.log(math.pi) - ops.log(ops.sin(fraction * math.pi)) - positive
    return ops.where(negative, ops.where(ops.equal(fraction, 0.0), float("inf"), reflected), positive)


@row("digamma")
@_in_32_bits
def digamma(x: Any) -> Any:
    """Return the derivative of ``lgamma``."""
    negative = ops.less(x, 0.5)
    z = ops.where(negative, 1.0 - x, x)
    total, w = ops.reciprocal(z), z + float(SHIFT)
    for k in range(1, SHIFT):
        total = total + ops.reciprocal(z + float(k))
    inverse = ops.reciprocal(w)
    square = ops.square(inverse)
    positive = ops.log(w) - 0.5 * inverse - _polynomial(square, EULER) * square - total
    fraction = x - ops.floor(x)
    reflected = positive - math.pi * ops.cos(fraction * math.pi) / ops.sin(fraction * math.pi)
    return ops.where(negative, ops.where(ops.equal(fraction, 0.0), float("nan"), reflected), positive)


def _polynomial(x: Any, coefficients: Any) -> Any:
    result: Any = coefficients[-1]
    for c in reversed(coefficients[:-1]):
        result = result * x + c
    return result
