"""The tensors of GGUF files for the parameters of a decoder."""

from __future__ import annotations

from typing import Any

import numpy as np

from mithril_hub.decoder.config import DecoderConfig

Part = tuple[int | None, ...]  # index of the part that a parameter is: () for all of the tensor
Tensor = tuple[str, np.ndarray[Any, Any] | None, float, Part]  # name, order of the stored rows, number added, part
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
EXPERTS = {"gate": "ffn_gate_exps", "up": "ffn_up_exps", "down": "ffn_down_exps"}  # tensors of all experts
SHARED = {
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
}
NORMS = ("query_norm", "key_norm", "before_attention", "after_attention", "before_mlp", "after_mlp", "final_norm")


def tensors_by_parameter(config: DecoderConfig, parameters: list[str], interleaved: bool) -> dict[str, Tensor]:
    """Return the tensor of each parameter; ``interleaved`` is the rotation of neighbors, as of the first Llama."""
    modules: dict[str, tuple[str, str, Part]] = {}  # module: its kind, the start of the tensor's name, the part
    names = config.names
    for kind, tensor in ROOT.items():
        modules[names.root + getattr(names, kind)] = kind, tensor, ()
    modules[names.head] = "head", "output", ()
    for n in range(config.layers):
        layer = names.root + names.layer.format(n)
        for kind, tensor in LAYER.items():
            if module := getattr(names, kind):
                modules[layer + module] = kind, f"blk.{n}.{tensor}", ()
        for module, (tensor, part) in _experts(config).items():
            modules[layer + module] = "expert", f"blk.{n}.{tensor}", part
    heads = {"query": config.heads, "key": config.kv_heads} if interleaved else {}
    tensors: dict[str, Tensor] = {}
    for parameter in parameters:
        module, _, suffix = parameter.rpartition(".")
        kind, tensor, part = modules[module]
        order = _neighbors(heads[kind], config.head_size) if kind in heads else None
        offset = config.norm_offset if kind in NORMS and suffix == "weight" else 0.0
        tensors[parameter] = f"{tensor}.{suffix}", order, offset, part
    return tensors


def _experts(config: DecoderConfig) -> dict[str, tuple[str, Part]]:
    """Return the tensor, and the part of it, of each module of a mixture of experts."""
    if config.experts is None:
        return {}
    experts = config.experts
    modules: dict[str, tuple[str, Part]] = {experts.router: ("ffn_gate_inp", ())}
    modules |= {module: (tensor, ()) for module, tensor in SHARED.items()}
    for kind, tensor in EXPERTS.items():
        for e in range(experts.count):
            modules[experts.expert.format(e) + getattr(experts, kind)] = tensor, (e,)
    return modules


def _neighbors(heads: int, size: int) -> np.ndarray[Any, Any]:
    """Return the row order in which the two features of each rotated pair are neighbors."""
    return np.arange(heads * size).reshape(heads, 2, size // 2).swapaxes(1, 2).reshape(-1)
