"""Custom derivatives of JAX functions (``jax.custom_jvp``, ``jax.custom_vjp``) as jaxprs of their tangents."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.extend import core

from mithril.graph import UnsupportedError

CUSTOM = ("custom_jvp_call", "custom_vjp_call")
_programs: dict[int, tuple[Any, Any]] = {}  # by id of the equation, which is kept alive


def is_users(equation: Any) -> bool:
    """Whether the rule differs from the derivative: those of JAX itself only compute it more accurately."""
    call = equation.params["call_jaxpr"].jaxpr
    file = (call.debug_info.func_filename or "").replace("\\", "/")
    return "/jax/_src/" not in file


def name_of(equation: Any) -> str:
    """Return the name of the function with the rule."""
    return str(equation.params["call_jaxpr"].jaxpr.debug_info.func_name or "function")


def differentiable(aval: Any) -> bool:
    return bool(jax.numpy.issubdtype(aval.dtype, np.floating))


def tangents(equation: Any) -> Any:
    """Return the jaxpr from operands and tangents of the float operands to tangents of the float results."""
    cached = _programs.get(id(equation))
    if cached is None:
        make = _from_jvp if equation.primitive.name == CUSTOM[0] else _from_vjp
        cached = _programs[id(equation)] = (equation, make(equation))
    return cached[1]


def _structures(variables: Any) -> list[Any]:
    return [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in variables]


def _from_jvp(equation: Any) -> Any:
    operands = _structures(equation.invars)
    zeros = [not differentiable(a) for a in operands]
    jaxpr, consts, zeros_out = equation.params["jvp_jaxpr_fun"].call_wrapped(*zeros)
    count = len(equation.outvars)

    def run(primals: Any, moving: Any) -> Any:
        results = jax.core.eval_jaxpr(jaxpr, consts, *primals, *moving)
        dots = iter(results[count:])
        outs = zip(equation.outvars, zeros_out, strict=True)
        pairs = [(v, None if zero else next(dots)) for v, zero in outs]
        return [
            jax.numpy.zeros(v.aval.shape, v.aval.dtype) if t is None else t for v, t in pairs if differentiable(v.aval)
        ]

    return jax.make_jaxpr(run)(operands, [a for a, zero in zip(operands, zeros, strict=True) if not zero])


def _from_vjp(equation: Any) -> Any:
    """Transpose the backward rule, which must be linear in the cotangents."""
    operands = _structures(equation.invars)
    results = [a for a in _structures(equation.outvars) if differentiable(a)]
    params = equation.primitive.get_bind_params(equation.params)

    def function(*arguments: Any) -> Any:
        return equation.primitive.bind(*arguments, **params)

    float_places = [k for k, a in enumerate(operands) if differentiable(a)]

    def run(primals: Any, moving: Any) -> Any:
        def of_float_places(*values: Any) -> list[Any]:
            arguments = list(primals)
            for k, value in zip(float_places, values, strict=True):
                arguments[k] = value
            return [y for y, v in zip(function(*arguments), equation.outvars, strict=True) if differentiable(v.aval)]

        _, pull = jax.vjp(of_float_places, *(primals[k] for k in float_places))
        push = jax.linear_transpose(lambda *cotangents: pull(list(cotangents)), *results)
        return push(tuple(moving))

    try:
        return jax.make_jaxpr(run)(operands, [operands[k] for k in float_places])
    except Exception as error:
        raise UnsupportedError(
            f"the custom_vjp rule of '{name_of(equation)}' cannot be expressed: it is not linear in the cotangent",
            facts=[str(error).splitlines()[0][:200]],
            hint="define it by jax.custom_jvp, or import jax.grad of the function",
        ) from error


def equations(jaxpr: Any) -> Iterator[Any]:
    """Return all equations of a jaxpr and of those inside its parameters."""
    for equation in jaxpr.eqns:
        yield equation
        for parameter in equation.params.values():
            for inner in parameter if isinstance(parameter, (tuple, list)) else (parameter,):
                if isinstance(inner, core.ClosedJaxpr):
                    yield from equations(inner.jaxpr)
                elif isinstance(inner, core.Jaxpr):
                    yield from equations(inner)
