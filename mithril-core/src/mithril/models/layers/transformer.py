"""Transformer layers and stacks; parameters have PyTorch's names, except the projections of the attention."""

from __future__ import annotations

from typing import Any

from mithril.graph import ModelError
from mithril.models.language.arguments import positive
from mithril.models.language.layer import Layer
from mithril.models.layers.attention import MultiHeadAttention
from mithril.models.layers.linear import Linear, activation_layer
from mithril.models.layers.normalization import LayerNorm
from mithril.models.layers.shape_layers import Dropout


def _expected(attention: MultiHeadAttention, terminal: str) -> Any:
    return attention.expects("position" if terminal == "position" else "query")


def _named(layer: Layer, values: tuple[Any, ...]) -> dict[str, Any]:
    """Return the inputs after the first by name, as ``position`` is among them only with a cache."""
    return dict(zip((*layer.inputs, *layer.optional)[1:], values, strict=True))


class TransformerEncoderLayer(Layer):
    """Self-attention and a two-layer MLP, each with a residual; ``norm_first`` normalizes before, not after.

    With ``cache=n`` the attention is causal, whatever ``causal`` is, and keeps the keys and values of n positions as
    states; ``position`` is the position of the first token of the call (default: that of the model).
    """

    inputs = ("input",)
    optional: tuple[str, ...] = ("mask",)

    def __init__(
        self,
        features: int,
        heads: int = 8,
        feedforward: int | None = None,
        *,
        dropout: float = 0.1,
        activation: str = "relu",
        norm_first: bool = False,
        causal: bool = False,
        kv_heads: int | None = None,
        rotary: bool | float = False,
        eps: float = 1e-5,
        cache: int | None = None,
    ) -> None:
        self.norm_first = norm_first
        self.self_attn = MultiHeadAttention(
            features, heads, kv_heads=kv_heads, causal=causal, rotary=rotary, cache=cache
        )
        self.optional = ("position", "mask") if cache else ("mask",)
        self.linear1 = Linear(features, feedforward or 4 * features)
        self.linear2 = Linear(feedforward or 4 * features, features)
        self.norm1, self.norm2 = LayerNorm(features, eps=eps), LayerNorm(features, eps=eps)
        self.dropout, self.dropout1, self.dropout2 = Dropout(dropout), Dropout(dropout), Dropout(dropout)
        self.activation = activation_layer(activation)

    def expects(self, terminal: str) -> Any:
        return _expected(self.self_attn, terminal) if terminal in (*self.inputs, "position") else None

    def _feed(self, x: Any) -> Any:
        return self.dropout2(self.linear2(self.dropout(self.activation(self.linear1(x)))))

    def build(self, x: Any, *optional: Any) -> Any:
        options = _named(self, optional)
        if self.norm_first:
            x = x + self.dropout1(self.self_attn(self.norm1(x), **options))
            return x + self._feed(self.norm2(x))
        x = self.norm1(x + self.dropout1(self.self_attn(x, **options)))
        return self.norm2(x + self._feed(x))


class TransformerDecoderLayer(Layer):
    """Causal self-attention, attention over ``memory``, and a two-layer MLP, each with a residual.

    With ``cache=n`` the self-attention keeps the keys and values of n positions as states; ``position`` is the position
    of the first token of the call (default: that of the model).
    """

    inputs = ("input", "memory")
    optional: tuple[str, ...] = ("mask", "memory_mask")

    def __init__(
        self,
        features: int,
        heads: int = 8,
        feedforward: int | None = None,
        *,
        dropout: float = 0.1,
        activation: str = "relu",
        norm_first: bool = False,
        causal: bool = True,
        eps: float = 1e-5,
        cache: int | None = None,
    ) -> None:
        if cache and not causal:
            raise ModelError(
                f"TransformerDecoderLayer: causal=False with cache={cache}: attention over a cache is causal",
                hint="omit causal=False, or omit cache=",
            )
        self.norm_first = norm_first
        self.self_attn = MultiHeadAttention(features, heads, causal=causal, cache=cache)
        self.optional = ("position", "mask", "memory_mask") if cache else ("mask", "memory_mask")
        self.multihead_attn = MultiHeadAttention(features, heads)
        self.linear1 = Linear(features, feedforward or 4 * features)
        self.linear2 = Linear(feedforward or 4 * features, features)
        self.norm1, self.norm2, self.norm3 = (LayerNorm(features, eps=eps) for _ in range(3))
        self.dropout, self.dropout1 = Dropout(dropout), Dropout(dropout)
        self.dropout2, self.dropout3 = Dropout(dropout), Dropout(dropout)
        self.activation = activation_layer(activation)

    def expects(self, terminal: str) -> Any:
        return _expected(self.self_attn, terminal) if terminal in (*self.inputs, "position") else None

    def _feed(self, x: Any) -> Any:
        return self.dropout3(self.linear2(self.dropout(self.activation(self.linear1(x)))))

    def _cross(self, x: Any, memory: Any, mask: Any) -> Any:
        return self.dropout2(self.multihead_attn(x, key=memory, value=memory, mask=mask))

    def build(self, x: Any, memory: Any, *optional: Any) -> Any:
        options = _named(self, (memory, *optional))
        memory, memory_mask = options.pop("memory"), options.pop("memory_mask")
        if self.norm_first:
            x = x + self.dropout1(self.self_attn(self.norm1(x), **options))
            x = x + self._cross(self.norm2(x), memory, memory_mask)
            return x + self._feed(self.norm3(x))
        x = self.norm1(x + self.dropout1(self.self_attn(x, **options)))
        x = self.norm2(x + self._cross(x, memory, memory_mask))
        return self.norm3(x + self._feed(x))


class TransformerEncoder(Layer):
    """``layers`` encoder layers and, with ``norm``, a final layer norm; further keywords as for one layer."""

    inputs = ("input",)
    optional: tuple[str, ...] = ("mask",)

    def __init__(
        self,
        layers: int,
        features: int,
        heads: int = 8,
        feedforward: int | None = None,
        *,
        norm: bool = False,
        eps: float = 1e-5,
        **options: Any,
    ) -> None:
        count = positive("TransformerEncoder", "layers", layers)
        self.layers = [TransformerEncoderLayer(features, heads, feedforward, eps=eps, **options) for _ in range(count)]
        self.optional = self.layers[0].optional
        self.norm = LayerNorm(features, eps=eps) if norm else None

    def expects(self, terminal: str) -> Any:
        return self.layers[0].expects(terminal)

    def build(self, x: Any, *optional: Any) -> Any:
        for layer in self.layers:
            x = layer(x, **_named(self, optional))
        return x if self.norm is None else self.norm(x)


class TransformerDecoder(Layer):
    """``layers`` decoder layers over a memory; further keywords as for one layer."""

    inputs = ("input", "memory")
    optional: tuple[str, ...] = ("mask", "memory_mask")

    def __init__(
        self,
        layers: int,
        features: int,
        heads: int = 8,
        feedforward: int | None = None,
        *,
        norm: bool = False,
        eps: float = 1e-5,
        **options: Any,
    ) -> None:
        count = positive("TransformerDecoder", "layers", layers)
        self.layers = [TransformerDecoderLayer(features, heads, feedforward, eps=eps, **options) for _ in range(count)]
        self.optional = self.layers[0].optional
        self.norm = LayerNorm(features, eps=eps) if norm else None

    def expects(self, terminal: str) -> Any:
        return self.layers[0].expects(terminal)

    def build(self, x: Any, *others: Any) -> Any:
        for layer in self.layers:
            x = layer(x, **_named(self, others))
        return x if self.norm is None else self.norm(x)
