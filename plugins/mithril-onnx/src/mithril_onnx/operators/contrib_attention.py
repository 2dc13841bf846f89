"""Attention of the domain com.microsoft, and its rotary embedding."""

from __future__ import annotations

import math

from mithril import ops
from mithril.graph import OperationError, UnsupportedError
from mithril_onnx.operators.attention_ops import guarded, merge_heads, rotated, split_heads
from mithril_onnx.operators.common import int64, scalar
from mithril_onnx.operators.contrib import contrib
from mithril_onnx.table import Weight


def _padding(mask, batch, keys):
    """Return which keys a mask allows, as bools: lengths [batch], or ones [batch, keys] or [batch, queries, keys]."""
    if mask is None:
        return None
    if mask.ndim == 1:
        columns = ops.iota(shape=(1, 1, 1, keys), axis=3, dtype=mask.dtype)
        if mask.shape[0] != batch and type(batch) is int:
            raise UnsupportedError("a mask of begins and ends is not supported")
        return ops.less(columns, ops.reshape(mask, shape=(-1, 1, 1, 1)))
    allowed = ops.not_equal(mask, scalar(0, mask))
    return ops.unsqueeze(allowed, axis=(1, 2) if mask.ndim == 2 else (1,))


def _combined(allowed, bias, filter_value, like):
    """Return one mask: numbers to add if there is a bias or a filter value, else bools."""
    if allowed is None:
        return bias
    added = ops.where(allowed, scalar(0.0, like), scalar(filter_value, like))
    return added if bias is None else bias + added


def _causal(q, k):
    length, keys = q.shape[2], k.shape[2]
    rows = ops.iota(shape=(1, 1, length, 1), axis=2, dtype="int64") + _size(keys - length)
    return ops.less_equal(ops.iota(shape=(1, 1, 1, keys), axis=3, dtype="int64"), rows)


def _size(n):
    return ops.cast(ops.size_value(value=n), dtype="int64")


def _attend(q, k, v, allowed, bias, filter_value, unidirectional, scale):
    factor = float(scale) if scale else 1.0 / math.sqrt(q.shape[3])
    mask = _combined(allowed, bias, filter_value, q)
    return ops.attention(q, k, v, mask, causal=bool(unidirectional), scale=factor)


@contrib
def MultiHeadAttention(
    query, key=None, value=None, bias: Weight = None, key_padding_mask=None, attention_bias=None, past_key=None,
    past_value=None, past_sequence_length=None, cache_indirection=None, *,
    num_heads, mask_filter_value=-10000.0, scale=0.0, unidirectional=0, context,
):  # fmt: skip
    if past_sequence_length is not None or cache_indirection is not None:
        raise UnsupportedError("MultiHeadAttention with a shared cache is not supported")
    if query.ndim == 5:
        parts = [ops.select(query, index=(k,), axes=(3,)) for k in range(3)]
        query, key, value = (ops.reshape(p, shape=(*p.shape[:2], p.shape[2] * p.shape[3])) for p in parts)
    elif key is not None and key.ndim == 5:
        parts = [ops.select(key, index=(k,), axes=(3,)) for k in range(2)]
        key, value = (ops.reshape(p, shape=(*p.shape[:2], p.shape[2] * p.shape[3])) for p in parts)
    if key is None or value is None:
        raise OperationError("MultiHeadAttention has no keys or values")
    if bias is not None:
        width = query.shape[2]
        rest = bias.shape[0] - 2 * width
        bq, bk, bv = ops.split(bias, sizes=(width, width, rest), axis=0)
        query = query + bq
        key, value = (key + bk if key.ndim == 3 else key), (value + bv if value.ndim == 3 else value)
    q = split_heads(query, num_heads)
    k, v = (split_heads(x, num_heads) if x.ndim == 3 else x for x in (key, value))
    if past_key is not None:
        k, v = ops.concat(past_key, k, axis=2), ops.concat(past_value, v, axis=2)
    allowed = _padding(key_padding_mask, q.shape[0], k.shape[2])
    y = _attend(q, k, v, allowed, attention_bias, mask_filter_value, unidirectional, scale)
    return (merge_heads(y), k, v)[: max(context.results, 1)]


@contrib(name="Attention")
def MicrosoftAttention(
    x, weights: Weight, bias: Weight = None, mask_index=None, past=None, attention_bias=None,
    past_sequence_length=None, *,
    num_heads, do_rotary=0, mask_filter_value=-10000.0, past_present_share_buffer=0, qkv_hidden_sizes=None,
    rotary_embedding_dim=0, scale=0.0, unidirectional=0, context,
):  # fmt: skip
    if do_rotary or past_present_share_buffer or past_sequence_length is not None:
        raise UnsupportedError("com.microsoft.Attention with rotary positions or a shared cache is not supported")
    total = weights.shape[1]
    sizes = tuple(qkv_hidden_sizes) if qkv_hidden_sizes else (total // 3,) * 3
    qkv = ops.matmul(x, weights)
    if bias is not None:
        qkv = qkv + bias
    q, k, v = (split_heads(p, num_heads) for p in ops.split(qkv, sizes=sizes, axis=2))
    if past is not None:
        k, v = (ops.concat(ops.select(past, index=(j,), axes=(0,)), new, axis=2) for j, new in enumerate((k, v)))
    allowed = _padding(mask_index, q.shape[0], k.shape[2])
    y = _attend(q, k, v, allowed, attention_bias, mask_filter_value, unidirectional, scale)
    present = ops.stack(k, v, axis=0) if context.results > 1 else None
    return (merge_heads(y), present)[: max(context.results, 1)]


@contrib
def GroupQueryAttention(
    query, key=None, value=None, past_key=None, past_value=None, seqlens_k=None, total_sequence_length=None,
    cos_cache=None, sin_cache=None, position_ids=None, attention_bias=None, head_sink=None, *,
    num_heads, kv_num_heads, do_rotary=0, local_window_size=-1, rotary_interleaved=0, scale=0.0, smooth_softmax=0,
    softcap=0.0, kv_cache_bit_width=0, k_quant_type="NONE", v_quant_type="NONE", qk_output=0, context,
):  # fmt: skip
    if head_sink is not None or smooth_softmax > 0 or kv_cache_bit_width or softcap:
        raise UnsupportedError("GroupQueryAttention with sinks, soft caps or a quantized cache is not supported")
    if key is None:
        size = query.shape[2] // (num_heads + 2 * kv_num_heads)
        widths = (num_heads * size, kv_num_heads * size, kv_num_heads * size)
        query, key, value = ops.split(query, sizes=widths, axis=2)
    q, k, v = split_heads(query, num_heads), split_heads(key, kv_num_heads), split_heads(value, kv_num_heads)
    length = q.shape[2]
    past = past_key.shape[2] if past_key is not None else 0
    if do_rotary:
        places = ops.iota(shape=(1, length), axis=1, dtype="int64") + _size(past)
        if position_ids is not None:
            places = int64(position_ids)
        cos, sin = (ops.take(c, places, axis=0) for c in (cos_cache, sin_cache))
        rotary_size = 2 * cos_cache.shape[1]
        q, k = (rotated(x, cos, sin, rotary_interleaved, rotary_size) for x in (q, k))
    if past_key is not None and not (type(past) is int and past == 0):
        k, v = ops.concat(past_key, k, axis=2), ops.concat(past_value, v, axis=2)
    allowed = _causal(q, k)
    columns = ops.iota(shape=(1, 1, 1, k.shape[2]), axis=3, dtype="int64")
    if seqlens_k is not None:
        allowed = ops.logical_and(allowed, ops.less_equal(columns, ops.reshape(int64(seqlens_k), shape=(-1, 1, 1, 1))))
    if local_window_size > 0:
        rows = ops.iota(shape=(1, 1, length, 1), axis=2, dtype="int64") + _size(k.shape[2] - length)
        allowed = ops.logical_and(allowed, ops.greater(columns, rows - scalar(local_window_size, rows)))
    factor = float(scale) if scale else 1.0 / math.sqrt(q.shape[3])
    mask = allowed if attention_bias is None else ops.where(allowed, attention_bias, scalar(-float("inf"), q))
    y = guarded(ops.attention(q, k, v, mask, scale=factor), mask)
    return (merge_heads(y), k, v)[: max(context.results, 1)]


@contrib
def RotaryEmbedding(
    x, position_ids, cos_cache: Weight, sin_cache: Weight, *,
    interleaved=0, is_packed_batching=0, num_heads=0, rotary_embedding_dim=0, scale=1.0,
):  # fmt: skip
    if is_packed_batching or scale != 1.0:
        raise UnsupportedError("com.microsoft.RotaryEmbedding with packed batches or a scale is not supported")
    flat = x.ndim == 3
    size = rotary_embedding_dim or 2 * cos_cache.shape[1]
    if flat:
        x = split_heads(x, num_heads or x.shape[2] // size)
    if position_ids.ndim == 1:
        places = ops.iota(shape=(1, x.shape[2]), axis=1, dtype="int64") + int64(position_ids)
    else:
        places = position_ids
    cos, sin = (ops.take(c, places, axis=0) for c in (cos_cache, sin_cache))
    y = rotated(x, cos, sin, interleaved, size)
    return merge_heads(y) if flat else y
