"""Derivatives of Python functions of values, by the derivatives of their graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mithril.derivatives.functions import Traced, on_arrays_too, put, traced
from mithril.derivatives.graph_derivatives import (
    grad_graph,
    hessian_graph,
    hvp_graph,
    jacobian_graph,
    jvp_graph,
    vjp_graph,
)
from mithril.graph import GradientError, Graph, Value
from mithril.ops import as_tuple

Wrt = int | str | Sequence[int | str]
Function = Callable[..., Any]


def grad_function(function: Function, wrt: Wrt = 0) -> Function:
    """Return the function that gives the gradients of a scalar function."""

    def gradient(*values: Value) -> Any:
        one, names = _traced(function, values, wrt)
        graph = grad_graph(_scalar(one), None, names)
        return _one_or_tuple(wrt, _added_results(graph, one, values, ()))

    return on_arrays_too(gradient)


def vjp_function(function: Function, wrt: Wrt = 0) -> Function:
    """Return the function that gives values and products of ``cotangents`` and the Jacobian."""

    def products(values: Sequence[Value], cotangents: Sequence[Value]) -> Any:
        one, names = _traced(function, values, wrt)
        graph = vjp_graph(one.graph, None, names)
        _expect("cotangents", len(cotangents), len(graph.arguments) - len(one.graph.arguments))
        results = put(graph, [*values, *one.captured, *cotangents])
        return _values(one, results), _one_or_tuple(wrt, results[len(one.graph.results) :])

    return _with_seeds(products, "cotangents")


def jvp_function(function: Function, wrt: Wrt = 0) -> Function:
    """Return the function that gives values and products of the Jacobian and ``tangents``."""

    def products(values: Sequence[Value], tangents: Sequence[Value]) -> Any:
        one, names = _traced(function, values, wrt)
        _expect("tangents", len(tangents), len(names))
        graph = jvp_graph(one.graph, None, names)
        results = put(graph, [*values, *one.captured, *tangents])
        slopes = results[len(one.graph.results) :]
        return _values(one, results), slopes[0] if one.is_single else slopes

    return _with_seeds(products, "tangents")


def hvp_function(function: Function, wrt: Wrt = 0) -> Function:
    """Return the function that gives products of the Hessian of a scalar function and ``tangents``."""

    def products(values: Sequence[Value], tangents: Sequence[Value]) -> Any:
        one, names = _traced(function, values, wrt)
        _expect("tangents", len(tangents), len(names))
        graph = hvp_graph(_scalar(one), None, names)
        return _one_or_tuple(wrt, _added_results(graph, one, values, tangents)[len(names) :])

    return _with_seeds(products, "tangents")


def jacobian_function(function: Function, wrt: Wrt = 0) -> Function:
    """Return the function that gives the Jacobians of a function."""

    def jacobian(*values: Value) -> Any:
        one, names = _traced(function, values, wrt)
        blocks = _added_results(jacobian_graph(one.graph, None, names), one, values, ())
        count = len(names)
        by_output = [_one_or_tuple(wrt, blocks[k : k + count]) for k in range(0, len(blocks), count)]
        return by_output[0] if one.is_single else tuple(by_output)

    return on_arrays_too(jacobian)


def hessian_function(function: Function, wrt: Wrt = 0) -> Function:
    """Return the function that gives the second derivatives of a scalar function."""

    def hessian(*values: Value) -> Any:
        one, names = _traced(function, values, wrt)
        count = len(names)
        blocks = _added_results(hessian_graph(_scalar(one), None, names), one, values, ())[count:]
        rows = [_one_or_tuple(wrt, blocks[k : k + count]) for k in range(0, len(blocks), count)]
        return _one_or_tuple(wrt, rows)

    return on_arrays_too(hessian)


def _with_seeds(products: Callable[[Sequence[Value], Sequence[Value]], Any], keyword: str) -> Function:
    """Return a function that takes tangents or cotangents by keyword, one or a tuple."""

    def called(*arguments: Any, **seeds: Any) -> Any:
        if set(seeds) != {keyword}:
            raise GradientError(
                f"this function needs '{keyword}', got {', '.join(map(repr, seeds)) or 'no keyword'}",
                hint=f"call it as f(x, {keyword}=v), or with a tuple for several",
            )
        count = len(arguments)
        run = on_arrays_too(lambda *values: products(values[:count], values[count:]))
        return run(*arguments, *as_tuple(seeds[keyword]))

    return called


def _traced(function: Function, values: Sequence[Value], wrt: Wrt) -> tuple[Traced, list[str]]:
    one = traced(function, [v.type for v in values])
    names = []
    for which in wrt if isinstance(wrt, (tuple, list)) else (wrt,):
        if isinstance(which, int) and not isinstance(which, bool) and -len(values) <= which < len(values):
            names.append(one.arguments[which])
        elif which in one.arguments:
            names.append(which)
        else:
            raise GradientError(
                f"the function has no argument {which!r} to differentiate by",
                facts=[f"accepted: 0 to {len(values) - 1}, {', '.join(one.arguments)}"],
            )
    return one, names


def _scalar(one: Traced) -> Graph:
    if len(one.graph.results) != 1 or one.graph.outputs[0].shape != ():
        types = ", ".join(str(v.type) for v in one.graph.outputs)
        raise GradientError(
            f"the function '{one.graph.name}' returns {types}, expected one scalar",
            hint="reduce it with sum(x) or mean(x), map it over rows with ml.vmap, or use ml.jacobian",
        )
    return one.graph


def _added_results(graph: Graph, one: Traced, values: Sequence[Value], seeds: Sequence[Value]) -> tuple[Value, ...]:
    """Return the results that the derivative adds."""
    return put(graph, [*values, *one.captured, *seeds])[len(one.graph.results) :]


def _values(one: Traced, results: Sequence[Value]) -> Any:
    return results[0] if one.is_single else tuple(results[: len(one.graph.results)])


def _one_or_tuple(wrt: Wrt, values: Sequence[Any]) -> Any:
    """Return one value for one argument, a tuple for several."""
    return tuple(values) if isinstance(wrt, (tuple, list)) else values[0]


def _expect(keyword: str, count: int, expected: int) -> None:
    if count != expected:
        raise GradientError(f"{keyword} has {count} values, expected {expected}")
