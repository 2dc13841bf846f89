"""Lowerings of linear algebra to numpy.linalg."""

from __future__ import annotations

from mithril.backend import Call, factors, reductions
from mithril_numpy import helpers


def _rounded(call: Call, text: str) -> str:
    """Return a factorization of float32 operands with results in the dtype of the operation."""
    if call.type.dtype.bits > 16:
        return text
    if len(call.results) == 1:
        return f"{text}.astype({call.dtype()})"
    return f"tuple(r.astype({call.dtype()}) for r in {text})"


def _single(call: Call, name: str) -> str:
    return f"{call.helper(reductions.single)}({call.array(name)})"


def _or_nan(call: Call, function: str, *operands: str) -> str:
    return f"{call.helper(helpers.or_nan)}({', '.join([function, *operands])})"


def _symmetric(call: Call) -> str:
    return f"{call.helper(factors.symmetric)}({call.array('x')})"


def cholesky(call: Call) -> str:
    return _rounded(call, f"np.tril({_or_nan(call, 'np.linalg.cholesky', _symmetric(call))})")


def triangular_solve(call: Call) -> str:
    flags = f"{call.lower}, {call.transposed}, {call.unit_diagonal}"
    solution = f"{call.helper(helpers.triangular_solve)}({_single(call, 'a')}, {_single(call, 'b')}, {flags})"
    return _rounded(call, solution)


def solve(call: Call) -> str:
    return _rounded(call, _or_nan(call, "np.linalg.solve", _single(call, "a"), _single(call, "b")))


def slogdet(call: Call) -> str:
    return _rounded(call, f"tuple(np.linalg.slogdet({_single(call, 'x')}))")


def qr(call: Call) -> str:
    return _rounded(call, f"{call.helper(factors.unique_qr)}(*np.linalg.qr({_single(call, 'x')}))")


def eigh(call: Call) -> str:
    factorization = _or_nan(call, "np.linalg.eigh", _symmetric(call))
    return _rounded(call, f"{call.helper(factors.unique_eigenvectors)}(*{factorization})")


def svd(call: Call) -> str:
    factorization = _or_nan(call, "lambda x: np.linalg.svd(x, full_matrices=False)", _single(call, "x"))
    return _rounded(call, f"{call.helper(factors.unique_svd)}(*{factorization})")


FUNCTIONS = (cholesky, triangular_solve, solve, slogdet, qr, eigh, svd)
