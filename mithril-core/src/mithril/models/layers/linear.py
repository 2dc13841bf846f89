"""Dense layers: Linear, Embedding, MLP."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from mithril import ops
from mithril.graph import ModelError, Value, operation, unknown
from mithril.models.language.arguments import expect_size, in_and_out_or_weight, positive, size_or_weight
from mithril.models.language.layer import Layer
from mithril.models.layers import operation_layers
from mithril.models.layers.operation_layers import OperationLayer


class Linear(Layer):
    """``x @ weight.T + bias``: ``Linear(out)``, ``Linear(in, out)`` or ``Linear(dimension=out)``.

    ``Linear(None)`` takes the number of features from its weight: a connected one, or that in ``pretrained``.
    """

    weights = ("weight", "bias")
    weight_name = "weight"  # of the parameter, which imported layers name as their source
    input_major = False  # whether the weight is [in, out]

    def __init__(
        self, *features: int | None, dimension: int | None = None, bias: bool = True, init: str | None = None
    ) -> None:
        self.in_features, self.out_features = in_and_out_or_weight("Linear", features, dimension, "features")
        self.bias = bias
        self.init = init

    def expects(self, terminal: str) -> Any:
        weight = self.given_shape("weight") if self.in_features is None else None
        size = weight[-1] if weight else self.in_features
        return ((None, size), None) if terminal == "input" and size is not None else None

    def build(self, x: Value) -> Any:
        size = expect_size(x, -1, self.in_features, "features")
        out = size_or_weight(self, self.out_features, 0, "features")
        w = self.param("weight", (out, size), self.init or f"fan_in_uniform(fan_in={size})")
        b = self.param("bias", (out,), f"fan_in_uniform(fan_in={size})") if self.bias else None
        return ops.linear(x, w, b)


class Embedding(Layer):
    """Rows of a table, selected by integer index: ``Embedding(vocabulary, size)``; None is the size of its weight."""

    weights = ("weight",)

    def __init__(self, vocabulary: int | None, size: int | None, init: str = "normal") -> None:
        self.vocabulary = None if vocabulary is None else positive("Embedding", "vocabulary", vocabulary)
        self.size = None if size is None else positive("Embedding", "size", size)
        self.init = init

    def expects(self, terminal: str) -> Any:
        return ((None, None), "int32") if terminal == "input" else None

    def build(self, indices: Value) -> Any:
        vocabulary = size_or_weight(self, self.vocabulary, 0, "rows")
        size = size_or_weight(self, self.size, 1, "features")
        return ops.embedding(indices, self.param("weight", (vocabulary, size), self.init))


def activation_layer(name: str) -> Layer:
    """Return the layer of the operation that is declared as the activation of this name."""
    classes = [c for c in vars(operation_layers).values() if isinstance(c, type) and issubclass(c, OperationLayer)]
    layers = {operation(c.op_name).activation: c for c in classes if c.op_name}
    layers.pop(None, None)
    if name not in layers:
        message, facts, hint = unknown("activation", name, sorted(layers))
        raise ModelError(message, facts=facts, hint=hint)
    layer: Layer = layers[name]()
    return layer


class MLP(Layer):
    """Linear layers with activations between them: ``MLP([256, 64, 10], activation="relu")``.

    A list of activations has one for each layer, or for each but the last.
    """

    def __init__(
        self, sizes: Sequence[int | None], activation: str | Sequence[str] = "relu", bias: bool = True
    ) -> None:
        if not sizes:
            raise ModelError("MLP needs at least one size")
        self.layers = [Linear(size, bias=bias) for size in sizes]
        between = len(sizes) - 1
        if not isinstance(activation, str) and len(activation) not in (between, between + 1):
            raise ModelError(
                f"MLP of {len(sizes)} sizes has {len(activation)} activations",
                facts=[f"accepted: a name, or a list of {between} or {between + 1}"],
            )
        self.activation = (
            activation_layer(activation) if isinstance(activation, str) else [*map(activation_layer, activation)]
        )

    def build(self, x: Value) -> Any:
        between = len(self.layers) - 1
        follow = self.activation if isinstance(self.activation, list) else [self.activation] * between
        for layer, activation in zip_longest(self.layers, follow):
            x = layer(x) if activation is None else activation(layer(x))
        return x
