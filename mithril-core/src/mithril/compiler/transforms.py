"""Public transformations of graphs, models, and Python functions of values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mithril.backend import checked
from mithril.base import Dim, GraphError
from mithril.compiler.frontend import is_model
from mithril.compiler.model_changes import GRAPHS, Derivative, Rows, to_hashable
from mithril.compiler.transformed import Transformed
from mithril.ir import Graph
from mithril.transforms import (
    grad_function,
    hessian_function,
    hvp_function,
    jacobian_function,
    jvp_function,
    vjp_function,
    vmap_function,
    vmap_graph,
)

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "grad": grad_function,
    "vjp": vjp_function,
    "jvp": jvp_function,
    "jacobian": jacobian_function,
    "hvp": hvp_function,
    "hessian": hessian_function,
}
Axis = int | None
Axes = int | Sequence[Axis] | Mapping[str, Axis]


@checked()
def vmap(target: Any, in_axes: Axes = 0, out_axes: Axes = 0, size: int | str | Dim | None = None) -> Any:
    """Vectorize a graph, a model or a Python function of values over a new axis.

    ``in_axes`` is the mapped axis of all inputs, or a mapping from names or patterns to axes, with None for inputs that
    are shared by all rows. Parameters and states are shared unless they are named. ``out_axes`` is the same for the
    outputs. For functions, both are positional. ``size`` is the number of rows, required if no input is mapped.
    """
    if isinstance(target, Graph):
        return vmap_graph(target, _by_name("in_axes", in_axes), _by_name("out_axes", out_axes), size)
    if is_model(target):
        change = Rows(to_hashable(_by_name("in_axes", in_axes)), to_hashable(_by_name("out_axes", out_axes)), size)
        return Transformed(target, change)
    if callable(target):
        for name, axes in (("in_axes", in_axes), ("out_axes", out_axes)):
            if isinstance(axes, Mapping):
                raise GraphError(f"{name} of a function is positional", hint=f"write {name}=(0, None)")
        return vmap_function(target, in_axes, out_axes, size)  # type: ignore[arg-type]
    raise _not_transformable(target)


Names = str | Sequence[str] | None
Wrt = int | str | Sequence[int | str] | None


@checked()
def grad(target: Any, of: str | None = None, wrt: Wrt = None) -> Any:  # english: ok
    """Differentiate a scalar output ``of`` with respect to the inputs ``wrt``.

    The new graph or model has the gradients as additional outputs; the function returns them. ``wrt`` are names of
    inputs (default: the parameters, else all floats); for functions, positions or names of arguments (default: 0).
    """
    return _derived("grad", target, of, wrt)


@checked()
def vjp(target: Any, of: Names = None, wrt: Wrt = None) -> Any:  # english: ok
    """Compute vector-Jacobian products: cotangents of the outputs times the Jacobian (reverse mode).

    The new graph or model has an input for the cotangent of each output; the function is called as
    ``ml.vjp(f)(x, cotangents=c)`` and returns values and products.
    """
    return _derived("vjp", target, of, wrt)


@checked()
def jvp(target: Any, of: Names = None, wrt: Wrt = None) -> Any:  # english: ok
    """Compute Jacobian-vector products: the Jacobian times tangents of the inputs (forward mode).

    The new graph or model has the inputs ``tangent/<input>`` and the outputs ``tangent/<output>``; the function is
    called as ``ml.jvp(f)(x, tangents=t)`` and returns values and products.
    """
    return _derived("jvp", target, of, wrt)


@checked()
def jacobian(target: Any, of: Names = None, wrt: Wrt = None) -> Any:  # english: ok
    """Compute Jacobians of shape [*output shape, *input shape].

    The new graph or model has the outputs ``jacobian/<output>/<input>``; the function returns them.
    """
    return _derived("jacobian", target, of, wrt)


@checked()
def hvp(target: Any, of: str | None = None, wrt: Wrt = None) -> Any:  # english: ok
    """Compute Hessian-vector products of a scalar output with tangents of the inputs.

    The new graph or model has the inputs ``tangent/<input>`` and the gradients and ``hvp/<input>`` as outputs; the
    function is called as ``ml.hvp(f)(x, tangents=t)``.
    """
    return _derived("hvp", target, of, wrt)


@checked()
def hessian(target: Any, of: str | None = None, wrt: Wrt = None) -> Any:  # english: ok
    """Compute the Hessian of a scalar output.

    The new graph or model has the outputs gradients, ``hessian/<input>`` and, for pairs of inputs,
    ``hessian/<input>/<other input>``; the function returns them.
    """
    return _derived("hessian", target, of, wrt)


def _derived(kind: str, target: Any, of: Names, wrt: Wrt) -> Any:  # english: ok
    if isinstance(target, Graph):
        return GRAPHS[kind](target, of, _input_names(wrt))
    if is_model(target):
        names = _input_names(wrt)
        outputs = (of,) if isinstance(of, str) else None if of is None else tuple(of)
        return Transformed(target, Derivative(kind, outputs, None if names is None else tuple(names)))
    if callable(target):
        if of is not None:
            raise GraphError("'of' requires a graph or model; derivatives of a function use all results")
        return FUNCTIONS[kind](target, 0 if wrt is None else wrt)
    raise _not_transformable(target)


def _input_names(wrt: Wrt) -> list[str] | None:
    if wrt is None:
        return None
    names = [wrt] if isinstance(wrt, (int, str)) else list(wrt)
    if not all(isinstance(name, str) for name in names):
        raise GraphError(f"wrt={wrt!r}: graphs and models require names", hint="write wrt=['x']")
    return names  # type: ignore[return-value]


def _not_transformable(target: Any) -> GraphError:
    return GraphError(
        f"{type(target).__name__} cannot be transformed",
        facts=[f"got {target!r:.80}", "accepted: a Graph, a model, a Python function of values"],
    )


def _by_name(argument: str, axes: Axes) -> int | Mapping[str, Axis]:
    if isinstance(axes, (int, Mapping)):
        return axes
    raise GraphError(f"{argument} of graphs and models requires names", hint=f"write {argument}={{'x': 0}}")
