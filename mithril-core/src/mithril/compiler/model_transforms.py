"""Transformations of models, graphs and Python functions: ``ml.vmap`` and the derivatives.

A transformation of a model changes its inputs, types and initial values as well as its graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np

from mithril.backend import checked, matches
from mithril.compiler.frontend import Source, is_model
from mithril.compiler.initializers import Array, Index
from mithril.compiler.transformed_source import InputOf, Transformed, Types
from mithril.derivatives import (
    grad_function,
    grad_graph,
    gradients as _gradients,
    hessian_function,
    hessian_graph,
    hvp_function,
    hvp_graph,
    jacobian_function,
    jacobian_graph,
    jvp_function,
    jvp_graph,
    same_rows,
    tangent_name,
    vjp_function,
    vjp_graph,
    vmap_function,
    vmap_graph,
)
from mithril.graph import (
    Dim,
    Graph,
    GraphError,
    Input,
    Size,
    TensorType,
    Value,
    assume,
    collect_guards,
    cotangent_name,
    parse as _parse,
)

GRAPHS: dict[str, Callable[..., Graph]] = {
    "grad": grad_graph,
    "vjp": vjp_graph,
    "jvp": jvp_graph,
    "jacobian": jacobian_graph,
    "hvp": hvp_graph,
    "hessian": hessian_graph,
}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "grad": grad_function,
    "vjp": vjp_function,
    "jvp": jvp_function,
    "jacobian": jacobian_function,
    "hvp": hvp_function,
    "hessian": hessian_function,
}
SCALAR = ("grad", "hvp", "hessian")  # differentiate one output
Axis = int | None
Axes = int | Sequence[Axis] | Mapping[str, Axis]
Frozen = int | tuple[tuple[str, Axis], ...]
Names = str | Sequence[str] | None
Wrt = int | str | Sequence[int | str] | None


def _to_hashable(axes: int | Mapping[str, Axis]) -> Frozen:
    return axes if isinstance(axes, int) else tuple(axes.items())


def _from_hashable(axes: Frozen) -> int | dict[str, Axis]:
    return axes if isinstance(axes, int) else dict(axes)


@dataclass(frozen=True)
class Rows:
    """The transformation ``vmap``."""

    in_axes: Frozen
    out_axes: Frozen
    size: Size | str | None

    def _axis(self, name: str, default: Axis) -> Axis:
        if isinstance(self.in_axes, int):
            return self.in_axes if default is not None else None
        axes = [axis for pattern, axis in self.in_axes if matches(name, pattern)]
        return axes[-1] if axes else default

    def inputs(self, inner: Source) -> list[InputOf]:
        declared = []
        for d in inner.inputs:
            axis, shape = self._axis(d.name, 0), d.shape
            if axis is not None and shape is not None:
                place = axis % (len(shape) + 1)
                shape = (*shape[:place], self.size if self.size is not None else None, *shape[place:])
            declared.append(InputOf(d.name, shape, d.dtype, d.where, d.required, d.produced))
        return declared

    def outputs(self, inner: Source) -> Sequence[str]:
        return inner.outputs

    def inner_types(self, inner: Source, types: Types) -> dict[str, TensorType]:
        rows = {}
        for name, t in types.items():
            axis = self._axis(name, 0)
            if axis is None:
                rows[name] = t
                continue
            if not -t.rank <= axis < t.rank:
                raise GraphError(
                    f"in_axes: the rows of '{name}' are along axis {axis}, but it is {t}",
                    hint=f"in_axes={{'{name}': None}} if it is the same for all rows",
                )
            place = axis % t.rank
            rows[name] = TensorType(t.dtype, t.shape[:place] + t.shape[place + 1 :])
        return rows

    def apply(self, graph: Graph, types: Types) -> Graph:
        axes = {n: (axis, t) for n, t in types.items() if (axis := self._axis(n, 0)) is not None}
        size = Dim(self.size) if isinstance(self.size, str) else self.size
        with collect_guards() as guards:
            rows = same_rows(list(axes), [t.shape[axis] for axis, t in axes.values()], size)
        mapped = vmap_graph(graph, _from_hashable(self.in_axes), _from_hashable(self.out_axes), rows)
        return mapped.replaced(guards=(*mapped.guards, *guards)) if guards else mapped

    def initial(self, inner: Source, inputs: Iterable[Input], seed: int, index: Index | None) -> dict[str, Array]:
        """Initialize each row of a parameter that has rows as a separate model would be, by the next seed."""
        values: dict[str, Array] = {}
        axes = {i: self._axis(i.name, None) for i in inputs}
        values |= inner.initial([i for i, axis in axes.items() if axis is None], seed, index)
        for i, axis in axes.items():
            if axis is None:
                continue
            place = axis % i.type.rank
            shape = i.type.shape
            row = Input(
                Value(i.name, TensorType(i.type.dtype, shape[:place] + shape[place + 1 :])), i.role, tags=i.tags
            )
            if not isinstance(shape[place], int):
                raise GraphError(
                    f"the number of rows of '{i.name}' is '{shape[place]}'", hint="say it: ml.vmap(..., size=8)"
                )
            region = (slice(None),) * i.type.rank if index is None else index
            rest = (*region[:place], *region[place + 1 :])
            rows = [inner.initial([row], seed + k, rest)[i.name] for k in range(int(shape[place]))[region[place]]]
            values[i.name] = np.stack(rows, axis=place)
        return values


@dataclass(frozen=True)
class Derivative:
    """A derivative transformation."""

    kind: str
    of: tuple[str, ...] | None
    wrt: tuple[str, ...] | None

    def _seeds(self, inner: Source) -> dict[str, InputOf]:
        """Return the tangents or cotangents that the derivative adds to the inputs, by name."""
        declared = {d.name: d for d in inner.inputs}
        if self.kind == "vjp":
            outputs = inner.outputs if self.of is None else self.of
            return {n: InputOf(n, None, None, f"ml.vjp of '{y}'") for y in outputs if (n := cotangent_name(y))}
        if self.kind not in ("jvp", "hvp"):
            return {}
        if self.wrt is None:
            raise GraphError(
                f"ml.{self.kind} of a model needs wrt=", hint="name the inputs or parameters: wrt=['input']"
            )
        seeds = {}
        for x in self.wrt:
            d = declared.get(x)
            shape, kind = (None, None) if d is None else (d.shape, d.dtype)
            seeds[tangent_name(x)] = InputOf(tangent_name(x), shape, kind, f"ml.{self.kind} by '{x}'", primal=x)
        return seeds

    def inputs(self, inner: Source) -> list[InputOf]:
        plain = [InputOf(d.name, d.shape, d.dtype, d.where, d.required, d.produced) for d in inner.inputs]
        return [*plain, *self._seeds(inner).values()]

    def outputs(self, inner: Source) -> Sequence[str]:
        return inner.outputs

    def inner_types(self, inner: Source, types: Types) -> dict[str, TensorType]:
        seeds = self._seeds(inner)
        return {n: t for n, t in types.items() if n not in seeds}

    def apply(self, graph: Graph, types: Types) -> Graph:
        outputs = self.of[0] if self.of and self.kind in SCALAR else self.of
        derived = GRAPHS[self.kind](graph, outputs, self.wrt)
        for i in derived.arguments[len(graph.arguments) :]:
            t = types.get(i.name, i.type)
            with collect_guards():
                fits = t.rank == i.type.rank and all(
                    assume(a, "==", b) for a, b in zip(t.shape, i.type.shape, strict=True)
                )
            if not fits or t.dtype is not i.type.dtype:
                raise GraphError(f"'{i.name}' is {t}, expected {i.type}")
        return derived

    def initial(self, inner: Source, inputs: Iterable[Input], seed: int, index: Index | None) -> dict[str, Array]:
        return inner.initial(inputs, seed, index)


@overload
def vmap(target: Graph, in_axes: Axes = 0, out_axes: Axes = 0, size: int | str | Dim | None = None) -> Graph: ...
@overload
def vmap(
    target: Any, in_axes: Axes = 0, out_axes: Axes = 0, size: int | str | Dim | None = None
) -> Callable[..., Any]: ...
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
        change = Rows(_to_hashable(_by_name("in_axes", in_axes)), _to_hashable(_by_name("out_axes", out_axes)), size)
        return Transformed(target, change)
    if callable(target):
        for name, axes in (("in_axes", in_axes), ("out_axes", out_axes)):
            if isinstance(axes, Mapping):
                raise GraphError(f"{name} of a function is positional", hint=f"write {name}=(0, None)")
        return vmap_function(target, in_axes, out_axes, size)  # type: ignore[arg-type]
    raise _not_transformable(target)


@overload
def grad(target: Graph, of: str | None = None, wrt: Wrt = None) -> Graph: ...  # english: ok
@overload
def grad(target: Any, of: str | None = None, wrt: Wrt = None) -> Callable[..., Any]: ...  # english: ok
@checked()
def grad(target: Any, of: str | None = None, wrt: Wrt = None) -> Any:  # english: ok
    """Differentiate a scalar output ``of`` with respect to the inputs ``wrt``.

    The new graph or model has the gradients as additional outputs; the function returns them. ``wrt`` are names of
    inputs (default: the parameters, else all floats); for functions, positions or names of arguments (default: 0).
    """
    return _derived("grad", target, of, wrt)


@overload
def vjp(target: Graph, of: Names = None, wrt: Wrt = None) -> Graph: ...  # english: ok
@overload
def vjp(target: Any, of: Names = None, wrt: Wrt = None) -> Callable[..., Any]: ...  # english: ok
@checked()
def vjp(target: Any, of: Names = None, wrt: Wrt = None) -> Any:  # english: ok
    """Compute vector-Jacobian products: cotangents of the outputs times the Jacobian (reverse mode).

    The new graph or model has an input for the cotangent of each output; the function is called as
    ``ml.vjp(f)(x, cotangents=c)`` and returns values and products.
    """
    return _derived("vjp", target, of, wrt)


@overload
def jvp(target: Graph, of: Names = None, wrt: Wrt = None) -> Graph: ...  # english: ok
@overload
def jvp(target: Any, of: Names = None, wrt: Wrt = None) -> Callable[..., Any]: ...  # english: ok
@checked()
def jvp(target: Any, of: Names = None, wrt: Wrt = None) -> Any:  # english: ok
    """Compute Jacobian-vector products: the Jacobian times tangents of the inputs (forward mode).

    The new graph or model has the inputs ``tangent/<input>`` and the outputs ``tangent/<output>``; the function is
    called as ``ml.jvp(f)(x, tangents=t)`` and returns values and products.
    """
    return _derived("jvp", target, of, wrt)


@overload
def jacobian(target: Graph, of: Names = None, wrt: Wrt = None) -> Graph: ...  # english: ok
@overload
def jacobian(target: Any, of: Names = None, wrt: Wrt = None) -> Callable[..., Any]: ...  # english: ok
@checked()
def jacobian(target: Any, of: Names = None, wrt: Wrt = None) -> Any:  # english: ok
    """Compute Jacobians of shape [*output shape, *input shape].

    The new graph or model has the outputs ``jacobian/<output>/<input>``; the function returns them.
    """
    return _derived("jacobian", target, of, wrt)


@overload
def hvp(target: Graph, of: str | None = None, wrt: Wrt = None) -> Graph: ...  # english: ok
@overload
def hvp(target: Any, of: str | None = None, wrt: Wrt = None) -> Callable[..., Any]: ...  # english: ok
@checked()
def hvp(target: Any, of: str | None = None, wrt: Wrt = None) -> Any:  # english: ok
    """Compute Hessian-vector products of a scalar output with tangents of the inputs.

    The new graph or model has the inputs ``tangent/<input>`` and the gradients and ``hvp/<input>`` as outputs; the
    function is called as ``ml.hvp(f)(x, tangents=t)``.
    """
    return _derived("hvp", target, of, wrt)


@overload
def hessian(target: Graph, of: str | None = None, wrt: Wrt = None) -> Graph: ...  # english: ok
@overload
def hessian(target: Any, of: str | None = None, wrt: Wrt = None) -> Callable[..., Any]: ...  # english: ok
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


gradients = checked()(_gradients)
parse = checked()(_parse)
