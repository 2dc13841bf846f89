"""Attention with masks, grouped heads and a key-value cache; learned, sinusoidal and rotary positions."""

from __future__ import annotations

from typing import Any

import numpy as np

from mithril import ops
from mithril.graph import ModelError, ShapeError, Size, Value, float32
from mithril.models.language.arguments import expect_rank, expect_size, positive, probability
from mithril.models.language.caching import cached, combined, limit_positions, start_of
from mithril.models.language.layer import Layer
from mithril.models.language.trace_context import join_path
from mithril.models.layers.linear import Linear
from mithril.models.layers.shape_layers import Dropout

FULL = "[batch, length, features]"


class MultiHeadAttention(Layer):
    """Attention of ``query`` over ``key`` and ``value`` (default: ``query``), all [batch, length, features].

    Parameters: ``query.weight [heads*size, in]``, ``key`` and ``value`` ``[kv_heads*size, in]``, ``output``, each with
    a bias. With ``kv_heads`` below ``heads``, groups of heads share keys and values. ``mask`` is bool (True attends) or
    additive, and broadcasts to [batch, heads, queries, keys]. With ``cache=n`` the attention is causal, whatever
    ``causal`` is; the keys and values of n positions are states, and ``position`` is that of the first token of a call:
    one for all rows of the batch, or one for each (default: the position of the model, ``Layer.first_position``).
    """

    inputs: tuple[str, ...] = ("query",)

    def __init__(
        self,
        features: int | None = None,
        heads: int = 8,
        *,
        kv_heads: int | None = None,
        causal: bool = False,
        dropout: float = 0.0,
        bias: bool = True,
        rotary: bool | float = False,
        cache: int | None = None,
    ) -> None:
        self.features = features
        self.heads = positive("MultiHeadAttention", "heads", heads)
        self.kv_heads = positive("MultiHeadAttention", "kv_heads", heads if kv_heads is None else kv_heads)
        if self.heads % self.kv_heads:
            raise ModelError(f"MultiHeadAttention: kv_heads={kv_heads} does not divide heads={heads}")
        if features is not None and features % heads:
            raise ModelError(f"MultiHeadAttention: heads={heads} does not divide the {features} features")
        self.causal = causal
        self.bias = bias
        self.rotary = RotaryEmbedding(base=10000.0 if rotary is True else float(rotary)) if rotary else None
        self.capacity = cache
        self.dropout = Dropout(probability("MultiHeadAttention", dropout))
        shared = None if features is None else self.kv_heads * (features // self.heads)
        self.projections: list[Layer] = [Linear(n, bias=bias) for n in (features, shared, shared, features)]
        for projection, name in zip(self.projections, ("query", "key", "value", "output"), strict=True):
            self._children[projection] = name
        self.optional = ("position", "mask") if cache else ("key", "value", "mask")

    def expects(self, terminal: str) -> Any:
        if terminal in ("query", "key", "value"):
            return (None, None, self.features), None
        return ((), "int32") if terminal == "position" else None

    def build(self, *inputs: Any) -> Any:
        if self.capacity:
            query, position, mask = inputs
            key = value = None
            start = position if self.rotary is None or position is not None else self.first_position(query)
        else:
            query, key, value, mask = inputs
            start = position = None
        expect_rank(query, 3, layout=FULL)
        width = expect_size(query, -1, self.features, "features")
        if not isinstance(width, int) or width % self.heads:
            raise ShapeError(f"{width} features cannot be split over {self.heads} heads", facts=[f"query {query.type}"])
        key = query if key is None else key
        value = key if value is None else value
        size = width // self.heads
        shared = self.kv_heads * size
        sources = zip(self.projections, (width, shared, shared, width), (query, key, value, query), strict=True)
        for projection, out, source in sources:
            weight = join_path(self.context.parameter_scope, f"{self.child_name(projection)}.weight")
            self.context.derived[weight] = (out, source.shape[-1])
        project_query, project_key, project_value, project_output = self.projections
        q = self._split(project_query(query), self.heads, size)
        k = self._split(project_key(key), self.kv_heads, size)
        v = self._split(project_value(value), self.kv_heads, size)
        if self.rotary is not None:
            q, k = self.rotary(q, start), self.rotary(k, start)
        if self.capacity:
            k, v, visible = cached(self, k, v, self.capacity, start=position)
            mask = visible if mask is None else combined(mask, visible)
        y = ops.attention(q, k, v, mask, causal=self.causal and not self.capacity)
        y = ops.reshape(ops.transpose(y, perm=(0, 2, 1, 3)), shape=(*query.shape[:2], width))
        return self.dropout(project_output(y))

    @staticmethod
    def _split(x: Any, heads: int, size: int) -> Any:
        return ops.transpose(ops.reshape(x, shape=(*x.shape[:2], heads, size)), perm=(0, 2, 1, 3))


class PositionalEmbedding(Layer):
    """A learned vector per position, added to [batch, length, features]; ``position`` is that of the first token."""

    inputs = ("input",)
    optional = ("position",)
    weights = ("weight",)

    def __init__(self, length: int, init: str = "normal(std=0.02)") -> None:
        self.length = positive("PositionalEmbedding", "length", length)
        self.init = init

    def build(self, x: Value, position: Value | None) -> Any:
        expect_rank(x, 3, layout=FULL)
        table = self.param("weight", (self.length, x.shape[2]), self.init)
        if position is not None:
            rows = ops.iota(shape=(x.shape[1],), axis=0, dtype="int32") + start_of(position, 2, x.shape[0])
            limit_positions(rows, self.length, type(self).__name__)
            return x + ops.embedding(rows, table)
        if isinstance(x.shape[1], int) and x.shape[1] > self.length:
            raise ShapeError(f"{x.shape[1]} positions, the layer has {self.length}", facts=[f"input {x.type}"])
        return x + table[: x.shape[1]]  # the slice adds a guard for a dynamic length


def _angles(length: Size, size: int, base: float, position: Value | None, dtype: Any) -> Any:
    """Return position times frequency: [length, size // 2] in at least float32, after the axes of ``position``."""
    kind = dtype if dtype.bits > 32 else float32
    frequencies = (base ** (-np.arange(0, size, 2) / size)).astype(kind.numpy)
    rows = ops.iota(shape=(length, 1), axis=0, dtype=kind)
    if position is not None:
        rows = rows + ops.cast(position, dtype=kind)
    return rows * frequencies[None, :]


class SinusoidalEmbedding(Layer):
    """Sinusoidal position encoding, added to [batch, length, features]."""

    optional = ("position",)

    def __init__(self, base: float = 10000.0) -> None:
        self.base = base

    def build(self, x: Value, position: Value | None) -> Any:
        expect_rank(x, 3, layout=FULL)
        size = x.shape[2]
        if not isinstance(size, int) or size % 2:
            raise ShapeError(
                f"sinusoidal positions require an even number of features, got {size}", facts=[f"input {x.type}"]
            )
        start = None if position is None else start_of(position, 3, x.shape[0])
        angles = _angles(x.shape[1], size, self.base, start, x.dtype)
        waves = ops.stack(ops.sin(angles), ops.cos(angles), axis=-1)
        return x + ops.cast(ops.reshape(waves, shape=(*angles.shape[:-1], size)), dtype=x.dtype)


class RotaryEmbedding(Layer):
    """Pairs of features rotated by an angle proportional to the position, on [batch, heads, length, size]."""

    optional = ("position",)

    def __init__(self, base: float = 10000.0, interleaved: bool = False) -> None:
        self.base = base
        self.interleaved = interleaved

    def build(self, x: Value, position: Value | None) -> Any:
        expect_rank(x, 4, layout="[batch, heads, length, size]")
        size = x.shape[3]
        if not isinstance(size, int) or size % 2:
            raise ShapeError(f"rotary positions require an even head size, got {size}", facts=[f"input {x.type}"])
        start = None if position is None else start_of(position, 4, x.shape[0])
        angles = _angles(x.shape[2], size, self.base, start, x.dtype)
        cos, sin = ops.cast(ops.cos(angles), dtype=x.dtype), ops.cast(ops.sin(angles), dtype=x.dtype)
        return ops.rotary_embedding(x, cos, sin, interleaved=self.interleaved)
