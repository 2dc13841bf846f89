"""ATen operators of linear algebra."""

from __future__ import annotations

from typing import Any

from mithril import ops
from mithril.graph import UnsupportedError
from mithril_torch.importing.table import row


def _swapped(x: Any) -> Any:
    rank = len(x.shape)
    return ops.transpose(x, perm=(*range(rank - 2), rank - 1, rank - 2))


def _no_error(x: Any) -> Any:
    """Return the state of a factorization that reports none."""
    return ops.full(shape=x.shape[:-2], value=0, dtype="int32")


@row("linalg_cholesky_ex")
def cholesky(x: Any, upper: bool = False, check_errors: bool = False) -> Any:
    y = ops.cholesky(_symmetric(x, not upper))
    return (_swapped(y) if upper else y), _no_error(x)


@row("cholesky_solve")
def cholesky_solve(b: Any, factor: Any, upper: bool = False) -> Any:
    lower = _swapped(factor) if upper else factor
    y = ops.triangular_solve(lower, b, lower=True)
    return ops.triangular_solve(lower, y, lower=True, transposed=True)


@row("linalg_solve_triangular")
def solve_triangular(a: Any, b: Any, upper: bool, left: bool = True, unitriangular: bool = False) -> Any:
    settings = {"lower": not upper, "unit_diagonal": unitriangular}
    if left:
        return ops.triangular_solve(a, b, **settings)
    return _swapped(ops.triangular_solve(a, _swapped(b), transposed=True, **settings))


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
    return ops.svd(x)


@row("_linalg_eigh")
def eigh(x: Any, UPLO: str = "L", compute_v: bool = True) -> Any:  # the name of PyTorch
    """Return eigenvalues and eigenvectors; only one triangle of the operand is read."""
    return ops.eigh(_symmetric(x, UPLO == "L"))


def _symmetric(x: Any, lower: bool) -> Any:
    """Return the symmetric matrix of one triangle."""
    triangle = ops.tril(x) if lower else ops.triu(x)
    other = ops.tril(x, k=-1) if lower else ops.triu(x, k=1)
    return triangle + _swapped(other)
