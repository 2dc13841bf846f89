"""Layers within layers: the layer of ``TimeDistributed``, the two of ``Bidirectional``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mithril.graph import UnsupportedError
from mithril_keras.config import LayerConfig, layer_config
from mithril_keras.table import LAYERS
from mithril_keras.weights import Weights


def wrapped_config(weights: Weights, value: Any) -> LayerConfig:
    """Return the configuration of a layer within a layer."""
    config = layer_config(value, f"the layer within {weights.label}")
    if config.custom is None and (config.is_model or config.class_name in LAYERS):
        return config
    raise UnsupportedError(
        f"{weights.label} contains a layer '{config.custom or config.class_name}', which has no counterpart",
        hint="replace it in Keras by layers or operations of keras.ops, and save the model again",
    )


def call_wrapped(weights: Weights, group: str, value: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the result of a layer within a layer."""
    from mithril_keras.importer import Network, call_layer, check_supported

    config = wrapped_config(weights, value)
    inner = weights.below(group, config.name)
    inner = replace(inner, label=f"the layer '{config.name}' ({config.class_name})", policy=config.dtype)
    if config.is_model:
        network = Network(config)
        check_supported(network, weights.archive.name)
        return network.run(inner, args)[0]
    return call_layer(inner, config, args, kwargs)
