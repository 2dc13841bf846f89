"""Lowerings of linear algebra to torch.linalg."""

from __future__ import annotations

from mithril.backend import Call, factors
from mithril_torch import helpers


def _rounded(call: Call, text: str) -> str:
    """Return a factorization of float32 operands with results in the dtype of the operation."""
    if call.type.dtype.bits > 16:
        return text
    return f"tuple(r.to({call.dtype()}) for r in {text})" if len(call.results) > 1 else f"{text}.to({call.dtype()})"


def _single(call: Call, name: str) -> str:
    return f"{call.helper(helpers.single)}({call.array(name)})"


def _cholesky(call: Call) -> str:
    x = f"{call.helper(factors.symmetric)}({call.array('x')})"
    return _rounded(call, f"{call.helper(helpers.or_nan)}(torch.linalg.cholesky_ex({x}))")


def _triangular_solve(call: Call) -> str:
    a = _single(call, "a") + (".mT" if call.transposed else "")
    flags = f"upper={call.lower == call.transposed}, unitriangular={call.unit_diagonal}"
    return _rounded(call, f"torch.linalg.solve_triangular({a}, {_single(call, 'b')}, {flags})")


def _solve(call: Call) -> str:
    return _rounded(
        call, f"{call.helper(helpers.or_nan)}(torch.linalg.solve_ex({_single(call, 'a')}, {_single(call, 'b')}))"
    )


def _slogdet(call: Call) -> str:
    return _rounded(call, f"tuple(torch.linalg.slogdet({_single(call, 'x')}))")


def _qr(call: Call) -> str:
    return _rounded(call, f"{call.helper(factors.unique_qr)}(*torch.linalg.qr({_single(call, 'x')}))")


def _eigh(call: Call) -> str:
    x = f"{call.helper(factors.symmetric)}({call.array('x')})"
    return _rounded(call, f"{call.helper(factors.unique_eigenvectors)}(*torch.linalg.eigh({x}))")


def _svd(call: Call) -> str:
    return _rounded(
        call, f"{call.helper(factors.unique_svd)}(*torch.linalg.svd({_single(call, 'x')}, full_matrices=False))"
    )


ROWS = {
    "cholesky": _cholesky,
    "triangular_solve": _triangular_solve,
    "solve": _solve,
    "slogdet": _slogdet,
    "qr": _qr,
    "eigh": _eigh,
    "svd": _svd,
}
