"""Lowerings of linear algebra to numpy.linalg."""

from __future__ import annotations

from mithril.backend import Call, LibraryCalls, factors
from mithril_numpy import helpers

CALLS = LibraryCalls()


def _or_nan(call: Call, function: str, *operands: str) -> str:
    return f"{call.helper(helpers.or_nan)}({', '.join([function, *operands])})"


def _symmetric(call: Call) -> str:
    return f"{call.helper(factors.symmetric)}({call.array('x')})"


def cholesky(call: Call) -> str:
    return CALLS.rounded(call, f"np.tril({_or_nan(call, 'np.linalg.cholesky', _symmetric(call))})")


def triangular_solve(call: Call) -> str:
    flags = f"{call.lower}, {call.transposed}, {call.unit_diagonal}"
    solution = (
        f"{call.helper(helpers.triangular_solve)}({CALLS.operand(call, 'a')}, {CALLS.operand(call, 'b')}, {flags})"
    )
    return CALLS.rounded(call, solution)


def solve(call: Call) -> str:
    return CALLS.rounded(call, _or_nan(call, "np.linalg.solve", CALLS.operand(call, "a"), CALLS.operand(call, "b")))


def slogdet(call: Call) -> str:
    return CALLS.rounded(call, f"tuple(np.linalg.slogdet({CALLS.operand(call, 'x')}))")


def qr(call: Call) -> str:
    return CALLS.rounded(call, f"{call.helper(factors.unique_qr)}(*np.linalg.qr({CALLS.operand(call, 'x')}))")


def eigh(call: Call) -> str:
    factorization = _or_nan(call, "np.linalg.eigh", _symmetric(call))
    return CALLS.rounded(call, f"{call.helper(factors.unique_eigenvectors)}(*{factorization})")


def svd(call: Call) -> str:
    factorization = _or_nan(call, "lambda x: np.linalg.svd(x, full_matrices=False)", CALLS.operand(call, "x"))
    return CALLS.rounded(call, f"{call.helper(factors.unique_svd)}(*{factorization})")


FUNCTIONS = (cholesky, triangular_solve, solve, slogdet, qr, eigh, svd)
