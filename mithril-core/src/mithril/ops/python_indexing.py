"""NumPy-style indexing of symbolic tensors: ``x[1, ::2, None, rows]``."""

from __future__ import annotations

import builtins
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from mithril.graph import (
    Dim,
    OperationError,
    ShapeError,
    Size,
    operation,
)
from mithril.ops.slicing import END, select, slice


def getitem(x: Any, index: Any) -> Any:
    """Return ``x[index]`` as in NumPy: ints, slices, None, an Ellipsis, and at most one integer array (``take``).

    Indexing only applies operations to ``x``, so it works for graph values and model connections. Axes after an
    Ellipsis count from the end, so the rank can be unknown.
    """
    items = list(index) if isinstance(index, tuple) else [index]
    ellipses = [k for k, item in enumerate(items) if item is Ellipsis]
    if len(ellipses) > 1:
        raise OperationError("an index can contain only one '...'")
    consuming = builtins.sum(item is not None and item is not Ellipsis for item in items)
    rank = getattr(x, "ndim", None)
    if isinstance(rank, int) and consuming > rank:
        raise ShapeError(f"an index for {consuming} axes, but the operand has rank {rank}", facts=[f"index {index!r}"])
    split_at = ellipses[0] if ellipses else len(items)
    steps = _Steps()
    steps.add(items[:split_at], front=True)
    steps.add(items[split_at + 1 :][::-1], front=False)
    return steps.apply(x)


class _Steps:
    """The operations of an index, in order: slices, selected positions, new axes, one array of positions."""

    def __init__(self) -> None:
        self.slices: list[tuple[int, Any, Any, int]] = []
        self.flips: list[int] = []
        self.selected: list[tuple[int, Any]] = []
        self.new: list[int] = []
        self.array: tuple[int, Any] | None = None

    def add(self, items: Sequence[Any], *, front: bool) -> None:
        """Add items from the front, or from the back, where axis k is ``-k - 1``."""
        axis = result_axis = 0
        for item in items:
            place, result = (axis, result_axis) if front else (-axis - 1, -result_axis - 1)
            if item is None:
                self.new.append(result)
                result_axis += 1
                continue
            axis += 1
            if isinstance(item, builtins.slice):
                self._slice(item, place)
                result_axis += 1
            elif (position := _position(item)) is not None:
                self.selected.append((place, position))
            else:
                if self.array is not None:
                    raise OperationError(
                        "an index can contain only one integer array", hint="use gather_nd for several"
                    )
                self.array = (result, _array(item))
                result_axis += 1

    def _slice(self, item: Any, axis: int) -> None:
        step = 1 if item.step is None else _number(item.step, "step")
        if type(step) is not int:
            raise OperationError(f"the step of a slice cannot be the symbolic size '{step}'", hint="use an int as step")
        if item.start is None and item.stop is None and step in (1, -1):
            if step == -1:
                self.flips.append(axis)
            return
        ends = (0, END) if step > 0 else (END, -END)
        start = ends[0] if item.start is None else _number(item.start, "start")
        stop = ends[1] if item.stop is None else _number(item.stop, "stop")
        self.slices.append((axis, start, stop, step))

    def apply(self, x: Any) -> Any:
        if self.slices:
            axes, starts, stops, steps = zip(*self.slices, strict=True)
            x = slice(x, starts=starts, stops=stops, steps=steps, axes=axes)
        if self.flips:
            x = operation("flip")(x, axis=tuple(self.flips))
        if self.selected:
            axes, positions = zip(*self.selected, strict=True)
            x = select(x, index=positions, axes=axes)
        if self.new:
            x = operation("unsqueeze")(x, axis=tuple(self.new))
        if self.array is not None:
            x = operation("take")(x, self.array[1], axis=self.array[0])
        return x


def _position(item: Any) -> Any:
    """Return a single position (an int or a size), or None if the item is not one."""
    if isinstance(item, Dim):
        return item
    if isinstance(item, (bool, np.bool_)):
        raise OperationError(
            "cannot index with a bool: the result shape would depend on data", hint="use where(mask, x, 0)"
        )
    return operator.index(item) if isinstance(item, (int, np.integer)) else None


def _number(item: Any, name: str) -> Size:
    if isinstance(item, Dim):
        return item
    try:
        return operator.index(item)
    except TypeError:
        raise OperationError(
            f"the {name} of a slice cannot be a {type(item).__name__}",
            hint="use dynamic_slice for computed positions",
        ) from None


def _array(item: Any) -> Any:
    if isinstance(item, (list, np.ndarray)):
        item = np.asarray(item, dtype=None if isinstance(item, np.ndarray) or len(item) else np.int32)
    kind = getattr(item, "dtype", None)
    if kind is None and not hasattr(item, "__mithril_apply__"):
        raise OperationError(
            f"an index cannot contain a {type(item).__name__}",
            facts=["accepted: ints, slices, None, '...', one integer array"],
        )
    if str(kind) == "bool":
        raise OperationError(
            "cannot index with a bool mask: the result shape would depend on data", hint="use where(mask, x, 0)"
        )
    return item


__all__ = ["getitem"]
