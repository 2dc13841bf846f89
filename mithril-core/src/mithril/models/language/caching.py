"""States of the tokens before a call: positions, and caches of keys and values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mithril import ops
from mithril.graph import PLACES, Builder, ShapeError, Size, Value, equal
from mithril.models.language.arguments import expect_rank, positive

if TYPE_CHECKING:
    from mithril.models.language.layer import Layer

HEADS = "[batch, heads, length, size]"


def cached(
    layer: Layer, keys: Value, values: Value, length: int, window: int | None = None, start: Value | None = None
) -> tuple[Value, Value, Value]:
    """Return the keys and values that the tokens of a call attend to, and the mask; see ``Layer.cache``.

    The default of ``start``, the position of the first token, is the position of the model.
    """
    title = f"{type(layer).__name__}: cache"
    positive(title, "length", length)
    if window is not None:
        positive(title, "window", window)
    for x in (keys, values):
        expect_rank(x, 4, layout=HEADS)
    if any(equal(a, b) is False for a, b in zip(keys.shape[:3], values.shape[:3], strict=True)):
        raise ShapeError(
            "keys and values differ in batch, heads or length", facts=[f"keys {keys.type}", f"values {values.type}"]
        )
    rows = ops.iota(shape=(keys.shape[2], 1), axis=0, dtype="int32")
    if layer.training and start is None:
        return keys, values, visible_keys(rows, keys.shape[2], window)
    start = layer.context.position(keys.shape[0], keys.shape[2]) if start is None else start
    start = start_of(start, 4, keys.shape[0])
    keys, values = (write_cache(layer, n, x, start, length) for n, x in (("cache_key", keys), ("cache_value", values)))
    rows = rows + start
    limit_positions(rows, length, type(layer).__name__)
    return keys, values, visible_keys(rows, length, window)


def start_of(position: Value, rank: int, batch: Size) -> Any:
    """Return the position of the first tokens: [], or one for each row of the batch, [batch, 1, ...] of a rank."""
    expect_rank(position, 0, 1, layout="[] or [batch]")
    axes = () if position.shape in ((), (1,)) else (*position.shape, *[1] * (rank - 1))
    if axes and equal(axes[0], batch) is False:  # None: the size of the batch varies
        raise ShapeError(
            f"'position' has {axes[0]} elements, and the batch has {batch} rows",
            facts=[f"position {position.type}"],
            hint=f"pass one position, of shape [], or one for each row, [{batch}]",
        )
    return ops.reshape(ops.cast(position, dtype="int32"), shape=axes)


def write_cache(layer: Layer, name: str, x: Any, start: Any, capacity: int) -> Any:
    """Write ``x`` [batch, heads, length, size] to the layer's cache of that name, and return all of the cache.

    ``start`` is the position of the first token: [], or [batch, 1, ...] with one for each row of the batch. A layer
    that a model uses several times has a cache for each use.
    """
    uses = 0
    while layer.context.is_updated(layer, state := f"{uses}.{name}" if uses else name):
        uses += 1
    batch, heads, _, size = x.shape
    old = layer.state(state, (batch, heads, capacity, size), "zeros", dtype=x.dtype)
    if start.ndim:
        new = ops.dynamic_update_rows(old, x, ops.reshape(start, shape=(batch,)), axis=2)
    else:
        zero = Builder.current().constant(0, "int32")
        new = ops.dynamic_update_slice(old, x, ops.stack(zero, zero, start, zero, axis=0))
    layer.update_state(state, new)
    return new


def visible_keys(last: Any, keys: Size, window: int | None = None) -> Any:
    """Return which of the keys each token attends to: bool, with those up to ``last`` [..., length, 1] visible."""
    columns = ops.iota(shape=(1, keys), axis=1, dtype="int32")
    visible = ops.less_equal(columns, last)
    return visible if window is None else ops.logical_and(visible, ops.greater(columns, last - window))


def combined(mask: Any, visible: Any) -> Any:
    """Return a mask, bool or additive, that also excludes the keys that are not visible."""
    return ops.logical_and(mask, visible) if mask.dtype.is_bool else ops.where(visible, mask, float("-inf"))


def limit_positions(rows: Any, size: int, owner: str) -> None:
    """Tag the positions just computed, so that a call raises if one is not below ``size``."""
    nodes = Builder.current().nodes
    assert nodes[-1].result is rows
    nodes[-1] = nodes[-1].replaced(tags={**nodes[-1].tags, PLACES: f"{size} {owner}"})
