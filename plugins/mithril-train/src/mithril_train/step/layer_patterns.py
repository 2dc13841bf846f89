"""Layers in place of patterns of parameters: ``frozen=model.encoder`` denotes the parameters of that layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mithril.base import OptionError
from mithril.models import Layer


class LayerPatterns:
    """The patterns of the parameters of the layers of a model."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def pattern(self, key: Any) -> Any:
        """Return the pattern of the parameters of a layer; other keys are returned unchanged."""
        if not isinstance(key, Layer):
            return key
        if key is self.model:
            return "*"
        layers = self.model.walk() if isinstance(self.model, Layer) else ()
        path = next((path for path, layer in layers if layer is key), None)  # of the first use, as in names
        if path is None:
            raise OptionError(
                f"{key!r} is not a layer of the model",
                hint="pass a layer of model.walk(), which a copy or a replaced layer is not, or a pattern of names",
            )
        return f"{path}.*"

    def patterns(self, keys: Any) -> tuple[str, ...]:
        """Return the patterns of a pattern, a layer, or several of them."""
        return tuple(map(self.pattern, [keys] if isinstance(keys, (str, Layer)) else keys))

    def table(self, table: Any) -> Any:
        """Return a table with patterns as keys; anything else is returned unchanged."""
        return {self.pattern(key): x for key, x in table.items()} if isinstance(table, Mapping) else table

    def optimizer(self, optimizer: Any) -> Any:
        """Return the optimizer, or the table of optimizers, with patterns as keys of parts and groups."""
        if isinstance(optimizer, Mapping):
            return {pattern: self.optimizer(part) for pattern, part in self.table(optimizer).items()}
        if any(isinstance(key, Layer) for key in optimizer.groups):
            optimizer = replace(optimizer, groups=self.table(optimizer.groups))
        inner = getattr(optimizer, "inner", None)
        return optimizer if inner is None else replace(optimizer, inner=self.optimizer(inner))
