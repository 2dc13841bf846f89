"""Elements by position: indexing, assignment, ``take`` and ``take_along_axis``."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from mithril import ops
from mithril.graph import DTypeError, bool_, shape_text
from mithril_array.array import Array, PositionError, as_array, call, number
from mithril_array.dtypes import PYTHON_SCALARS, part_of
from mithril_array.elementwise import astype, broadcast
from mithril_array.manipulation import reshape

INT, ALL = "int", "all"


def selected(x: Array, key: Any) -> Array:
    """Return ``x[key]``."""
    items = _items(x, key)
    if all(isinstance(p, (np.ndarray, np.generic)) for p in x.parts):
        _checked(x, items)
        return Array(x._xp, tuple(np.asarray(np.asarray(p)[items]) for p in x.parts), x.dtype)
    shape = _checked(x, items)
    if any(isinstance(i, np.ndarray) for i in items):
        positions = np.arange(x.size).reshape(x.shape)[items].reshape(-1)
        flat = reshape(x, (-1,))
        return reshape(take(flat, x._xp.asarray(positions, dtype=x._xp.default_int)), shape)
    return _basic(x, items)


def assign(x: Array, key: Any, value: Any) -> None:
    """Compute ``x[key] = value``: the array gets a new value, no other one changes."""
    items = _items(x, key)
    new = number(value, x) if isinstance(value, PYTHON_SCALARS) else as_array(value, "value")
    if new.dtype.kind == "complex" != x.dtype.kind:
        raise DTypeError(f"cannot assign {new.dtype} to elements of {x.dtype}", hint="xp.real(value)")
    new = astype(new, x.dtype)
    shape = _checked(x, items)
    if broadcast(shape, new.shape) != shape:
        raise PositionError(
            f"cannot assign shape {shape_text(new.shape)} to elements of shape {shape_text(shape)}",
            hint="both have to broadcast to the shape of the elements",
        )
    if all(isinstance(p, (np.ndarray, np.generic)) for p in x._parts):
        if not x._is_private:
            x._parts = tuple(np.array(p) for p in x._parts)
            x._is_private = True  # until the parts are read, further assignments write in place
        for part, values in zip(x._parts, new.parts, strict=True):
            part[items] = values
        return
    positions = np.arange(x.size).reshape(x.shape)[items].reshape(-1)
    if positions.size:
        index = x._xp.asarray(positions, dtype=x._xp.default_int)
        x._parts = _written(x, new, index, shape)


def _written(x: Array, new: Array, index: Array, shape: tuple[int, ...]) -> tuple[Any, ...]:
    kind = part_of(x.dtype)
    return tuple(
        call(_scattered, Array(x._xp, (old,), kind), Array(x._xp, (part,), kind), index, shape=shape).parts[0]
        for old, part in zip(x.parts, new.parts, strict=True)
    )


def _scattered(x: Any, new: Any, index: Any, *, shape: tuple[int, ...]) -> Any:
    flat = ops.reshape(x, shape=(-1,))
    rows = ops.reshape(ops.broadcast_to(new, shape=shape), shape=(-1,))
    return ops.reshape(ops.scatter(flat, index, rows, axis=0), shape=tuple(x.shape))


# -- keys ------------------------------------------------------------------------------------------------------------
def _items(x: Array, key: Any) -> tuple[Any, ...]:
    """Return the items of a key: integers, slices, None, an ellipsis, and NumPy arrays of positions or bools."""
    keys = key if isinstance(key, tuple) else (key,)
    return tuple(_item(x, k) for k in keys)


def _item(x: Array, item: Any) -> Any:
    if item is None or item is Ellipsis:
        return item
    if isinstance(item, slice):
        bounds = (None if b is None else _integer(x, b) for b in (item.start, item.stop, item.step))
        return slice(*bounds)
    if isinstance(item, Array):
        if item.dtype is not bool_ and not item.dtype.is_integer:
            raise PositionError(f"an index cannot be an array of {item.dtype}", facts=["accepted: integers, bools"])
        return item.numpy()
    return _integer(x, item)


def _integer(x: Array, item: Any) -> Any:
    if isinstance(item, (bool, np.bool_)):
        return np.asarray(item)
    try:
        return operator.index(item)
    except TypeError:
        pass
    raise PositionError(
        f"an index cannot be {item!r:.80}",
        facts=["accepted: integers, slices, ..., None, arrays of integers or bools, tuples of these"],
        hint="xp.asarray(positions)",
    )


def _checked(x: Array, items: tuple[Any, ...]) -> tuple[int, ...]:
    """Return the shape of the selected elements."""
    try:
        return tuple(np.broadcast_to(np.int8(0), x.shape)[items].shape)
    except IndexError as cause:
        raise PositionError(f"cannot index shape {shape_text(x.shape)}: {cause}") from None


def _basic(x: Array, items: tuple[Any, ...]) -> Array:
    """Select by integers and slices; integers are operands, so that one program serves all of them."""
    rest = x.ndim - sum(i is not None and i is not Ellipsis for i in items)
    k = next((k for k, item in enumerate(items) if item is Ellipsis), len(items))
    items = (*items[:k], *[slice(None)] * rest, *items[k + 1 :])
    axes = [item for item in items if item is not None]
    form = tuple(
        INT if isinstance(i, int) else i if i is None else ALL if i == slice(None) else (i.start, i.stop, i.step)
        for i in items
    )
    xp = x._xp
    array, index = xp.engine.backend.array, xp.default_int
    positions = [Array(xp, (array(np.asarray(i, index.numpy)),), index) for i in axes if isinstance(i, int)]
    kind = part_of(x.dtype)
    parts = (call(_chosen, Array(xp, (p,), kind), *positions, form=form).parts[0] for p in x.parts)
    return Array(xp, tuple(parts), x.dtype)


def _chosen(x: Any, *positions: Any, form: tuple[Any, ...]) -> Any:
    axes = [item for item in form if item is not None]
    integers = [k for k, item in enumerate(axes) if item == INT]
    for axis, position in zip(reversed(integers), reversed(positions), strict=True):
        x = ops.take(x, position, axis=axis)
    key = [None if i is None else slice(None) if i == ALL else slice(*i) for i in form if i != INT]
    return ops.getitem(x, tuple(key)) if any(k != slice(None) for k in key) else ops.reshape(x, shape=tuple(x.shape))


# -- functions -------------------------------------------------------------------------------------------------------
def _take(x: Any, indices: Any, *, axis: int) -> Any:
    return ops.take(x, indices, axis=axis)


def _along(x: Any, indices: Any, *, axis: int) -> Any:
    return ops.take_along_axis(x, indices, axis=axis)


def take(x: Array, indices: Array, /, *, axis: int | None = None) -> Array:
    """Elements at positions of an axis; positions outside are clamped."""
    x, indices = as_array(x), as_array(indices, "indices")
    if axis is None and x.ndim != 1:
        raise PositionError(f"take of {x.ndim} axes needs one of them", hint="axis=0")
    return _by_part(_take, x, indices, axis=axis or 0)


def take_along_axis(x: Array, indices: Array, /, *, axis: int = -1) -> Array:
    return _by_part(_along, as_array(x), as_array(indices, "indices"), axis=axis)


def _by_part(kernel: Any, x: Array, indices: Array, *, axis: int) -> Array:
    kind = part_of(x.dtype)
    parts = (call(kernel, Array(x._xp, (p,), kind), indices, axis=axis).parts[0] for p in x.parts)
    return Array(x._xp, tuple(parts), x.dtype)


FUNCTIONS = {"take": take, "take_along_axis": take_along_axis}
