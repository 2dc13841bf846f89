"""Lowerings of linear algebra to torch.linalg."""

from __future__ import annotations

from mithril.backend import Call, LibraryCalls, factors
from mithril_torch import helpers

CALLS = LibraryCalls(cast="{x}.to({dtype})", upcast=helpers.single)


def cholesky(call: Call) -> str:
    x = f"{call.helper(factors.symmetric)}({call.array('x')})"
    return CALLS.rounded(call, f"{call.helper(helpers.or_nan)}(torch.linalg.cholesky_ex({x})).tril()")


def triangular_solve(call: Call) -> str:
    a = CALLS.operand(call, "a") + (".mT" if call.transposed else "")
    flags = f"upper={call.lower == call.transposed}, unitriangular={call.unit_diagonal}"
    return CALLS.rounded(call, f"torch.linalg.solve_triangular({a}, {CALLS.operand(call, 'b')}, {flags})")


def solve(call: Call) -> str:
    return CALLS.rounded(
        call,
        f"{call.helper(helpers.or_nan)}(torch.linalg.solve_ex({CALLS.operand(call, 'a')}, {CALLS.operand(call, 'b')}))",
    )


def slogdet(call: Call) -> str:
    return CALLS.rounded(call, f"tuple(torch.linalg.slogdet({CALLS.operand(call, 'x')}))")


def qr(call: Call) -> str:
    return CALLS.rounded(call, f"{call.helper(factors.unique_qr)}(*torch.linalg.qr({CALLS.operand(call, 'x')}))")


def eigh(call: Call) -> str:
    x = f"{call.helper(factors.symmetric)}({call.array('x')})"
    return CALLS.rounded(call, f"{call.helper(factors.unique_eigenvectors)}(*torch.linalg.eigh({x}))")


def svd(call: Call) -> str:
    return CALLS.rounded(
        call, f"{call.helper(factors.unique_svd)}(*torch.linalg.svd({CALLS.operand(call, 'x')}, full_matrices=False))"
    )


FUNCTIONS = (cholesky, triangular_solve, solve, slogdet, qr, eigh, svd)
