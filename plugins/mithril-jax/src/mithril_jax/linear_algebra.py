"""Lowerings of linear algebra to jax.numpy.linalg."""

from __future__ import annotations

from mithril.backend import Call, LibraryCalls, factors

CALLS = LibraryCalls()


def cholesky(call: Call) -> str:
    return CALLS.rounded(call, f"jnp.linalg.cholesky({call.helper(factors.symmetric)}({call.array('x')}))")


def triangular_solve(call: Call) -> str:
    operands = f"{CALLS.operand(call, 'a')}, {CALLS.operand(call, 'b')}"
    flags = f"lower={call.lower}, transpose_a={call.transposed}, unit_diagonal={call.unit_diagonal}"
    return CALLS.rounded(call, f"lax.linalg.triangular_solve({operands}, left_side=True, {flags})")


def solve(call: Call) -> str:
    return CALLS.rounded(call, f"jnp.linalg.solve({CALLS.operand(call, 'a')}, {CALLS.operand(call, 'b')})")


def slogdet(call: Call) -> str:
    return CALLS.rounded(call, f"tuple(jnp.linalg.slogdet({CALLS.operand(call, 'x')}))")


def qr(call: Call) -> str:
    return CALLS.rounded(call, f"{call.helper(factors.unique_qr)}(*jnp.linalg.qr({CALLS.operand(call, 'x')}))")


def eigh(call: Call) -> str:
    x = f"{call.helper(factors.symmetric)}({call.array('x')})"
    return CALLS.rounded(call, f"{call.helper(factors.unique_eigenvectors)}(*jnp.linalg.eigh({x}))")


def svd(call: Call) -> str:
    return CALLS.rounded(
        call, f"{call.helper(factors.unique_svd)}(*jnp.linalg.svd({CALLS.operand(call, 'x')}, full_matrices=False))"
    )


FUNCTIONS = (cholesky, triangular_solve, solve, slogdet, qr, eigh, svd)
