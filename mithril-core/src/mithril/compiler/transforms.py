"""The transformations of the public face: of graphs, of models, and of Python functions of values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mithril.backend import checked
from mithril.base import Dim, GraphError, Size, TensorType, collect_guards, matches
from mithril.compiler.frontend import Source, is_model
from mithril.compiler.transformed import InputOf, Transformed, Types
from mithril.ir import Graph, Input, Value
from mithril.transforms import same_rows, vmap_function, vmap_graph

Axis = int | None
Axes = int | Sequence[Axis] | Mapping[str, Axis]


@checked()
def vmap(target: Any, in_axes: Axes = 0, out_axes: Axes = 0, size: int | str | Dim | None = None) -> Any:
    """Return the version for all rows at once of a graph, a model or a Python function of values that is for one row.

    ``in_axes`` says where the inputs have their rows: an axis for all inputs, or a mapping from names or patterns to
    axes, with None if an input is the same for all rows. Parameters and states are the same for all rows unless they
    are named. ``out_axes`` says the same of the outputs. For functions both go by position. ``size`` is the number of
    rows, if no input has it.
    """
    if isinstance(target, Graph):
        return vmap_graph(target, _by_name("in_axes", in_axes), _by_name("out_axes", out_axes), size)
    if is_model(target):
        change = Rows(_frozen(_by_name("in_axes", in_axes)), _frozen(_by_name("out_axes", out_axes)), size)
        return Transformed(target, change)
    if callable(target):
        for name, axes in (("in_axes", in_axes), ("out_axes", out_axes)):
            if isinstance(axes, Mapping):
                raise GraphError(f"{name} of a function goes by position", hint=f"write {name}=(0, None)")
        return vmap_function(target, in_axes, out_axes, size)  # type: ignore[arg-type]
    raise _not_transformable(target)


def _not_transformable(target: Any) -> GraphError:
    return GraphError(
        f"a {type(target).__name__} cannot be transformed",
        facts=[f"got {target!r:.80}", "accepted: a Graph, a model, a Python function of values"],
    )


def _by_name(argument: str, axes: Axes) -> int | Mapping[str, Axis]:
    if isinstance(axes, (int, Mapping)):
        return axes
    raise GraphError(f"{argument} of graphs and models goes by name", hint=f"write {argument}={{'x': 0}}")


Frozen = int | tuple[tuple[str, Axis], ...]


def _frozen(axes: int | Mapping[str, Axis]) -> Frozen:
    return axes if isinstance(axes, int) else tuple(axes.items())


def _thawed(axes: Frozen) -> int | dict[str, Axis]:
    return axes if isinstance(axes, int) else dict(axes)


@dataclass(frozen=True)
class Rows:
    """The change of ``vmap``."""

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
        mapped = vmap_graph(graph, _thawed(self.in_axes), _thawed(self.out_axes), rows)
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
