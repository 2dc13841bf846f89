"""Positions of the tokens of a call, the cache of keys and values, and the masks that follow from both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mithril import ops
from mithril.ir import Builder
from mithril.models import Layer
from mithril.ops import PLACES


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
        nodes = Builder.current().nodes
        nodes[-1] = nodes[-1].replaced(tags={**nodes[-1].tags, PLACES: f"{capacity} {owner}"})
        return cls(rows, start, capacity, length=total)

    def mask(self, window: int | None) -> Any:
        """Return which keys each token attends to: bool, broadcast to [batch, heads, length, keys]."""
        length, start = self.rows.shape[-1], self.start
        last = ops.iota(shape=(length, 1), axis=0, dtype="int32")
        if start is not None:
            last = last + (ops.reshape(start, shape=(start.shape[0], 1, 1, 1)) if start.shape else start)
        columns = ops.iota(shape=(1, self.capacity if start is not None else length), axis=1, dtype="int32")
        visible = ops.less_equal(columns, last)
        if window is not None:
            visible = ops.logical_and(visible, ops.greater(columns, last - window))
        if self.keys is not None:
            batch, keys = self.keys.shape
            visible = ops.logical_and(visible, ops.reshape(self.keys, shape=(batch, 1, 1, keys)))
            visible = ops.logical_or(visible, ops.equal(columns, last))  # without a key, padding would become NaN
        return visible

    def cached(self, layer: Layer, name: str, x: Any) -> Any:
        """Write keys or values [batch, heads, length, size] to the cache of that name, and return all of it."""
        if self.start is None:
            return x
        batch, heads, _, size = x.shape
        old = layer.state(name, (batch, heads, self.capacity, size), "zeros", dtype=x.dtype)
        if len(self.start.shape) == 0:
            zero = Builder.current().constant(0, "int32")
            new = ops.dynamic_update_slice(old, x, ops.stack(zero, zero, self.start, zero, axis=0))
        else:
            new = ops.dynamic_update_rows(old, x, ops.reshape(self.start, shape=(batch,)), axis=2)
        layer.update_state(name, new)
        return new
