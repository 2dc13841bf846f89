"""Caches of keys and values: the write of new tokens, the keys that each token sees, and the limit of positions."""

from __future__ import annotations

from typing import Any

from mithril import ops
from mithril.base import Size
from mithril.ir import Builder
from mithril.models.language.layer import Layer
from mithril.ops import PLACES


def write_cache(layer: Layer, name: str, x: Any, start: Any, capacity: int) -> Any:
    """Write ``x`` [batch, heads, length, size] to the layer's cache of that name, and return all of the cache.

    ``start`` is the position of the first token: [], or [batch, 1, ...] with one for each row of the batch.
    """
    batch, heads, _, size = x.shape
    old = layer.state(name, (batch, heads, capacity, size), "zeros", dtype=x.dtype)
    if start.ndim:
        new = ops.dynamic_update_rows(old, x, ops.reshape(start, shape=(batch,)), axis=2)
    else:
        zero = Builder.current().constant(0, "int32")
        new = ops.dynamic_update_slice(old, x, ops.stack(zero, zero, start, zero, axis=0))
    layer.update_state(name, new)
    return new


def visible_keys(last: Any, keys: Size, window: int | None = None) -> Any:
    """Return which of the keys each token attends to: bool, with those up to ``last`` [..., length, 1] visible."""
    columns = ops.iota(shape=(1, keys), axis=1, dtype="int32")
    visible = ops.less_equal(columns, last)
    return visible if window is None else ops.logical_and(visible, ops.greater(columns, last - window))


def limit_positions(rows: Any, size: int, owner: str) -> None:
    """Tag the positions just computed, so that a call raises if one is not below ``size``."""
    nodes = Builder.current().nodes
    assert nodes[-1].result is rows
    nodes[-1] = nodes[-1].replaced(tags={**nodes[-1].tags, PLACES: f"{size} {owner}"})
