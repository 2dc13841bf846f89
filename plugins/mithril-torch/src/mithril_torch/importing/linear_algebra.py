"""ATen operators of linear algebra."""

from __future__ import annotations

from typing import Any

import numpy as np

from mithril import ops
from mithril.graph import UnsupportedError
from mithril_importing import factorizations
from mithril_importing.arrays import reshape
from mithril_torch.importing.table import cast, row

_swapped = factorizations.swapped


def _no_error(x: Any) -> Any:
    """Return the state of a factorization that reports none."""
    return ops.full(shape=x.shape[:-2], value=0, dtype="int32")


@row("linalg_cholesky_ex")
def cholesky(x: Any, upper: bool = False, check_errors: bool = False) -> Any:
    y = ops.cholesky(_with_slopes(_symmetric(x, not upper), (x + _swapped(x)) * 0.5))
    return (_swapped(y) if upper else y), _no_error(x)


@row("cholesky")
def cholesky_alone(x: Any, upper: bool = False) -> Any:
    return cholesky(x, upper)[0]


@row("cholesky_inverse")
def cholesky_inverse(factor: Any, upper: bool = False) -> Any:
    """Return the inverse of the matrix with this factor, of which one triangle is read."""
    lower = _lower(factor, upper)
    return ops.inv(ops.matmul(lower, _swapped(lower)))


@row("cholesky_solve")
def cholesky_solve(b: Any, factor: Any, upper: bool = False) -> Any:
    lower = _lower(factor, upper)
    return ops.solve(ops.matmul(lower, _swapped(lower)), b)


@row("linalg_solve_triangular")
def solve_triangular(a: Any, b: Any, upper: bool, left: bool = True, unitriangular: bool = False) -> Any:
    settings = {"lower": not upper, "unit_diagonal": unitriangular}
    if left:
        return ops.triangular_solve(a, b, **settings)
    return _swapped(ops.triangular_solve(a, _swapped(b), transposed=True, **settings))


@row("triangular_solve")
def triangular_solve(b: Any, a: Any, upper: bool = True, transpose: bool = False, unitriangular: bool = False) -> Any:
    settings = {"lower": not upper, "unit_diagonal": unitriangular, "transposed": transpose}
    lead = tuple(np.broadcast_shapes(a.shape[:-2], b.shape[:-2]))
    a, b = (ops.broadcast_to(x, shape=(*lead, *x.shape[-2:])) for x in (a, b))
    return ops.triangular_solve(a, b, **settings), a


@row("_linalg_solve_ex")
def solve(a: Any, b: Any, left: bool = True, check_errors: bool = False) -> Any:
    """Return the solution; the factors of a, which follow it in PyTorch, are not computed."""
    vector = len(b.shape) == len(a.shape) - 1
    columns = ops.unsqueeze(b, axis=len(b.shape)) if vector else b
    x = ops.solve(a, columns) if left else _swapped(ops.solve(_swapped(a), _swapped(columns)))
    return (ops.squeeze(x, axis=-1) if vector else x), None, None, _no_error(a)


@row("linalg_inv_ex")
def inv(x: Any, check_errors: bool = False) -> Any:
    return ops.inv(x), _no_error(x)


@row("_linalg_det")
def det(x: Any) -> Any:
    return ops.det(x), None, None


@row("_linalg_slogdet")
def slogdet(x: Any) -> Any:
    sign, size = ops.slogdet(x)
    return sign, size, None, None


@row("linalg_qr")
def qr(x: Any, mode: str = "reduced") -> Any:
    """Return q and r; the diagonal of r is not negative, so that signs can differ from those of PyTorch."""
    if mode != "reduced":
        raise UnsupportedError(f"torch.linalg.qr with mode='{mode}' is not supported", hint="use mode='reduced'")
    return ops.qr(x)


@row("_linalg_svd")
def svd(x: Any, full_matrices: bool = False, compute_uv: bool = True, driver: Any = None) -> Any:
    rows, columns = x.shape[-2:]
    if full_matrices and compute_uv and rows != columns:
        raise UnsupportedError(
            "torch.linalg.svd with full_matrices=True is not supported", hint="use full_matrices=False"
        )
    return factorizations.svd(x)


@row("_linalg_eigh")
def eigh(x: Any, UPLO: str = "L", compute_v: bool = True) -> Any:  # the name of PyTorch
    """Return eigenvalues and eigenvectors; only one triangle of the operand is read."""
    return factorizations.eigh(_with_slopes(_symmetric(x, UPLO == "L"), (x + _swapped(x)) * 0.5))


# -- factors of general matrices ----------------------------------------------------------------------------------
@row("linalg_lu_factor_ex")
def lu_factor(x: Any, pivot: bool = True, check_errors: bool = False) -> Any:
    _require_pivots(pivot)
    factors, pivots, _ = factorizations.lu(x)
    return factors, ops.add(pivots, 1), _no_error(x)


def _require_pivots(pivot: bool) -> None:
    if not pivot:
        raise UnsupportedError("LU factors with pivot=False are not supported", hint="use pivot=True")


@row("linalg_lu")
def lu(x: Any, pivot: bool = True) -> Any:
    _require_pivots(pivot)
    factors, _, order = factorizations.lu(x)
    return factorizations.permutation(order, str(x.dtype)), *factorizations.triangles(factors)


@row("lu_unpack")
def lu_unpack(factors: Any, pivots: Any, unpack_data: bool = True, unpack_pivots: bool = True) -> Any:
    lower, upper = factorizations.triangles(factors) if unpack_data else (None, None)
    order = factorizations.order_of(ops.sub(pivots, 1), factors.shape[-2])
    return factorizations.permutation(order, str(factors.dtype)), lower, upper


@row("linalg_lu_solve")
def lu_solve(factors: Any, pivots: Any, b: Any, left: bool = True, adjoint: bool = False) -> Any:
    """Solve with the factors of a matrix, or from the right with the transposed equation."""
    order = factorizations.order_of(ops.sub(pivots, 1), factors.shape[-2])
    b = b if left else _swapped(b)
    lead = tuple(np.broadcast_shapes(factors.shape[:-2], b.shape[:-2]))
    b = ops.broadcast_to(b, shape=(*lead, *b.shape[-2:]))
    factors = ops.broadcast_to(factors, shape=(*lead, *factors.shape[-2:]))
    order = ops.broadcast_to(order, shape=(*lead, order.shape[-1]))
    if left != adjoint:
        y = ops.triangular_solve(factors, factorizations.ordered_rows(b, order), lower=True, unit_diagonal=True)
        y = ops.triangular_solve(factors, y, lower=False)
    else:
        y = ops.triangular_solve(factors, b, lower=False, transposed=True)
        y = ops.triangular_solve(factors, y, lower=True, unit_diagonal=True, transposed=True)
        y = factorizations.ordered_rows(y, ops.argsort(order, axis=-1))
    return y if left else _swapped(y)


@row("geqrf")
def geqrf(x: Any) -> Any:
    return factorizations.householder_qr(x)


@row("linalg_householder_product")
def householder_product(vectors: Any, factors: Any) -> Any:
    n, m = factorizations.sizes_of_matrix(vectors)
    unit = ops.broadcast_to(np.eye(n, m, dtype=str(vectors.dtype)), shape=tuple(vectors.shape))
    return factorizations.reflected(unit, vectors, factors)


@row("ormqr")
def ormqr(vectors: Any, factors: Any, x: Any, left: bool = True, transpose: bool = False) -> Any:
    if left:
        return factorizations.reflected(x, vectors, factors, transposed=transpose)
    return _swapped(factorizations.reflected(_swapped(x), vectors, factors, transposed=not transpose))


@row("linalg_pinv.atol_rtol_tensor")
def pinv(x: Any, *, atol: Any = None, rtol: Any = None, hermitian: bool = False) -> Any:
    n, m = factorizations.sizes_of_matrix(x)
    kind = np.dtype(str(x.dtype))
    absolute = np.zeros((), kind) if atol is None else cast(atol, str(kind))
    default = max(n, m) * np.finfo(kind).eps if atol is None else 0.0
    relative = np.asarray(default, kind) if rtol is None else cast(rtol, str(kind))
    absolute, relative = (reshape(v, (*v.shape, 1)) for v in (absolute, relative))
    if not n * m:
        return _swapped(x)
    return factorizations.pseudoinverse(_symmetric(x, True) if hermitian else x, absolute, relative)


@row("linalg_matrix_exp")
def matrix_exp(x: Any) -> Any:
    return factorizations.matrix_exponential(x) if x.shape[-1] else x


def _lower(factor: Any, upper: bool) -> Any:
    """Return the lower factor; its other triangle is not read, but has a slope in PyTorch."""
    factor = _swapped(factor) if upper else factor
    return _with_slopes(ops.tril(factor), factor)


def _with_slopes(values: Any, x: Any) -> Any:
    """Return values that have the derivative of a tensor."""
    change = ops.sub(x, ops.stop_gradient(x))
    return ops.add(ops.stop_gradient(values), ops.where(ops.isfinite(x), change, 0.0))


def _symmetric(x: Any, lower: bool) -> Any:
    """Return the symmetric matrix of one triangle."""
    triangle = ops.tril(x) if lower else ops.triu(x)
    other = ops.tril(x, k=-1) if lower else ops.triu(x, k=1)
    return triangle + _swapped(other)
