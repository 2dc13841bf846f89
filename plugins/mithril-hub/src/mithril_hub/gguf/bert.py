"""BERT in GGUF files: encoders of text for embeddings, and classifiers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from mithril.graph import InputError, UnsupportedError
from mithril_gguf.vocabulary import PREFIX
from mithril_hub.checkpoint.changed_layers import require_layers_of_settings
from mithril_hub.checkpoint.folder import pooling_of
from mithril_hub.encoder.blocks import Tower
from mithril_hub.encoder.text import BERT, TextConfig, TextEncoder
from mithril_hub.gguf.reading import Metadata, fitting
from mithril_hub.gguf.tensor_names import Tensor
from mithril_hub.gguf.writing import architecture_of, folder_of, tokenizer_entries
from mithril_hub.model import parameter_types

POOLING = ("", "mean", "cls", "last", "rank")  # by the number in files
ROOT = {
    "embeddings.word_embeddings": "token_embd",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.position_embeddings": "position_embd",
    "embeddings.LayerNorm": "token_embd_norm",
    "pooler.dense": "cls",
    "classifier": "cls.output",
}
LAYER = {
    "query": "attn_q",
    "key": "attn_k",
    "value": "attn_v",
    "output": "attn_output",
    "attention_norm": "attn_output_norm",
    "up": "ffn_up",
    "down": "ffn_down",
    "mlp_norm": "layer_output_norm",
}


def load(
    metadata: Mapping[str, Any], tensors: Mapping[str, Any], *, context: int | None
) -> tuple[TextEncoder, dict[str, Tensor]]:
    """Return the encoder of a GGUF file and the tensor of each of its parameters.

    With ``pooling_type`` mean or cls it has the output ``embedding``; classifiers have ``logits``.
    """
    if context is not None:
        raise InputError("models of the architecture 'bert' have no cache", hint="load the file without context=")
    config = _config(Metadata(metadata), tensors)
    model = TextEncoder(config)
    return model, fitting(model, _tensors(config, list(parameter_types(model))), tensors)


def save(model: Any) -> tuple[str, dict[str, Any], dict[str, Tensor], dict[str, np.ndarray[Any, Any]]]:
    """Return the architecture and metadata, the tensor of each parameter, and no further tensors."""
    architecture = architecture_of(model)
    if architecture != "bert":
        return architecture, {}, {}, {}
    require_layers_of_settings(model)
    config: TextConfig = model.config
    tower = config.tower
    if tower.activation != "gelu":
        raise UnsupportedError(
            f"encoders with the activation '{tower.activation}' have no form in GGUF files", facts=["written: gelu"]
        )
    folder = folder_of(model)
    entries: dict[str, Any] = {
        "bert.block_count": tower.layers,
        "bert.context_length": config.positions,
        "bert.embedding_length": tower.hidden,
        "bert.feed_forward_length": tower.intermediate,
        "bert.attention.head_count": tower.heads,
        "bert.attention.layer_norm_epsilon": float(tower.eps),
        "bert.attention.causal": False,
        "bert.vocab_size": config.vocabulary,
        f"{PREFIX}token_type_count": config.types,
    }
    pooling = "rank" if config.classes else config.pooling or pooling_of(folder)
    if pooling and pooling not in POOLING:
        raise UnsupportedError(f"pooling by '{pooling}' has no form in GGUF files", facts=["written: mean, cls"])
    if pooling:
        entries["bert.pooling_type"] = POOLING.index(pooling)
    if config.classes:
        entries["bert.classifier.output_labels"] = [f"LABEL_{n}" for n in range(config.classes)]
    entries |= tokenizer_entries(folder, config.vocabulary)
    return architecture, entries, _tensors(config, list(parameter_types(model))), {}


def _config(metadata: Metadata, tensors: Mapping[str, Any]) -> TextConfig:
    hidden, heads = metadata.size("embedding_length"), metadata.size("attention.head_count")
    layers = metadata.size("block_count")
    metadata.check_layers(layers, tensors)
    if hidden % heads:
        raise InputError(f"the GGUF file has {heads} attention heads for {hidden} features")
    number = int(metadata.number("pooling_type", 0))
    pooling = POOLING[number] if 0 <= number < len(POOLING) else f"number {number}"
    if pooling not in ("", "mean", "cls", "rank"):
        raise UnsupportedError(
            f"pooling by '{pooling}' in GGUF files of the architecture 'bert' is not supported",
            facts=["read: mean, cls, rank, or none"],
        )
    tower = Tower(
        layers,
        heads,
        hidden,
        metadata.size("feed_forward_length"),
        float(metadata.number("attention.layer_norm_epsilon", 1e-12)),
        "gelu",
        BERT,
        pre_norm=False,
    )
    rows = {name: _rows(tensors, f"{name}.weight") for name in ("token_embd", "position_embd", "token_types")}
    classes = _rows(tensors, "cls.output.weight") if "cls.output.weight" in tensors else 0
    config = TextConfig(
        "bert",
        rows["token_embd"],
        rows["position_embd"],
        rows["token_types"],
        padding=None,
        classes=classes,
        pooler="cls.weight" in tensors,
        tower=tower,
    )
    return config if pooling == "rank" else replace(config, pooling=pooling)


def _rows(tensors: Mapping[str, Any], name: str) -> int:
    if name not in tensors or len(tensors[name].shape) != 2:
        raise InputError(f"the GGUF file has no matrix '{name}'")
    return int(tensors[name].shape[0])


def _tensors(config: TextConfig, parameters: list[str]) -> dict[str, Tensor]:
    modules = dict(ROOT)
    names = config.tower.names
    for n in range(config.tower.layers):
        for kind, tensor in LAYER.items():
            modules[names.layer.format(n) + getattr(names, kind)] = f"blk.{n}.{tensor}"
    tensors: dict[str, Tensor] = {}
    for parameter in parameters:
        module, _, suffix = parameter.removeprefix("bert.").rpartition(".")
        tensors[parameter] = f"{modules[module]}.{suffix}", None, 0.0, ()
    return tensors
