"""Attention and rotary embedding of the standard."""

from __future__ import annotations

import math

from mithril import ops
from mithril.graph import equal
from mithril_onnx.operators.common import float32_or_wider, int64, scalar
from mithril_onnx.table import operator
from mithril_onnx.tensors import dtype_of_code


@operator
def RotaryEmbedding(x, cos_cache, sin_cache, position_ids=None, *, interleaved=0, num_heads=0, rotary_embedding_dim=0):
    flat = x.ndim == 3
    if flat:
        x = split_heads(x, num_heads)
    if position_ids is not None:
        cos_cache, sin_cache = (ops.take(v, position_ids, axis=0) for v in (cos_cache, sin_cache))
    y = rotated(x, cos_cache, sin_cache, interleaved, rotary_embedding_dim)
    return merge_heads(y) if flat else y


def rotated(x, cos, sin, interleaved, size=0):
    """Rotate [batch, heads, length, size] by angles [batch, length, half]."""
    head = x.shape[3]
    size = size or head
    first, rest = x, None
    if size != head:
        first, rest = ops.split(x, sizes=(size, head - size), axis=3)
    cos, sin = (ops.unsqueeze(v, axis=(1,)) for v in (cos, sin))
    half = size // 2
    if interleaved:
        pairs = ops.reshape(first, shape=(*first.shape[:3], half, 2))
        a, b = (ops.select(pairs, index=(k,), axes=(4,)) for k in (0, 1))
        y = ops.reshape(ops.stack(a * cos - b * sin, a * sin + b * cos, axis=-1), shape=first.shape)
    else:
        a, b = ops.split(first, sizes=(half, half), axis=3)
        y = ops.concat(a * cos - b * sin, a * sin + b * cos, axis=3)
    return y if rest is None else ops.concat(y, rest, axis=3)


def split_heads(x, heads):
    """Return [batch, length, heads * size] as [batch, heads, length, size]."""
    n, length, width = x.shape
    return ops.transpose(ops.reshape(x, shape=(n, length, heads, width // heads)), perm=(0, 2, 1, 3))


def merge_heads(x):
    n, heads, length, size = x.shape
    return ops.reshape(ops.transpose(x, perm=(0, 2, 1, 3)), shape=(n, length, heads * size))


@operator
def Attention(
    q, k, v, mask=None, past_key=None, past_value=None, nonpad_kv_seqlen=None, *,
    is_causal=0, kv_num_heads=0, q_num_heads=0, qk_matmul_output_mode=0, scale=None, softcap=0.0, softmax_precision=0,
    left_window_size=-1, right_window_size=-1, context,
):  # fmt: skip
    flat = q.ndim == 3
    if flat:
        q, k, v = split_heads(q, q_num_heads), split_heads(k, kv_num_heads), split_heads(v, kv_num_heads)
    offset = 0
    if past_key is not None:
        offset = past_key.shape[2]
        k, v = ops.concat(past_key, k, axis=2), ops.concat(past_value, v, axis=2)
    factor = float(1.0 / math.sqrt(q.shape[3]) if scale is None else scale)
    window = left_window_size, right_window_size
    plain = not softcap and not softmax_precision and context.results < 4
    aligned = nonpad_kv_seqlen is None and window == (-1, -1) and equal(offset + q.shape[2], k.shape[2]) is True
    scores = None
    if plain and aligned:
        y = guarded(ops.attention(q, k, v, _padded(mask, k), causal=bool(is_causal), scale=factor), _padded(mask, k))
    else:
        mask = _mask(_padded(mask, k), q, k, offset, is_causal, nonpad_kv_seqlen, window)
        if plain:
            y = guarded(ops.attention(q, k, v, mask, scale=factor), mask)
        else:
            y, scores = _explicit(q, k, v, mask, factor, softcap, softmax_precision, qk_matmul_output_mode)
    y = merge_heads(y) if flat else y
    return (y, k, v, scores)[: max(context.results, 1)]


def guarded(y, mask):
    """Return zeros for queries without a key, for which softmax is not defined."""
    if mask is None:
        return y
    if mask.dtype.is_bool:
        alive = ops.any(mask, axis=-1, keepdims=True)
    else:
        alive = ops.greater(ops.max(mask, axis=-1, keepdims=True), -float("inf"))
    if alive.ndim < 4:
        alive = ops.reshape(alive, shape=(*[1] * (4 - alive.ndim), *alive.shape))
    return ops.where(alive, y, scalar(0.0, y))


def _padded(mask, k):
    """Return a mask for all keys; keys beyond a shorter one are not attended."""
    keys = k.shape[2]
    if mask is None or type(mask.shape[-1]) is not int or type(keys) is not int or mask.shape[-1] >= keys:
        return mask
    widths = ((0, 0),) * (mask.ndim - 1) + ((0, keys - mask.shape[-1]),)
    return ops.pad(mask, widths=widths, value=False if mask.dtype.is_bool else -float("inf"))


def _size(n, kind="int64"):
    return ops.cast(ops.size_value(value=n), dtype=kind)


def _mask(mask, q, k, offset, causal, lengths, window):
    """Return the mask combined with causality, lengths and window: bools, or numbers to add."""
    length, keys = q.shape[2], k.shape[2]
    columns = ops.iota(shape=(1, 1, 1, keys), axis=3, dtype="int64")
    rows = ops.iota(shape=(1, 1, length, 1), axis=2, dtype="int64")
    ends = None if lengths is None else ops.reshape(int64(lengths), shape=(-1, 1, 1, 1))
    if ends is not None and type(offset) is int and offset == 0:
        rows = rows + (ends - _size(length))
    else:
        rows = rows + _size(offset)
    conditions = [ops.greater_equal(rows, columns)] if causal else []
    if ends is not None:
        conditions.append(ops.less(columns, ends))
    left, right = window
    if left >= 0:
        conditions.append(ops.greater_equal(columns, rows - scalar(left, rows)))
    if right >= 0:
        conditions.append(ops.less_equal(columns, rows + scalar(right, rows)))
    if not conditions:
        return mask
    allowed = conditions[0]
    for condition in conditions[1:]:
        allowed = ops.logical_and(allowed, condition)
    if mask is None:
        return allowed
    if mask.dtype.is_bool:
        return ops.logical_and(mask, allowed)
    return ops.where(allowed, mask, scalar(-float("inf"), mask))


def _explicit(q, k, v, mask, factor, softcap, precision, mode):
    """Compute the scores and then their softmax; also return the requested stage of the scores."""
    kind = q.dtype
    groups = q.shape[1] // k.shape[1]
    if groups != 1:
        k, v = ops.repeat(k, repeats=groups, axis=1), ops.repeat(v, repeats=groups, axis=1)
    root = math.sqrt(factor) if factor > 0 else None
    upcast = [float32_or_wider(x) for x in (q, k, v)]
    if root is None:
        scores = ops.matmul(upcast[0] * factor, ops.transpose(upcast[1], perm=(0, 1, 3, 2)))
    else:
        scores = ops.matmul(upcast[0] * root, ops.transpose(upcast[1] * root, perm=(0, 1, 3, 2)))
    capped = softcap * ops.tanh(scores / softcap) if softcap else scores
    biased = capped
    if mask is not None:
        low = scalar(-float("inf"), capped)
        biased = ops.where(mask, capped, low) if mask.dtype.is_bool else capped + ops.cast(mask, dtype=capped.dtype)
    numeric = dtype_of_code(precision) if precision else None
    inner = biased if numeric is None or numeric.bits < 32 else ops.cast(biased, dtype=numeric)
    top = ops.max(inner, axis=-1, keepdims=True)
    dead = ops.equal(top, -float("inf"))
    p = ops.where(dead, scalar(0.0, inner), ops.softmax(ops.where(dead, scalar(0.0, inner), inner), axis=-1))
    p = ops.cast(p, dtype=scores.dtype)
    y = ops.cast(ops.matmul(p, upcast[2]), dtype=kind)
    stage = {0: scores, 1: capped, 2: biased, 3: p}.get(mode, scores)
    return y, ops.cast(stage, dtype=kind)
