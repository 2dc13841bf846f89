"""Containers of layers: Sequential and Residual."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, overload

from mithril.graph import ModelError
from mithril.models.language.children import LayerMap
from mithril.models.language.layer import Layer


class Sequential(Layer):
    """A sequence of layers: ``net[0]``, ``net[:-1]``, ``len(net)``.

    They are named 0, 1, 2, ... as in PyTorch, or by their ``name=``.
    """

    argument_hints: ClassVar = {
        "layers": "write Sequential(*layers) for a list, and a layer such as Relu() for a function"
    }

    def __init__(self, *layers: Layer) -> None:
        for layer in layers:
            if not isinstance(layer, Layer):
                raise ModelError(f"Sequential takes layers, got a {type(layer).__name__}", hint="do not call them")
        self.layers = layers
        self._children = LayerMap((x, x.name or str(k)) for k, x in reversed(list(enumerate(layers))))
        _check_distinct(self._children)

    @overload
    def __getitem__(self, position: int) -> Layer: ...
    @overload
    def __getitem__(self, position: slice) -> Sequential: ...
    def __getitem__(self, position: int | slice) -> Layer:
        """Return a layer, or the sequence of some of them."""
        return Sequential(*self.layers[position]) if isinstance(position, slice) else self.layers[position]

    def __len__(self) -> int:
        return len(self.layers)

    def __bool__(self) -> bool:
        return True  # a layer, even without layers inside

    def __iter__(self) -> Iterator[Layer]:
        return iter(self.layers)

    def expects(self, terminal: str) -> Any:
        first = self.layers[0] if self.layers else None
        return first.expects(first.inputs[0]) if first is not None and first.inputs else None

    def build(self, x: Any) -> Any:
        for layer in self.layers:
            outputs = layer(x)
            x = outputs[0] if isinstance(outputs, (tuple, list)) else outputs
        return x


def _check_distinct(names: LayerMap[str]) -> None:
    layers: dict[str, Layer] = {}
    for layer, name in names.items():
        if (other := layers.setdefault(name, layer)) is not layer:
            raise ModelError(f"two layers are named '{name}'", facts=[repr(other), repr(layer)])


class Residual(Layer):
    """``block(x) + shortcut(x)``; the default shortcut is the identity."""

    def __init__(self, block: Layer, shortcut: Layer | None = None) -> None:
        self.block = block
        self.shortcut = shortcut

    def expects(self, terminal: str) -> Any:
        return self.block.expects(self.block.inputs[0])

    def build(self, x: Any) -> Any:
        return self.block(x) + (x if self.shortcut is None else self.shortcut(x))
