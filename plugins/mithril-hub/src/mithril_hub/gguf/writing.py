"""Metadata of decoders for GGUF files that llama.cpp opens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from mithril.graph import UnsupportedError
from mithril_gguf.vocabulary import vocabulary_entries
from mithril_hub.checkpoint.changed_layers import require_layers_of_settings
from mithril_hub.checkpoint.checkpoint_weights import CheckpointWeights
from mithril_hub.checkpoint.folder import read_json, read_text
from mithril_hub.decoder.config import DecoderConfig
from mithril_hub.decoder.rope import Rope
from mithril_hub.gguf.tensor_names import Tensor, tensors_by_parameter
from mithril_hub.model import Decoder, parameter_types, with_stacked_experts

ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "phi3": "phi3",
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "bert": "bert",
}


def save(model: Any) -> tuple[str, dict[str, Any], dict[str, Tensor], dict[str, np.ndarray[Any, Any]]]:
    """Return the architecture and metadata, the tensor of each parameter, and further tensors."""
    architecture = architecture_of(model)
    require_layers_of_settings(model)
    if not isinstance(model, Decoder):
        return architecture, {}, {}, {}
    config: DecoderConfig = model.config
    scaling, extra = _scaling(config)
    metadata = {**_sizes(config), **scaling, **_experts(config)}
    separate = with_stacked_experts(model, stacked=False) if config.experts is not None else model
    tensors = tensors_by_parameter(config, list(parameter_types(separate)), architecture == "llama")
    entries = {f"{architecture}.{key}": value for key, value in metadata.items()}
    return architecture, entries | tokenizer_entries(folder_of(model), config.vocabulary), tensors, extra


def folder_of(model: Any) -> Path | None:
    """Return the folder that the model was read from."""
    return model.pretrained.folder if isinstance(model.pretrained, CheckpointWeights) else None


def tokenizer_entries(folder: Path | None, size: int) -> dict[str, Any]:
    """Return the entries of a checkpoint's tokenizer for a vocabulary of this size; none if it has no tokenizer."""
    if folder is None or not (path := folder / "tokenizer.json").is_file():
        return {}
    settings = read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").is_file() else {}
    has_file = (folder / "chat_template.jinja").is_file()
    template = read_text(folder, "chat_template.jinja") if has_file else settings.get("chat_template")
    return vocabulary_entries(path, read_json(path), settings, template if isinstance(template, str) else None, size)


def architecture_of(model: Any) -> str:
    """Return the name of the model's family in GGUF files."""
    family = getattr(getattr(model, "config", None), "family", type(model).__name__)
    if family not in ARCHITECTURES:
        raise UnsupportedError(
            f"models of the type '{family}' cannot be exported to GGUF",
            facts=[f"supported: {', '.join(ARCHITECTURES)}"],
        )
    return ARCHITECTURES[family]


def _sizes(config: DecoderConfig) -> dict[str, Any]:
    metadata: dict[str, Any] = {
        "block_count": config.layers,
        "context_length": config.longest,
        "embedding_length": config.hidden,
        "feed_forward_length": config.intermediate,
        "attention.head_count": config.heads,
        "attention.head_count_kv": config.kv_heads,
        "attention.key_length": config.head_size,
        "attention.value_length": config.head_size,
        "attention.layer_norm_rms_epsilon": float(config.eps),
        "vocab_size": config.vocabulary,
    }
    window = next((w for w in config.windows if w is not None), None)
    if config.family == "gemma2":
        metadata["attention.sliding_window"] = window or config.longest
    elif window is not None and window < config.longest:
        raise UnsupportedError(
            f"windows of '{config.family}' have no form in GGUF files",
            facts=[f"window {window}, {config.longest} positions"],
            hint="set sliding_window to null in config.json if prompts stay within the window",
        )
    if config.family == "gemma2":
        metadata["attn_logit_softcapping"] = config.attention_cap
        metadata["final_logit_softcapping"] = config.logit_cap
        # llama.cpp derives the scale of Gemma 2 27B from its 46 layers.
        expected = (config.hidden // config.heads if config.layers == 46 else config.head_size) ** -0.5
        if not np.isclose(config.attention_scale or 0.0, expected):
            raise UnsupportedError("this query_pre_attn_scalar has no form in GGUF files")
    return metadata


def _experts(config: DecoderConfig) -> dict[str, Any]:
    """Return the metadata of a mixture of experts; llama.cpp decides by architecture whether weights sum to 1."""
    if config.experts is None:
        return {}
    experts = config.experts
    if not all(config.sparse) or experts.normalized != (config.family != "qwen2_moe"):
        raise UnsupportedError(
            f"this mixture of experts of '{config.family}' has no form in GGUF files",
            facts=["layers without experts" if not all(config.sparse) else f"norm_topk_prob: {experts.normalized}"],
        )
    metadata = {"expert_count": experts.count, "expert_used_count": experts.active}
    if config.family != "mixtral":
        metadata["expert_feed_forward_length"] = experts.size
    if experts.shared:
        metadata["expert_shared_feed_forward_length"] = experts.shared
    return metadata


def _scaling(config: DecoderConfig) -> tuple[dict[str, Any], dict[str, np.ndarray[Any, Any]]]:
    """Return metadata of the rotation, and the tensors of factors that its frequencies are divided by."""
    rope = config.ropes[0]
    if rope is None or any(other != rope for other in config.ropes) or rope.growth:
        raise UnsupportedError(f"the rotary positions of this '{config.family}' have no form in GGUF files")
    plain = Rope.plain(rope.size, rope.base)
    metadata: dict[str, Any] = {"rope.freq_base": float(rope.base), "rope.dimension_count": rope.size}
    if rope.long:
        metadata["rope.scaling.attn_factor"] = float(rope.factor)
        metadata["rope.scaling.original_context_length"] = rope.limit
        lengths = {"short": rope.short, "long": rope.long}
        return metadata, {
            f"rope_factors_{name}.weight": (plain / np.asarray(f)).astype(np.float32) for name, f in lengths.items()
        }
    factors = plain / np.asarray(rope.short)
    if rope.factor != 1.0:
        raise UnsupportedError("YaRN positions cannot be exported to GGUF")
    if np.allclose(factors, 1.0, rtol=1e-12):
        return metadata, {}
    return metadata, {"rope_freqs.weight": factors.astype(np.float32)}
