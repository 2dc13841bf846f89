"""The decoder: one function for all families."""

from __future__ import annotations

from typing import Any

from mithril import ops
from mithril.models import Layer
from mithril_hub.decoder.config import DecoderConfig
from mithril_hub.decoder.feed_forward import feed_forward
from mithril_hub.decoder.places import Places
from mithril_hub.decoder.rope import rotate
from mithril_hub.weights import Weights


def decode(layer: Layer, config: DecoderConfig, tokens: Any, places: Places, last: Any, dtype: str) -> Any:
    """Return the logits of all tokens [batch, length, vocabulary], or with ``last`` of one token of each row."""
    names = config.names
    weights = Weights(layer, dtype, names.root, config)
    table = weights.param(f"{names.embedding}.weight", (config.vocabulary, config.hidden))
    x = ops.embedding(tokens, table)
    if config.embedding_scale != 1.0:
        x = x * config.embedding_scale
    if config.learned_positions:
        rows = weights.param(f"{names.positions}.weight", (config.learned_positions, config.hidden))
        x = x + ops.embedding(places.rows, rows)
    angles = {rope: rope.angles(places.rows, places.length) for rope in dict.fromkeys(config.ropes) if rope is not None}
    masks = {window: places.mask(window) for window in dict.fromkeys(config.windows)}
    for n in range(config.layers):
        rope = config.ropes[n]
        turn = None if rope is None else angles[rope]
        x = block(weights.below(names.layer.format(n)), config, n, x, places, turn, masks[config.windows[n]])
    x = weights.norm(names.final_norm, x)
    if last is not None:
        index = ops.reshape(ops.cast(last, dtype="int32"), shape=(last.shape[0], 1))
        x = ops.reshape(ops.gather_nd(x, index, batch_dims=1), shape=(x.shape[0], 1, config.hidden))
    outer = Weights(layer, dtype, "", config, transposes=False)
    if config.tied:
        bias = outer.param(f"{names.head}.bias", (config.vocabulary,), "zeros") if config.head_bias else None
        logits = ops.linear(x, table, bias)
    else:
        logits = outer.linear(names.head, x, config.vocabulary, bias=config.head_bias)
    return capped(logits, config.logit_cap)


def block(weights: Weights, config: DecoderConfig, n: int, x: Any, places: Places, turn: Any, mask: Any) -> Any:
    """Return the result of layer ``n``: attention and MLP, each with a residual."""
    names = config.names
    y = weights.norm(names.before_attention, x)
    attended = attention(weights, config, y, places, turn, mask)
    if config.parallel:
        return attended + feed_forward(weights, config, n, y) + x
    if names.after_attention:
        attended = weights.norm(names.after_attention, attended)
    x = x + attended
    y = feed_forward(weights, config, n, weights.norm(names.before_mlp, x))
    if names.after_mlp:
        y = weights.norm(names.after_mlp, y)
    return x + y


def attention(weights: Weights, config: DecoderConfig, x: Any, places: Places, turn: Any, mask: Any) -> Any:
    """Return attention of [batch, length, hidden], with keys and values in the cache if there is one."""
    names, size = config.names, config.head_size
    widths = (config.heads * size, config.kv_heads * size, config.kv_heads * size)
    if names.joint:
        joint = weights.linear(names.joint, x, sum(widths), bias=config.query_bias)
        parts = ops.split(joint, sizes=widths, axis=-1)
    else:
        projections = zip((names.query, names.key, names.value), widths, strict=True)
        parts = [weights.linear(name, x, width, bias=config.query_bias) for name, width in projections]
    q, k, v = (ops.reshape(p, shape=(*x.shape[:2], p.shape[2] // size, size)) for p in parts)
    if config.query_key_norm:
        q, k = weights.norm(names.query_norm, q), weights.norm(names.key_norm, k)
    q, k, v = (ops.transpose(p, perm=(0, 2, 1, 3)) for p in (q, k, v))
    if turn is not None:
        q, k = rotate(q, turn), rotate(k, turn)
    path = weights.path
    k, v = places.cached(weights.layer, f"{path}key_cache", k), places.cached(weights.layer, f"{path}value_cache", v)
    y = attend(q, k, v, mask, config.attention_scale, config.attention_cap)
    y = ops.reshape(ops.transpose(y, perm=(0, 2, 1, 3)), shape=(*x.shape[:2], config.heads * size))
    return weights.linear(names.output, y, config.hidden, bias=config.output_bias)


def attend(q: Any, k: Any, v: Any, mask: Any, scale: float | None, cap: float) -> Any:
    """Return attention; with ``cap`` the scores are bounded smoothly before the mask applies."""
    if not cap:
        return ops.attention(q, k, v, mask, scale=scale)
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = (
            ops.reshape(
                ops.broadcast_to(
                    ops.reshape(p, shape=(p.shape[0], p.shape[1], 1, *p.shape[2:])),
                    shape=(p.shape[0], p.shape[1], groups, *p.shape[2:]),
                ),
                shape=(p.shape[0], p.shape[1] * groups, *p.shape[2:]),
            )
            for p in (k, v)
        )
    factor = q.shape[3] ** -0.5 if scale is None else scale
    scores = capped(ops.matmul(q, ops.transpose(k, perm=(0, 1, 3, 2))) * factor, cap)
    mask = ops.reshape(mask, shape=(*[1] * (4 - len(mask.shape)), *mask.shape))
    return ops.matmul(ops.softmax(ops.where(mask, scores, float("-inf")), axis=-1), v)


def capped(x: Any, cap: float) -> Any:
    """Bound values smoothly to the interval from ``-cap`` to ``cap``; 0 means without a bound."""
    return ops.tanh(x * (1.0 / cap)) * cap if cap else x
