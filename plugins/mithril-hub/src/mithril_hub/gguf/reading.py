"""Decoders from GGUF files: the configuration from metadata and tensors."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from mithril.graph import InputError, UnsupportedError
from mithril_hub.decoder.config import DecoderConfig, Experts, Names
from mithril_hub.decoder.families import GEMMA_NORMS, MIXTRAL_EXPERTS
from mithril_hub.decoder.rope import Rope, rope_of
from mithril_hub.gguf.tensor_names import Tensor, tensors_by_parameter
from mithril_hub.model import Decoder, Pretrained, parameter_types

EXPERT_FAMILIES = {"llama": "mixtral", "qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe"}


def load(
    metadata: Mapping[str, Any], tensors: Mapping[str, Any], *, context: int | None
) -> tuple[Decoder, dict[str, Tensor]]:
    """Return the decoder of a GGUF file and the tensor of each of its parameters.

    ``tensors`` are objects with a shape that NumPy converts to arrays. ``context`` positions are cached.
    """
    values = Metadata(metadata)
    config = _config(values, tensors)
    model = Decoder(config, cache=context)
    sources = tensors_by_parameter(config, list(parameter_types(model)), values.architecture == "llama")
    factors = {"rope_freqs.weight", *(f"rope_factors_{length}.weight" for length in ("short", "long"))}
    return model, fitting(model, sources, tensors, factors)


def fitting(
    model: Pretrained, sources: Mapping[str, Tensor], tensors: Mapping[str, Any], optional: Collection[str] = ()
) -> dict[str, Tensor]:
    """Return the sources for reading; raise InputError if tensors are missing, unknown or of other shapes."""
    types = parameter_types(model)
    read: dict[str, Tensor] = {}
    wrong: list[str] = []
    for parameter, (name, order, _, part) in sources.items():
        read[parameter] = name, None if order is None else np.argsort(order), 0.0, part
        if name not in tensors:
            wrong.append(f"missing: '{name}'")
            continue
        stored, expected = tuple(tensors[name].shape), types[parameter].shape
        if not part and expected == (1, *stored):  # files may store one row as a vector
            read[parameter] = name, None, 0.0, (None,)
        elif stored[len(part) :] != expected or len(stored) != len(part) + len(expected):
            wrong.append(f"'{name}' is {list(stored)}, expected {['experts'] * len(part) + list(expected)}")
    wrong += [f"unknown: '{name}'" for name in sorted(set(tensors) - {s[0] for s in sources.values()} - set(optional))]
    if wrong:
        wrong = list(dict.fromkeys(wrong))
        more = [f"({len(wrong)} in total)"] if len(wrong) > 8 else []
        raise InputError("the tensors of the GGUF file do not fit its metadata", facts=[*wrong[:8], *more])
    return read


class Metadata:
    """The entries of one architecture."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values
        self.architecture = values["general.architecture"]

    def number(self, key: str, default: float | None = None) -> float:
        value = self.values.get(f"{self.architecture}.{key}", default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise InputError(f"the GGUF file has {value!r} for '{self.architecture}.{key}', expected a number")
        return value

    def size(self, key: str, default: int | None = None) -> int:
        value = self.number(key, default)
        if not isinstance(value, int) or not 0 < value < 1 << 31:
            raise InputError(f"the GGUF file has {value!r} for '{self.architecture}.{key}', expected a size")
        return value

    def check_layers(self, layers: int, tensors: Mapping[str, Any]) -> None:
        """Raise InputError for more layers than tensors, before anything of that size exists."""
        if layers > len(tensors):
            raise InputError(f"the GGUF file has {len(tensors)} tensors for {layers} layers")

    def text(self, key: str) -> str:
        return str(self.values.get(f"{self.architecture}.{key}", "none"))


def _config(metadata: Metadata, tensors: Mapping[str, Any]) -> DecoderConfig:
    hidden, heads = metadata.size("embedding_length"), metadata.size("attention.head_count")
    layers, longest = metadata.size("block_count"), metadata.size("context_length", 2048)
    head = metadata.size("attention.key_length", hidden // heads)
    family = metadata.architecture
    if "token_embd.weight" not in tensors:
        raise InputError("the GGUF file has no tensor 'token_embd.weight'")
    metadata.check_layers(layers, tensors)
    end = metadata.values.get("tokenizer.ggml.eos_token_id")
    config = DecoderConfig(
        family=family,
        vocabulary=tensors["token_embd.weight"].shape[0],
        hidden=hidden,
        intermediate=metadata.size("feed_forward_length"),
        layers=layers,
        heads=heads,
        kv_heads=metadata.size("attention.head_count_kv", heads),
        head_size=head,
        longest=longest,
        eps=float(metadata.number("attention.layer_norm_rms_epsilon", 1e-6)),
        query_bias="blk.0.attn_q.bias" in tensors,
        output_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_down.bias" in tensors,
        query_key_norm="blk.0.attn_q_norm.weight" in tensors,
        tied="output.weight" not in tensors,
        ropes=(_rope(metadata, tensors, head, longest),) * layers,
        windows=(None,) * layers,
        stop=(end,) if isinstance(end, int) else (),
    )
    if family.startswith("gemma"):
        config = replace(config, activation="gelu_pytorch_tanh", embedding_scale=float(np.sqrt(hidden)))
    if family == "gemma2":
        window = metadata.size("attention.sliding_window", 4096)
        # the largest model scales by another size, which the format does not tell
        size = hidden // heads if layers == 46 else head
        config = replace(
            config,
            names=replace(config.names, **GEMMA_NORMS),
            attention_scale=size**-0.5,
            attention_cap=float(metadata.number("attn_logit_softcapping", 50.0)),
            logit_cap=float(metadata.number("final_logit_softcapping", 30.0)),
            windows=tuple(window if n % 2 == 0 else None for n in range(layers)),
        )
    if family == "phi3":
        names = Names(joint="self_attn.qkv_proj", gate_up="mlp.gate_up_proj")
        reach = int(metadata.number("attention.sliding_window", 0)) or None
        config = replace(config, names=names, windows=(reach,) * layers)
    return _with_experts(config, metadata, tensors)


def _with_experts(config: DecoderConfig, metadata: Metadata, tensors: Mapping[str, Any]) -> DecoderConfig:
    count = metadata.number("expert_count", 0)
    if not count:
        return config
    family = EXPERT_FAMILIES.get(metadata.architecture)
    if family is None:
        raise UnsupportedError(
            f"experts in GGUF files of the architecture '{metadata.architecture}' are not supported",
            facts=[f"read: experts of {', '.join(EXPERT_FAMILIES)}"],
        )
    count, active = metadata.size("expert_count"), metadata.size("expert_used_count")
    shape = tuple(getattr(tensors.get("blk.0.ffn_gate_exps.weight"), "shape", ()))
    if len(shape) != 3 or shape[0] != count or active > count:
        raise InputError(
            "the experts of the GGUF file do not fit its metadata",
            facts=[f"{count} experts, of which {active} are active", f"'blk.0.ffn_gate_exps.weight' is {list(shape)}"],
        )
    wrong = [n for n, t in tensors.items() if "_exps." in n and (len(t.shape) != 3 or t.shape[0] != count)]
    if wrong:
        raise InputError(f"'{wrong[0]}' is {list(tensors[wrong[0]].shape)}, expected {count} experts")
    if family == "mixtral":
        experts = replace(MIXTRAL_EXPERTS, count=count, active=active, size=shape[1])
    else:
        shared = tensors.get("blk.0.ffn_gate_shexp.weight")
        size = shared.shape[0] if shared is not None else 0
        experts = Experts(count, active, shape[1], normalized=family == "qwen3_moe", shared=size)
    return replace(config, family=family, experts=experts, sparse=(True,) * config.layers)


def _rope(metadata: Metadata, tensors: Mapping[str, Any], head: int, longest: int) -> Rope:
    """Return the rotation, whose frequencies are divided by the factors in a tensor if there is one."""
    kind = metadata.text("rope.scaling.type")
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise UnsupportedError(f"rotary positions of the type '{kind}' in GGUF files are not supported")
    size = metadata.size("rope.dimension_count", head)
    settings: dict[str, Any] = {
        "rope_theta": float(metadata.number("rope.freq_base", 10000.0)),
        "partial_rotary_factor": size / head,
        "rope_type": "default" if kind == "none" else kind,
        "original_max_position_embeddings": metadata.size("rope.scaling.original_context_length", longest),
    }
    if kind != "none":
        settings["factor"] = float(metadata.number("rope.scaling.factor", 1.0))
    if "rope_factors_long.weight" in tensors:
        scale = metadata.number("rope.scaling.attn_factor", 1.0)
        settings |= {f"{n}_factor": np.asarray(tensors[f"rope_factors_{n}.weight"]) for n in ("short", "long")}
        return rope_of({**settings, "rope_type": "longrope", "attention_factor": scale}, head, longest)
    rope = rope_of(settings, head, longest)
    if "rope_freqs.weight" in tensors:
        factors = np.asarray(tensors["rope_freqs.weight"], np.float64)
        if factors.shape != (size // 2,):
            raise InputError(f"'rope_freqs.weight' is {list(factors.shape)}, expected {[size // 2]}")
        rope = replace(rope, short=tuple(float(f) for f in np.asarray(rope.short) / factors))
    return rope
