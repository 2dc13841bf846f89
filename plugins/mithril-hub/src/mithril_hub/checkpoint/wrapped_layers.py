"""Models whose layers are wrapped, which files of weights and settings cannot describe."""

from __future__ import annotations

from mithril.graph import UnsupportedError
from mithril.models import Layer, Wrapper


def require_no_wrappers(model: Layer) -> None:
    """Raise UnsupportedError for hooks, LoRA and other wrappers: a reader would compute without them."""
    wrapped = [(path, layer) for path, layer in model.walk() if isinstance(layer, Wrapper)]
    if wrapped:
        path, layer = wrapped[0]
        raise UnsupportedError(
            f"'{path}' is a {type(layer).__name__}, which a file of the model's family cannot hold",
            facts=[f"wrapped layers: {len(wrapped)}"],
            hint="merge LoRA before: params = mithril_lora.merge(model, params); "
            "export a model with hooks as model.onnx",
        )
