"""Models of one imported layer, whose parameters have the names of the source."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mithril.models import Layer, Model


def model_of(layer: Layer, types: Mapping[str, tuple[Any, Any]], names: Mapping[str, str] | None = None) -> Model:
    """Return the model of a layer; ``types`` are the shapes and dtypes of its inputs, by name.

    ``names`` are those of outputs in the source, by terminal: terminals are identifiers, since calls name them, and
    results of the compiled model have the names of the source where they stay distinct.
    """
    model = Model()
    for name, (shape, dtype) in types.items():
        model.input(name, shape=shape, dtype=dtype)
    model |= layer(**{terminal: terminal for terminal in (*layer.inputs, *layer.outputs)})
    model.steps[0].name = ""  # names of parameters get no prefix
    model.set_outputs(**{(names or {}).get(terminal, terminal): terminal for terminal in layer.outputs})
    return model
