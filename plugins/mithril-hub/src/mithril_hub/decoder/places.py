"""Positions of the tokens of a call, the cache of keys and values, and the masks that follow from both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mithril import ops
from mithril.models import Layer, limit_positions, visible_keys, write_cache


@dataclass(frozen=True)
class Places:
    """Positions of the tokens: ``rows`` is [length], or [batch, length] if rows of the batch are at other positions.

    Without a cache the keys are those of the call; with a cache, all positions of the cache, written at ``start``.
    """

    rows: Any
    start: Any = None  # [] or [batch]; None without a cache
    capacity: int = 0
    keys: Any = None  # bool [batch, keys]: keys of tokens, not of padding
    length: Any = None  # tokens of the sequence so far

    @classmethod
    def of(cls, tokens: Any, position: Any, capacity: int | None, keys: Any, total: Any, owner: str) -> Places:
        """Return the positions of ``tokens`` [batch, length] from ``position`` of the first of each row."""
        length = tokens.shape[1]
        rows = ops.iota(shape=(length,), axis=0, dtype="int32")
        if capacity is None:
            keys = None if keys is None else ops.not_equal(keys, 0)
            return cls(rows, keys=keys, length=ops.cast(ops.size_value(value=length), dtype="int32"))
        start = ops.cast(position, dtype="int32")
        if len(start.shape) == 1:
            start = ops.reshape(start, shape=(start.shape[0], 1))
            rows = ops.reshape(rows, shape=(1, length))
        rows = rows + start
        limit_positions(rows, capacity, owner)
        return cls(rows, start, capacity, length=total)

    def mask(self, window: int | None) -> Any:
        """Return which keys each token attends to: bool, broadcast to [batch, heads, length, keys]."""
        length, start = self.rows.shape[-1], self.start
        last = ops.iota(shape=(length, 1), axis=0, dtype="int32")
        if start is not None:
            last = last + (ops.reshape(start, shape=(start.shape[0], 1, 1, 1)) if start.shape else start)
        visible = visible_keys(last, length if start is None else self.capacity, window)
        if self.keys is not None:
            batch, keys = self.keys.shape
            visible = ops.logical_and(visible, ops.reshape(self.keys, shape=(batch, 1, 1, keys)))
            itself = ops.equal(ops.iota(shape=(1, length), axis=1, dtype="int32"), last)
            visible = ops.logical_or(visible, itself)  # without a key, padding would become NaN
        return visible

    def cached(self, layer: Layer, name: str, x: Any) -> Any:
        """Write keys or values [batch, heads, length, size] to the cache of that name, and return all of it."""
        return x if self.start is None else write_cache(layer, name, x, self.start, self.capacity)


def selected(x: Any, last: Any) -> Any:
    """Return one token of each row of [batch, length, hidden] as [batch, 1, hidden]; all of them without ``last``."""
    if last is None:
        return x
    index = ops.reshape(ops.cast(last, dtype="int32"), shape=(last.shape[0], 1))
    return ops.reshape(ops.gather_nd(x, index, batch_dims=1), shape=(x.shape[0], 1, x.shape[2]))
