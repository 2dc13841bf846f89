"""The layers of a decoder, nested and named as the modules of its checkpoint."""

from __future__ import annotations

from typing import Any

from mithril import ops
from mithril.models import Layer
from mithril_hub.decoder.config import DecoderConfig, last_name
from mithril_hub.decoder.feed_forward import FeedForward, Mixture
from mithril_hub.decoder.places import Places
from mithril_hub.decoder.rope import rotate
from mithril_hub.parts import Norm, Projection, Table


class Attention(Layer):
    """Attention of [batch, length, hidden], with keys and values in the cache if there is one."""

    inputs = ("input", "places", "turn", "mask")
    scalars = True  # positions are not a value

    def __init__(self, config: DecoderConfig, dtype: str) -> None:
        self.config = config
        names, size = config.names, config.head_size
        q, kv = config.heads * size, config.kv_heads * size
        widths = {names.joint: q + 2 * kv} if names.joint else {names.query: q, names.key: kv, names.value: kv}
        for name, width in widths.items():
            part = Projection(config.hidden, width, dtype, bias=config.query_bias, input_major=config.input_major)
            setattr(self, last_name(name), part)
        output = Projection(q, config.hidden, dtype, bias=config.output_bias, input_major=config.input_major)
        setattr(self, last_name(names.output), output)
        for name in (names.query_norm, names.key_norm) if config.query_key_norm else ():
            setattr(self, last_name(name), Norm(size, config, dtype))

    def part(self, name: str) -> Any:
        """Return a layer by its name in the configuration."""
        return getattr(self, last_name(name))

    def build(self, x: Any, places: Places, turn: Any, mask: Any) -> Any:
        config, names, size = self.config, self.config.names, self.config.head_size
        if names.joint:
            q_width, width = config.heads * size, config.kv_heads * size
            parts = ops.split(self.part(names.joint)(x), sizes=(q_width, width, width), axis=-1)
        else:
            parts = [self.part(name)(x) for name in (names.query, names.key, names.value)]
        q, k, v = (ops.reshape(p, shape=(*x.shape[:2], p.shape[2] // size, size)) for p in parts)
        if config.query_key_norm:
            q, k = self.part(names.query_norm)(q), self.part(names.key_norm)(k)
        q, k, v = (ops.transpose(p, perm=(0, 2, 1, 3)) for p in (q, k, v))
        if turn is not None:
            q, k = rotate(q, turn), rotate(k, turn)
        k, v = places.cached(self, "key_cache", k), places.cached(self, "value_cache", v)
        y = attend(q, k, v, mask, config.attention_scale, config.attention_cap)
        y = ops.reshape(ops.transpose(y, perm=(0, 2, 1, 3)), shape=(*x.shape[:2], config.heads * size))
        return self.part(names.output)(y)


class Block(Layer):
    """Attention and MLP, each with a residual."""

    inputs = ("input", "places", "turn", "mask")
    scalars = True

    def __init__(self, config: DecoderConfig, n: int, dtype: str) -> None:
        self.config = config
        names = config.names
        sparse = config.experts if config.experts is not None and config.sparse[n] else None
        self.attention_name = names.output.partition(".")[0]
        self.mlp_name = (sparse.router if sparse else names.down).partition(".")[0]
        setattr(self, names.before_attention, Norm(config.hidden, config, dtype))
        setattr(self, self.attention_name, Attention(config, dtype))
        setattr(self, self.mlp_name, Mixture(config, sparse, dtype) if sparse else FeedForward(config, dtype))
        for name in (names.after_attention, "" if config.parallel else names.before_mlp, names.after_mlp):
            if name:
                setattr(self, name, Norm(config.hidden, config, dtype))

    def build(self, x: Any, places: Places, turn: Any, mask: Any) -> Any:
        names, mlp = self.config.names, getattr(self, self.mlp_name)
        y = getattr(self, names.before_attention)(x)
        attended = getattr(self, self.attention_name)(y, places, turn, mask)
        if self.config.parallel:
            return attended + mlp(y) + x
        if names.after_attention:
            attended = getattr(self, names.after_attention)(attended)
        x = x + attended
        y = mlp(getattr(self, names.before_mlp)(x))
        if names.after_mlp:
            y = getattr(self, names.after_mlp)(y)
        return x + y


class Trunk(Layer):
    """All blocks between the embedding and the last norm: ``input_ids`` to hidden states."""

    inputs = ("input_ids", "places")
    scalars = True

    def __init__(self, config: DecoderConfig, dtype: str) -> None:
        self.config = config
        names = config.names
        self.list_name = names.layer.partition(".")[0]
        setattr(self, names.embedding, Table(config.vocabulary, config.hidden, dtype))
        if config.learned_positions:
            setattr(self, names.positions, Table(config.learned_positions, config.hidden, dtype))
        setattr(self, self.list_name, [Block(config, n, dtype) for n in range(config.layers)])
        setattr(self, names.final_norm, Norm(config.hidden, config, dtype))

    def build(self, tokens: Any, places: Places) -> Any:
        config, names = self.config, self.config.names
        x = getattr(self, names.embedding)(tokens)
        if config.embedding_scale != 1.0:
            x = x * config.embedding_scale
        if config.learned_positions:
            x = x + getattr(self, names.positions)(places.rows)
        ropes = [rope for rope in dict.fromkeys(config.ropes) if rope is not None]
        angles = {rope: rope.angles(places.rows, places.length) for rope in ropes}
        masks = {window: places.mask(window) for window in dict.fromkeys(config.windows)}
        for block, rope, window in zip(getattr(self, self.list_name), config.ropes, config.windows, strict=True):
            x = block(x, places, None if rope is None else angles[rope], masks[window])
        return getattr(self, names.final_norm)(x)


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
