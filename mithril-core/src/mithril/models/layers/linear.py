"""Dense layers: Linear, Embedding, MLP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mithril import ops
from mithril.base import ModelError, operation, unknown
from mithril.ir import Value
from mithril.models.language.arguments import expect_size, in_and_out, positive
from mithril.models.language.layer import Layer
from mithril.models.layers import operation_layers
from mithril.models.layers.operation_layers import OperationLayer


class Linear(Layer):
    """``x @ weight.T + bias``: ``Linear(out)``, ``Linear(in, out)`` or ``Linear(dimension=out)``."""

    weights = ("weight", "bias")

    def __init__(
        self, *features: int, dimension: int | None = None, bias: bool = True, init: str | None = None
    ) -> None:
        self.in_features, self.out_features = in_and_out("Linear", features, dimension)
        self.bias = bias
        self.init = init

    def expects(self, terminal: str) -> Any:
        return ((None, self.in_features), None) if terminal == "input" and self.in_features else None

    def build(self, x: Value) -> Any:
        size = expect_size(x, -1, self.in_features, "features")
        w = self.param("weight", (self.out_features, size), self.init or f"fan_in_uniform(fan_in={size})")
        b = self.param("bias", (self.out_features,), f"fan_in_uniform(fan_in={size})") if self.bias else None
        return ops.linear(x, w, b)


class Embedding(Layer):
    """Rows of a table, selected by integer index: ``Embedding(vocabulary, size)``."""

    weights = ("weight",)

    def __init__(self, vocabulary: int, size: int, init: str = "normal") -> None:
        self.vocabulary = positive("Embedding", "vocabulary", vocabulary)
        self.size = positive("Embedding", "size", size)
        self.init = init

    def expects(self, terminal: str) -> Any:
        return ((None, None), "int32") if terminal == "input" else None

    def build(self, indices: Value) -> Any:
        return ops.embedding(indices, self.param("weight", (self.vocabulary, self.size), self.init))


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
    """Linear layers with activations between them: ``MLP([256, 64, 10], activation="relu")``."""

    def __init__(self, sizes: Sequence[int], activation: str = "relu", bias: bool = True) -> None:
        if not sizes:
            raise ModelError("MLP needs at least one size")
        self.layers = [Linear(size, bias=bias) for size in sizes]
        self.activation = activation_layer(activation)

    def build(self, x: Value) -> Any:
        for layer in self.layers[:-1]:
            x = self.activation(layer(x))
        return self.layers[-1](x)
