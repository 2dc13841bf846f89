"""The tensors of GGUF files for the parameters of a decoder."""

from __future__ import annotations

from typing import Any

import numpy as np

from mithril_hub.decoder.config import DecoderConfig

Tensor = tuple[str, np.ndarray[Any, Any] | None, float]  # name, order of the stored rows, number added
ROOT = {"embedding": "token_embd", "final_norm": "output_norm"}
LAYER = {
    "query": "attn_q",
    "key": "attn_k",
    "value": "attn_v",
    "joint": "attn_qkv",
    "output": "attn_output",
    "query_norm": "attn_q_norm",
    "key_norm": "attn_k_norm",
    "before_attention": "attn_norm",
    "after_attention": "post_attention_norm",
    "before_mlp": "ffn_norm",
    "after_mlp": "post_ffw_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "gate_up": "ffn_up",
    "down": "ffn_down",
}
NORMS = ("query_norm", "key_norm", "before_attention", "after_attention", "before_mlp", "after_mlp", "final_norm")


def tensors_by_parameter(config: DecoderConfig, parameters: list[str], interleaved: bool) -> dict[str, Tensor]:
    """Return the tensor of each parameter; ``interleaved`` is the rotation of neighbors, as of the first Llama."""
    modules: dict[str, tuple[str, str]] = {}  # module of a parameter: its kind, and the start of the tensor's name
    names = config.names
    for kind, tensor in ROOT.items():
        modules[names.root + getattr(names, kind)] = kind, tensor
    modules[names.head] = "head", "output"
    for n in range(config.layers):
        for kind, tensor in LAYER.items():
            if module := getattr(names, kind):
                modules[names.root + names.layer.format(n) + module] = kind, f"blk.{n}.{tensor}"
    heads = {"query": config.heads, "key": config.kv_heads} if interleaved else {}
    tensors: dict[str, Tensor] = {}
    for parameter in parameters:
        module, _, suffix = parameter.rpartition(".")
        kind, tensor = modules[module]
        order = _neighbors(heads[kind], config.head_size) if kind in heads else None
        offset = config.norm_offset if kind in NORMS and suffix == "weight" else 0.0
        tensors[parameter] = f"{tensor}.{suffix}", order, offset
    return tensors


def _neighbors(heads: int, size: int) -> np.ndarray[Any, Any]:
    """Return the row order in which the two features of each rotated pair are neighbors."""
    return np.arange(heads * size).reshape(heads, 2, size // 2).swapaxes(1, 2).reshape(-1)
