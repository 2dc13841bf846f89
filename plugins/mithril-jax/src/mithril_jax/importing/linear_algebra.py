"""JAX's primitives of linear algebra, and special functions."""

from __future__ import annotations

from typing import Any

import numpy as np

from mithril import ops
from mithril.graph import UnsupportedError
from mithril_importing import factorizations
from mithril_jax.importing.table import row

_swapped = factorizations.swapped


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
    values, vectors = factorizations.eigh(_symmetric(x, lower))
    return vectors, values


@row("svd")
def svd(x: Any, full_matrices: bool, compute_uv: bool, subset_by_index: Any = None, **_: Any) -> Any:
    """Return singular values, and vectors unless only values are requested."""
    rows, columns = x.shape[-2:]
    if subset_by_index is not None or (compute_uv and full_matrices and rows != columns):
        raise UnsupportedError("svd with full_matrices or a subset is not supported", hint="full_matrices=False")
    u, s, vh = factorizations.svd(x)
    return (s, u, vh) if compute_uv else (s,)


@row("lu")
def lu(x: Any, **_: Any) -> Any:
    """Return both factors in one matrix, the exchanges of rows, and their order."""
    return factorizations.lu(x)


@row("lu_pivots_to_permutation")
def order_of_rows(pivots: Any, permutation_size: int) -> Any:
    return factorizations.order_of(pivots, permutation_size)


@row("geqrf")
def geqrf(x: Any) -> Any:
    return factorizations.householder_qr(x)


@row("householder_product")
def householder_product(vectors: Any, factors: Any) -> Any:
    unit = np.eye(*factorizations.sizes_of_matrix(vectors), dtype=str(vectors.dtype))
    return factorizations.reflected(ops.broadcast_to(unit, shape=tuple(vectors.shape)), vectors, factors)


@row("tridiagonal_solve")
def tridiagonal_solve(lower: Any, diagonal: Any, upper: Any, b: Any, **_: Any) -> Any:
    """Solve with the dense matrix, whose rows are exchanged as in LAPACK."""
    n = diagonal.shape[-1]
    steps = np.arange(n)
    bands = ((lower, 1), (diagonal, 0), (upper, -1))
    matrix = sum(ops.where(steps[:, None] - steps == k, ops.unsqueeze(band, axis=-1), 0.0) for band, k in bands)
    return ops.solve(matrix, b)
