"""Lowerings of linear algebra to jax.numpy.linalg."""

from __future__ import annotations

from mithril.backend import Call, factors, reductions


def _rounded(call: Call, text: str) -> str:
    """Return a factorization of float32 operands with results in the dtype of the operation."""
    if call.type.dtype.bits > 16:
        return text
    return (
        f"tuple(r.astype({call.dtype()}) for r in {text})"
        if len(call.results) > 1
        else f"{text}.astype({call.dtype()})"
    )


def _single(call: Call, name: str) -> str:
    return f"{call.helper(reductions.single)}({call.array(name)})"


def _cholesky(call: Call) -> str:
    return _rounded(call, f"jnp.linalg.cholesky({call.helper(factors.symmetric)}({call.array('x')}))")


def _triangular_solve(call: Call) -> str:
    flags = f"lower={call.lower}, transpose_a={call.transposed}, unit_diagonal={call.unit_diagonal}"
    return _rounded(
        call, f"lax.linalg.triangular_solve({_single(call, 'a')}, {_single(call, 'b')}, left_side=True, {flags})"
    )


def _solve(call: Call) -> str:
    return _rounded(call, f"jnp.linalg.solve({_single(call, 'a')}, {_single(call, 'b')})")


def _slogdet(call: Call) -> str:
    return _rounded(call, f"tuple(jnp.linalg.slogdet({_single(call, 'x')}))")


def _qr(call: Call) -> str:
    return _rounded(call, f"{call.helper(factors.unique_qr)}(*jnp.linalg.qr({_single(call, 'x')}))")


def _eigh(call: Call) -> str:
    x = f"{call.helper(factors.symmetric)}({call.array('x')})"
    return _rounded(call, f"{call.helper(factors.unique_eigenvectors)}(*jnp.linalg.eigh({x}))")


def _svd(call: Call) -> str:
    return _rounded(
        call, f"{call.helper(factors.unique_svd)}(*jnp.linalg.svd({_single(call, 'x')}, full_matrices=False))"
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
