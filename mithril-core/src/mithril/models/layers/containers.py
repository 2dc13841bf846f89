"""Containers of layers: Sequential and Residual."""

from __future__ import annotations

from typing import Any

from mithril.graph import ModelError
from mithril.models.language.layer import Layer


class Sequential(Layer):
    """A sequence of layers, named 0, 1, 2, ... as in PyTorch."""

    def __init__(self, *layers: Layer) -> None:
        for layer in layers:
            if not isinstance(layer, Layer):
                raise ModelError(f"Sequential takes layers, got a {type(layer).__name__}", hint="do not call them")
        self.layers = layers
        self._children = {id(layer): str(k) for k, layer in reversed(list(enumerate(layers)))}

    def expects(self, terminal: str) -> Any:
        first = self.layers[0] if self.layers else None
        return first.expects(first.inputs[0]) if first is not None and first.inputs else None

    def build(self, x: Any) -> Any:
        for layer in self.layers:
            outputs = layer(x)
            x = outputs[0] if isinstance(outputs, (tuple, list)) else outputs
        return x


class Residual(Layer):
    """``block(x) + shortcut(x)``; the default shortcut is the identity."""

    def __init__(self, block: Layer, shortcut: Layer | None = None) -> None:
        self.block = block
        self.shortcut = shortcut

    def expects(self, terminal: str) -> Any:
        return self.block.expects(self.block.inputs[0])

    def build(self, x: Any) -> Any:
        return self.block(x) + (x if self.shortcut is None else self.shortcut(x))
