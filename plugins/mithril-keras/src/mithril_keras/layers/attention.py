"""Attention: multi-head with grouped keys, and of whole vectors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mithril import ops
from mithril.graph import Builder
from mithril_keras.table import layer
from mithril_keras.tensor import Tensor
from mithril_keras.weights import Weights


def _projected(weights: Weights, group: str, name: str, x: Any, heads: int, size: int, use_bias: bool) -> Any:
    """Return [batch, heads, positions, size] by the parameter [features, heads, size]."""
    inner = weights.below(group, name)
    kernel = inner.param("kernel", (x.shape[-1], heads, size))
    y = ops.matmul(x, ops.reshape(kernel, shape=(x.shape[-1], heads * size)))
    if use_bias:
        y = y + ops.reshape(inner.param("bias", (heads, size)), shape=(heads * size,))
    y = ops.reshape(y, shape=(*x.shape[:2], heads, size))
    return ops.transpose(y, perm=(0, 2, 1, 3))


def _output(weights: Weights, group: str, y: Any, features: Any, use_bias: bool) -> Any:
    """Return [batch, positions, features] by the parameter [heads, size, features]."""
    batch, heads, length, size = y.shape
    flat = ops.reshape(ops.transpose(y, perm=(0, 2, 1, 3)), shape=(batch, length, heads * size))
    inner = weights.below(group, "attention_output")
    kernel = inner.param("kernel", (heads, size, features))
    z = ops.matmul(flat, ops.reshape(kernel, shape=(heads * size, features)))
    return z + inner.param("bias", (features,)) if use_bias else z


def combined_mask(query: Tensor, value: Tensor, key: Tensor | None, explicit: Any, causal: bool) -> Any:
    """Return the conjunction of all masks, [batch or 1, 1, queries, keys], or None."""
    parts = []
    if query.mask is not None:
        parts.append(ops.unsqueeze(query.mask, axis=(1, 3)))
    parts += [ops.unsqueeze(t.mask, axis=(1, 2)) for t in (value, key) if t is not None and t.mask is not None]
    if explicit is not None:
        m = explicit.value if isinstance(explicit, Tensor) else Builder.current().constant(np.asarray(explicit))
        m = m if m.dtype.name == "bool" else ops.not_equal(m, 0)
        parts.append(m if len(m.shape) == 4 else ops.unsqueeze(m, axis=1))
    if causal:
        q, k = query.shape[1], value.shape[1]
        rows = ops.iota(shape=(1, 1, q, 1), axis=2, dtype="int32")
        parts.append(ops.less_equal(ops.iota(shape=(1, 1, 1, k), axis=3, dtype="int32"), rows))
    mask = None
    for part in parts:
        mask = part if mask is None else ops.logical_and(mask, part)
    return mask


def _attend(weights: Weights, q: Any, k: Any, v: Any, mask: Any, dropout: float, scores: bool) -> tuple[Any, Any]:
    scale = float(q.shape[-1]) ** -0.5
    if not scores and not (dropout and weights.training):
        # a query without keys attends to all keys, as a softmax of equal scores does
        bias = None if mask is None else ops.where(mask, 0.0, -1e9 if weights.dtype == "float32" else -3e4)
        return ops.attention(q, k, v, None if bias is None else ops.cast(bias, dtype=q.dtype), scale=scale), None
    shared = q.shape[1] // k.shape[1]
    if shared > 1:
        k, v = ops.repeat(k, repeats=shared, axis=1), ops.repeat(v, repeats=shared, axis=1)
    s = ops.matmul(q * scale, ops.transpose(k, perm=(0, 1, 3, 2)))
    if mask is not None:
        s = s + ops.cast(ops.where(mask, 0.0, -1e9 if weights.dtype == "float32" else -3e4), dtype=s.dtype)
    p = ops.softmax(s, axis=-1)
    dropped = ops.dropout(p, weights.key(), p=dropout) if dropout and weights.training else p
    return ops.matmul(dropped, v), p


@layer("MultiHeadAttention", masks="own")
def multi_head_attention(
    weights: Weights,
    query: Tensor,
    value: Tensor,
    key: Tensor | None = None,
    *,
    num_heads: int,
    key_dim: int,
    value_dim: int | None = None,
    dropout: float = 0.0,
    use_bias: bool = True,
    output_shape: Any = None,
    attention_axes: Sequence[int] | None = None,
    attention_mask: Any = None,
    return_attention_scores: bool = False,
    use_causal_mask: bool = False,
) -> Any:
    """Return attention of several heads."""
    if query.rank != 3 or list(attention_axes or [1]) not in ([1], [-2]):
        raise weights.unsupported(f"attention over the axes {attention_axes} of rank {query.rank}")
    size = key_dim if value_dim is None else value_dim
    q = _projected(weights, "query_dense", "query", weights.cast(query.value), num_heads, key_dim, use_bias)
    k = _projected(
        weights, "key_dense", "key", weights.cast((value if key is None else key).value), num_heads, key_dim, use_bias
    )
    v = _projected(weights, "value_dense", "value", weights.cast(value.value), num_heads, size, use_bias)
    mask = combined_mask(query, value, key, attention_mask, use_causal_mask)
    y, scores = _attend(weights, q, k, v, mask, dropout, return_attention_scores)
    features: Any = query.shape[-1] if output_shape is None else output_shape
    if isinstance(features, list):
        (features,) = features
    result = Tensor(_output(weights, "output_dense", y, features, use_bias), mask=query.mask)
    return [result, Tensor(scores)] if return_attention_scores else result


@layer("GroupQueryAttention", "GroupedQueryAttention", masks="own")
def grouped_query_attention(
    weights: Weights,
    query: Tensor,
    value: Tensor,
    key: Tensor | None = None,
    *,
    head_dim: int,
    num_query_heads: int,
    num_key_value_heads: int,
    dropout: float = 0.0,
    use_bias: bool = True,
    attention_mask: Any = None,
    return_attention_scores: bool = False,
    use_causal_mask: bool = False,
) -> Any:
    """Return attention whose query heads share key heads."""
    q = _projected(weights, "query_dense", "query", weights.cast(query.value), num_query_heads, head_dim, use_bias)
    sources = (("key", value if key is None else key), ("value", value))
    k, v = (
        _projected(weights, f"{n}_dense", n, weights.cast(t.value), num_key_value_heads, head_dim, use_bias)
        for n, t in sources
    )
    mask = combined_mask(query, value, key, attention_mask, use_causal_mask)
    y, scores = _attend(weights, q, k, v, mask, dropout, return_attention_scores)
    result = Tensor(_output(weights, "output_dense", y, query.shape[-1], use_bias), mask=query.mask)
    return [result, Tensor(scores)] if return_attention_scores else result


@layer("Attention", "AdditiveAttention", masks="own")
def attention(
    weights: Weights,
    x: Sequence[Tensor],
    *,
    use_scale: bool | None = None,
    score_mode: str | None = None,
    dropout: float = 0.0,
    return_attention_scores: bool = False,
    use_causal_mask: bool = False,
) -> Any:
    """Return attention of [query, value] or [query, value, key] by products or by sums."""
    query, value = x[0], x[1]
    key = x[2] if len(x) > 2 else value
    q, v, k = (weights.cast(t.value) for t in (query, value, key))
    additive = score_mode is None  # only Attention has the setting
    if additive:
        s = ops.tanh(ops.unsqueeze(q, axis=2) + ops.unsqueeze(k, axis=1))
        scale = weights.param("scale", (q.shape[-1],)) if use_scale is not False else None
        s = ops.sum(s if scale is None else s * scale, axis=-1)
    elif score_mode == "concat":
        scale = weights.param("scale", ()) if use_scale else None
        factor = weights.param("concat_score_weight", ())
        total = ops.unsqueeze(q, axis=2) + ops.unsqueeze(k, axis=1)
        s = ops.sum(ops.tanh(total if scale is None else total * scale), axis=-1) * factor
    else:
        s = ops.matmul(q, ops.transpose(k, perm=(0, 2, 1)))
        s = s * weights.param("scale", ()) if use_scale else s
    mask = combined_mask(query.with_mask(None), value, None, None, use_causal_mask)
    if mask is not None:
        s = ops.where(ops.squeeze(mask, axis=1), s, s - 1e9)
    p = ops.softmax(s, axis=-1)
    dropped = ops.dropout(p, weights.key(), p=dropout) if dropout and weights.training else p
    y = ops.matmul(dropped, v)
    if query.mask is not None:
        y = ops.where(ops.unsqueeze(query.mask, axis=2), y, 0.0)
    result = Tensor(y, mask=query.mask)
    return [result, Tensor(p)] if return_attention_scores else result
