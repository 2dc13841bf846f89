"""Transformer blocks without rotary positions, by the names of a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mithril import ops
from mithril_hub.weights import Weights, activate


@dataclass(frozen=True)
class BlockNames:
    """Names of the parameters of a block, below ``layer``, in which ``{}`` is its number."""

    layer: str
    query: str
    key: str
    value: str
    output: str
    attention_norm: str
    up: str
    down: str
    mlp_norm: str


@dataclass(frozen=True)
class Tower:
    """A stack of blocks; with ``pre_norm`` norms come before attention and MLP, else after the residual."""

    layers: int
    heads: int
    hidden: int
    intermediate: int
    eps: float
    activation: str
    names: BlockNames
    pre_norm: bool
    key_bias: bool = True
    norm: str = "layer"
    norm_offset: float = 0.0
    input_major: bool = False


def encode(weights: Weights, tower: Tower, x: Any, mask: Any) -> Any:
    """Return the result of all blocks for [batch, length, hidden]; ``mask`` is bool, True attends."""
    for n in range(tower.layers):
        x = _block(weights.below(tower.names.layer.format(n)), tower, x, mask)
    return x


def _block(weights: Weights, tower: Tower, x: Any, mask: Any) -> Any:
    names = tower.names
    if tower.pre_norm:
        y = weights.norm(names.attention_norm, x)
        x = x + attention(weights, tower, y, y, mask)
        return x + _mlp(weights, tower, weights.norm(names.mlp_norm, x))
    x = weights.norm(names.attention_norm, x + attention(weights, tower, x, x, mask))
    return weights.norm(names.mlp_norm, x + _mlp(weights, tower, x))


def attention(weights: Weights, tower: Tower, x: Any, memory: Any, mask: Any) -> Any:
    """Return attention of ``x`` over ``memory``, [batch, length, hidden] both."""
    k, v = keys_and_values(weights, tower, memory, tower.names)
    return attend(weights, tower, x, k, v, mask, tower.names)


def keys_and_values(weights: Weights, tower: Tower, x: Any, names: BlockNames) -> tuple[Any, Any]:
    """Return keys and values of [batch, length, hidden]."""
    return projected(weights, tower, x, names.key, tower.key_bias), projected(weights, tower, x, names.value, True)


def projected(weights: Weights, tower: Tower, x: Any, name: str, bias: bool) -> Any:
    """Return a projection as [batch, heads, length, size]."""
    return split_heads(weights.linear(name, x, tower.hidden, bias=bias), tower.heads, tower.hidden // tower.heads)


def attend(weights: Weights, tower: Tower, x: Any, k: Any, v: Any, mask: Any, names: BlockNames) -> Any:
    """Return attention of ``x`` [batch, length, hidden] over keys and values."""
    y = ops.attention(projected(weights, tower, x, names.query, True), k, v, mask)
    return weights.linear(names.output, joined_heads(y), tower.hidden, bias=True)


def split_heads(x: Any, heads: int, size: int) -> Any:
    """Return [batch, length, heads * size] as [batch, heads, length, size]."""
    return ops.transpose(ops.reshape(x, shape=(*x.shape[:2], heads, size)), perm=(0, 2, 1, 3))


def joined_heads(y: Any) -> Any:
    """Return [batch, heads, length, size] as [batch, length, heads * size]."""
    batch, heads, length, size = y.shape
    return ops.reshape(ops.transpose(y, perm=(0, 2, 1, 3)), shape=(batch, length, heads * size))


def _mlp(weights: Weights, tower: Tower, x: Any) -> Any:
    names = tower.names
    hidden = activate(tower.activation, weights.linear(names.up, x, tower.intermediate, bias=True))
    return weights.linear(names.down, hidden, tower.hidden, bias=True)


def padding_mask(mask: Any) -> Any:
    """Return which keys are tokens, [batch, 1, 1, keys], from [batch, keys] with 0 for padding."""
    if mask is None:
        return None
    return ops.reshape(ops.not_equal(mask, 0), shape=(mask.shape[0], 1, 1, mask.shape[1]))


def causal_mask(length: Any) -> Any:
    """Return the mask of a decoder: [1, 1, length, length]."""
    rows = ops.iota(shape=(1, 1, length, 1), axis=2, dtype="int32")
    columns = ops.iota(shape=(1, 1, 1, length), axis=3, dtype="int32")
    return ops.less_equal(columns, rows)


def both(a: Any, b: Any) -> Any:
    """Return the conjunction of two masks, of which one can be None."""
    return b if a is None else a if b is None else ops.logical_and(a, b)
