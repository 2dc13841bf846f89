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


def cholesky(call: Call) -> str:
    return _rounded(call, f"jnp.linalg.cholesky({call.helper(factors.symmetric)}({call.array('x')}))")


def triangular_solve(call: Call) -> str:
    operands = f"{_single(call, 'a')}, {_single(call, 'b')}"
    flags = f"lower={call.lower}, transpose_a={call.transposed}, unit_diagonal={call.unit_diagonal}"
    return _rounded(call, f"lax.linalg.triangular_solve({operands}, left_side=True, {flags})")


def solve(call: Call) -> str:
    return _rounded(call, f"jnp.linalg.solve({_single(call, 'a')}, {_single(call, 'b')})")


def slogdet(call: Call) -> str:
    return _rounded(call, f"tuple(jnp.linalg.slogdet({_single(call, 'x')}))")


def qr(call: Call) -> str:
    return _rounded(call, f"{call.helper(factors.unique_qr)}(*jnp.linalg.qr({_single(call, 'x')}))")


def eigh(call: Call) -> str:
    x = f"{call.helper(factors.symmetric)}({call.array('x')})"
    return _rounded(call, f"{call.helper(factors.unique_eigenvectors)}(*jnp.linalg.eigh({x}))")


def svd(call: Call) -> str:
    return _rounded(
        call, f"{call.helper(factors.unique_svd)}(*jnp.linalg.svd({_single(call, 'x')}, full_matrices=False))"
    )


FUNCTIONS = (cholesky, triangular_solve, solve, slogdet, qr, eigh, svd)
