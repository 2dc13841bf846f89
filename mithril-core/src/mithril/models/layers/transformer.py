"""Transformer layers and stacks; parameters have PyTorch's names, except the projections of the attention."""

from __future__ import annotations

from typing import Any

from mithril.models.language.arguments import positive
from mithril.models.language.layer import Layer
from mithril.models.layers.attention import MultiHeadAttention
from mithril.models.layers.linear import Linear, activation_layer
from mithril.models.layers.normalization import LayerNorm
from mithril.models.layers.shape_layers import Dropout


class TransformerEncoderLayer(Layer):
    """Self-attention and a two-layer MLP, each with a residual; ``norm_first`` normalizes before, not after."""

    inputs = ("input",)
    optional = ("mask",)

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
    ) -> None:
        self.norm_first = norm_first
        self.self_attn = MultiHeadAttention(features, heads, kv_heads=kv_heads, causal=causal, rotary=rotary)
        self.linear1 = Linear(features, feedforward or 4 * features)
        self.linear2 = Linear(feedforward or 4 * features, features)
        self.norm1, self.norm2 = LayerNorm(features, eps=eps), LayerNorm(features, eps=eps)
        self.dropout, self.dropout1, self.dropout2 = Dropout(dropout), Dropout(dropout), Dropout(dropout)
        self.activation = activation_layer(activation)

    def expects(self, terminal: str) -> Any:
        return self.self_attn.expects("query") if terminal in self.inputs else None

    def _feed(self, x: Any) -> Any:
        return self.dropout2(self.linear2(self.dropout(self.activation(self.linear1(x)))))

    def build(self, x: Any, mask: Any) -> Any:
        if self.norm_first:
            x = x + self.dropout1(self.self_attn(self.norm1(x), mask=mask))
            return x + self._feed(self.norm2(x))
        x = self.norm1(x + self.dropout1(self.self_attn(x, mask=mask)))
        return self.norm2(x + self._feed(x))


class TransformerDecoderLayer(Layer):
    """Causal self-attention, attention over ``memory``, and a two-layer MLP, each with a residual."""

    inputs = ("input", "memory")
    optional = ("mask", "memory_mask")

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
    ) -> None:
        self.norm_first = norm_first
        self.self_attn = MultiHeadAttention(features, heads, causal=causal)
        self.multihead_attn = MultiHeadAttention(features, heads)
        self.linear1 = Linear(features, feedforward or 4 * features)
        self.linear2 = Linear(feedforward or 4 * features, features)
        self.norm1, self.norm2, self.norm3 = (LayerNorm(features, eps=eps) for _ in range(3))
        self.dropout, self.dropout1 = Dropout(dropout), Dropout(dropout)
        self.dropout2, self.dropout3 = Dropout(dropout), Dropout(dropout)
        self.activation = activation_layer(activation)

    def expects(self, terminal: str) -> Any:
        return self.self_attn.expects("query") if terminal in self.inputs else None

    def _feed(self, x: Any) -> Any:
        return self.dropout3(self.linear2(self.dropout(self.activation(self.linear1(x)))))

    def _cross(self, x: Any, memory: Any, mask: Any) -> Any:
        return self.dropout2(self.multihead_attn(x, key=memory, value=memory, mask=mask))

    def build(self, x: Any, memory: Any, mask: Any, memory_mask: Any) -> Any:
        if self.norm_first:
            x = x + self.dropout1(self.self_attn(self.norm1(x), mask=mask))
            x = x + self._cross(self.norm2(x), memory, memory_mask)
            return x + self._feed(self.norm3(x))
        x = self.norm1(x + self.dropout1(self.self_attn(x, mask=mask)))
        x = self.norm2(x + self._cross(x, memory, memory_mask))
        return self.norm3(x + self._feed(x))


class TransformerEncoder(Layer):
    """``layers`` encoder layers and, with ``norm``, a final layer norm; further keywords as for one layer."""

    inputs = ("input",)
    optional = ("mask",)

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
        self.norm = LayerNorm(features, eps=eps) if norm else None

    def expects(self, terminal: str) -> Any:
        return self.layers[0].expects(terminal)

    def build(self, x: Any, mask: Any) -> Any:
        for layer in self.layers:
            x = layer(x, mask=mask)
        return x if self.norm is None else self.norm(x)


class TransformerDecoder(Layer):
    """``layers`` decoder layers over a memory; further keywords as for one layer."""

    inputs = ("input", "memory")
    optional = ("mask", "memory_mask")

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
        self.norm = LayerNorm(features, eps=eps) if norm else None

    def expects(self, terminal: str) -> Any:
        return self.layers[0].expects(terminal)

    def build(self, x: Any, memory: Any, mask: Any, memory_mask: Any) -> Any:
        for layer in self.layers:
            x = layer(x, memory, mask=mask, memory_mask=memory_mask)
        return x if self.norm is None else self.norm(x)
