"""Models with other layers than their settings describe, which files of weights and settings cannot hold."""

from __future__ import annotations

from mithril.graph import UnsupportedError
from mithril.models import Layer
from mithril_hub.model import Pretrained, parameter_types


def require_layers_of_settings(model: Layer) -> None:
    """Raise UnsupportedError for hooks, LoRA and other replaced layers: a reader would compute without them."""
    arguments, options = model.arguments
    original = type(model)(*arguments, **options)
    if isinstance(original, Pretrained):
        parameter_types(original)  # a trace: encoders create their layers in it
    described = dict(original.walk())
    changed = [(path, layer) for path, layer in model.walk() if not _is_alike(layer, described.get(path))]
    if changed:
        path, layer = changed[0]
        raise UnsupportedError(
            f"'{path}' is {layer!r}, which a file of the model's family cannot hold",
            facts=[
                f"the model's settings describe {described[path]!r}" if path in described else "its settings lack it",
                f"layers that differ: {len(changed)}",
            ],
            hint="merge LoRA before: params = mithril_lora.merge(model, params); "
            "export a model with other layers as model.onnx",
        )


def _is_alike(layer: Layer, described: Layer | None) -> bool:
    return type(layer) is type(described) and described is not None and layer.arguments == described.arguments
