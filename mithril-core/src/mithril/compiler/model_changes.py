"""Model transformations: how ``vmap`` and derivatives change inputs, types and initial values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mithril.backend import matches
from mithril.base import Dim, GraphError, Size, TensorType, assume, collect_guards
from mithril.compiler.frontend import Source
from mithril.compiler.transformed import InputOf, Types
from mithril.ir import Graph, Input, Value, cotangent_name
from mithril.transforms import (
    grad_graph,
    hessian_graph,
    hvp_graph,
    jacobian_graph,
    jvp_graph,
    same_rows,
    tangent_name,
    vjp_graph,
    vmap_graph,
)

GRAPHS: dict[str, Callable[..., Graph]] = {
    "grad": grad_graph,
    "vjp": vjp_graph,
    "jvp": jvp_graph,
    "jacobian": jacobian_graph,
    "hvp": hvp_graph,
    "hessian": hessian_graph,
}
SCALAR = ("grad", "hvp", "hessian")  # differentiate one output
Axis = int | None
Frozen = int | tuple[tuple[str, Axis], ...]


def to_hashable(axes: int | Mapping[str, Axis]) -> Frozen:
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
            declared.append(InputOf(d.name, shape, d.dtype, d.where, d.required, d.alike))
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

    def initial(self, inner: Source, inputs: Iterable[Input], seed: int) -> dict[str, np.ndarray[Any, Any]]:
        """Initialize each row of a parameter that has rows as a separate model would be, by the next seed."""
        values: dict[str, np.ndarray[Any, Any]] = {}
        axes = {i: self._axis(i.name, None) for i in inputs}
        values |= inner.initial([i for i, axis in axes.items() if axis is None], seed)
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
            rows = [inner.initial([row], seed + k)[i.name] for k in range(int(shape[place]))]
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
            seeds[tangent_name(x)] = InputOf(tangent_name(x), shape, kind, f"ml.{self.kind} by '{x}'")
        return seeds

    def inputs(self, inner: Source) -> list[InputOf]:
        plain = [InputOf(d.name, d.shape, d.dtype, d.where, d.required, d.alike) for d in inner.inputs]
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

    def initial(self, inner: Source, inputs: Iterable[Input], seed: int) -> dict[str, np.ndarray[Any, Any]]:
        return inner.initial(inputs, seed)
