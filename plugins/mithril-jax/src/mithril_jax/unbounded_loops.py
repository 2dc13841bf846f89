"""Results of loops without a bound: JAX has derivatives in forward mode, and no gradient of them."""

from __future__ import annotations

from typing import Any, NoReturn

from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from mithril.graph import GradientError


def _refuse(*_: Any) -> NoReturn:
    raise GradientError(
        "JAX has no gradient of a 'while' without max_trips",
        hint="pass a bound: While(..., max_trips=...), while_loop(..., max_trips=...)",
    )


# An identity that is linear for JAX. Reverse mode reaches it before the loop, of which JAX would raise an error of its
# own, after our function has returned.
_result = Primitive("unbounded_loop")
_result.def_impl(lambda x: x)
_result.def_abstract_eval(lambda x: x)
ad.deflinear2(_result, _refuse)
batching.defvectorized(_result)
mlir.register_lowering(_result, lambda _, x: [x])


def without_gradient(*results: Any) -> tuple[Any, ...]:
    """Return the results of a loop, whose gradient is an error."""
    return tuple(map(_result.bind, results))
