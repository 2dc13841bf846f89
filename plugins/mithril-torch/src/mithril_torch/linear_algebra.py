"""Lowerings of linear algebra to torch.linalg."""

from __future__ import annotations

from mithril.backend import Call, factors
from mithril_torch import helpers


def _rounded(call: Call, text: str) -> str:
    """Return a factorization of float32 operands with results in the dtype of the operation."""
    if call.type.dtype.bits > 16:
        return text
    if len(call.results) == 1:
        return f"{text}.to({call.dtype()})"
    return f"tuple(r.to({call.dtype()}) for r in {text})"


def _single(call: Call, name: str) -> str:
    return f"{call.helper(helpers.single)}({call.array(name)})"


def cholesky(call: Call) -> str:
    x = f"{call.helper(factors.symmetric)}({call.array('x')})"
    return _rounded(call, f"{call.helper(helpers.or_nan)}(torch.linalg.cholesky_ex({x})).tril()")


def triangular_solve(call: Call) -> str:
    a = _single(call, "a") + (".mT" if call.transposed else "")
    flags = f"upper={call.lower == call.transposed}, unitriangular={call.unit_diagonal}"
    return _rounded(call, f"torch.linalg.solve_triangular({a}, {_single(call, 'b')}, {flags})")


def solve(call: Call) -> str:
    return _rounded(
        call, f"{call.helper(helpers.or_nan)}(torch.linalg.solve_ex({_single(call, 'a')}, {_single(call, 'b')}))"
    )


def slogdet(call: Call) -> str:
    return _rounded(call, f"tuple(torch.linalg.slogdet({_single(call, 'x')}))")


def qr(call: Call) -> str:
    return _rounded(call, f"{call.helper(factors.unique_qr)}(*torch.linalg.qr({_single(call, 'x')}))")


def eigh(call: Call) -> str:
    x = f"{call.helper(factors.symmetric)}({call.array('x')})"
    return _rounded(call, f"{call.helper(factors.unique_eigenvectors)}(*torch.linalg.eigh({x}))")


def svd(call: Call) -> str:
    return _rounded(
        call, f"{call.helper(factors.unique_svd)}(*torch.linalg.svd({_single(call, 'x')}, full_matrices=False))"
    )


FUNCTIONS = (cholesky, triangular_solve, solve, slogdet, qr, eigh, svd)
