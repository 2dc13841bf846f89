"""``config.json`` of each decoder family as a ``DecoderConfig``."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from mithril.graph import InputError, UnsupportedError
from mithril_hub.decoder.config import DecoderConfig, Experts, Names
from mithril_hub.decoder.rope import Rope, rope_of
from mithril_hub.settings import Settings, check_settings, size_of

KINDS = ("full_attention", "sliding_attention")
GEMMA_NORMS = {
    "after_attention": "post_attention_layernorm",
    "before_mlp": "pre_feedforward_layernorm",
    "after_mlp": "post_feedforward_layernorm",
}
MIXTRAL_EXPERTS = Experts(
    count=8,
    active=2,
    size=14336,
    normalized=True,
    router="block_sparse_moe.gate",
    expert="block_sparse_moe.experts.{}.",
    gate="w1",
    up="w3",
    down="w2",
)


def decoder_config(settings: Settings) -> DecoderConfig:
    """Return the configuration of a decoder; ``settings`` is the content of its ``config.json``."""
    text = settings.get("text_config")
    if isinstance(text, Mapping):  # the language part of a model of text and images
        settings = {"tie_word_embeddings": settings.get("tie_word_embeddings", True), **text}
    check_settings(settings["model_type"], settings)
    return FAMILIES[settings["model_type"]](settings)


def _common(settings: Settings, **more: Any) -> DecoderConfig:
    """Return the settings that families with rotary positions share."""
    hidden, heads = size_of(settings, "hidden_size"), size_of(settings, "num_attention_heads")
    layers = size_of(settings, "num_hidden_layers")
    head = size_of(settings, "head_dim", hidden // heads)
    longest = size_of(settings, "max_position_embeddings", 2048)
    kinds = settings.get("layer_types")
    if kinds is not None and len(kinds) != layers:
        raise InputError(f"config.json: 'layer_types' has {len(kinds)} items for {layers} layers")
    if strange := [kind for kind in kinds or () if kind not in KINDS]:
        raise UnsupportedError(
            f"config.json: 'layer_types' has {strange[0]!r}", facts=[f"supported: {', '.join(KINDS)}"]
        )
    values: dict[str, Any] = {
        "family": settings["model_type"],
        "vocabulary": size_of(settings, "vocab_size"),
        "hidden": hidden,
        "intermediate": size_of(settings, "intermediate_size"),
        "layers": layers,
        "heads": heads,
        "kv_heads": size_of(settings, "num_key_value_heads", heads),
        "head_size": head,
        "longest": longest,
        "eps": float(settings.get("rms_norm_eps") or settings.get("layer_norm_eps") or 1e-6),
        "activation": settings.get("hidden_activation") or settings.get("hidden_act") or "silu",
        "query_bias": bool(settings.get("attention_bias")),
        "output_bias": bool(settings.get("attention_bias")),
        "mlp_bias": bool(settings.get("mlp_bias")),
        "tied": bool(settings.get("tie_word_embeddings")),
        "ropes": _ropes(settings, kinds, layers, head, longest),
        "windows": _windows(settings, kinds, layers),
        "stop": _stop(settings),
    }
    return DecoderConfig(**{**values, **more})


def _stop(settings: Settings) -> tuple[int, ...]:
    value = settings.get("eos_token_id")
    return () if value is None else (value,) if isinstance(value, int) else tuple(value)


def _windows(settings: Settings, kinds: Any, layers: int) -> tuple[int | None, ...]:
    window = settings.get("sliding_window")
    if not window:
        return (None,) * layers
    if kinds is None:
        return (window,) * layers
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _ropes(settings: Settings, kinds: Any, layers: int, head: int, longest: int) -> tuple[Rope, ...]:
    """Return the rotation of each layer, from the form of transformers 5 or from that of older files."""
    written = settings.get("rope_parameters")
    if written is None:
        written = {"rope_theta": settings.get("rope_theta", 10000.0), **(settings.get("rope_scaling") or {})}
    default = {name: settings[name] for name in ("partial_rotary_factor",) if settings.get(name) is not None}
    outer = {name: settings[name] for name in ("original_max_position_embeddings",) if settings.get(name) is not None}
    if kinds is not None and any(isinstance(written.get(kind), Mapping) for kind in kinds):
        if mixed := [name for name, value in written.items() if name not in KINDS and value is not None]:
            raise UnsupportedError(
                f"config.json: parameters of all positions are next to those of one kind: {', '.join(mixed)}"
            )
        by_kind = {
            kind: rope_of({**default, **(written.get(kind) or {}), **outer}, head, longest) for kind in set(kinds)
        }
        return tuple(by_kind[kind] for kind in kinds)
    return (rope_of({**default, **written, **outer}, head, longest),) * layers


# -- families -----------------------------------------------------------------------------------------------------
def _llama(settings: Settings) -> DecoderConfig:
    return _common(settings)


def _mistral(settings: Settings) -> DecoderConfig:
    return _common({"sliding_window": 4096, **settings})


def _qwen2(settings: Settings) -> DecoderConfig:
    """Query, key and value have biases, the output has none, and the configuration does not say so."""
    return _common(_qwen_layers(settings), query_bias=True, output_bias=False)


def _qwen3(settings: Settings) -> DecoderConfig:
    return _common(_qwen_layers(settings), query_key_norm=True)


def _qwen_layers(settings: Settings) -> Settings:
    """Add ``layer_types`` of older files: windows from layer ``max_window_layers``."""
    first = settings.get("max_window_layers", 28)
    return _with_windows(settings, lambda n: n >= first)


def _with_windows(settings: Settings, slides: Callable[[int], bool]) -> Settings:
    """Return settings with ``layer_types`` by the rule of a family, and without a window that is not in use."""
    if not settings.get("use_sliding_window"):
        return {**settings, "sliding_window": None}
    if settings.get("layer_types") is not None:
        return settings
    layers = range(size_of(settings, "num_hidden_layers"))
    return {**settings, "layer_types": [KINDS[slides(n)] for n in layers]}


def _gemma(settings: Settings) -> DecoderConfig:
    config = _common(
        settings,
        activation=_gemma_activation(settings),
        norm_offset=1.0,
        embedding_scale=math.sqrt(size_of(settings, "hidden_size")),
        tied=settings.get("tie_word_embeddings", True),
    )
    return replace(config, head_size=size_of(settings, "head_dim", 256))


def _gemma_activation(settings: Settings) -> str:
    """Return the activation; early files say "gelu" and mean its approximation."""
    name = settings.get("hidden_act" if settings["model_type"] == "gemma" else "hidden_activation")
    return "gelu_pytorch_tanh" if name in (None, "gelu") else str(name)


def _gemma2(settings: Settings) -> DecoderConfig:
    layers = size_of(settings, "num_hidden_layers")
    if settings.get("layer_types") is None:
        turns = ("sliding_attention", "full_attention")
        settings = {**settings, "layer_types": [turns[n % 2] for n in range(layers)]}
    caps = {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0}
    settings = {"sliding_window": 4096, "head_dim": 256, **caps, **settings}
    config = _gemma(settings)
    return replace(
        config,
        names=replace(config.names, **GEMMA_NORMS),
        attention_scale=float(settings.get("query_pre_attn_scalar", 256)) ** -0.5,
        attention_cap=float(settings.get("attn_logit_softcapping") or 0.0),
        logit_cap=float(settings.get("final_logit_softcapping") or 0.0),
    )


def _gemma3(settings: Settings) -> DecoderConfig:
    layers = size_of(settings, "num_hidden_layers")
    settings = {"final_logit_softcapping": None, "attn_logit_softcapping": None, **settings}
    if settings.get("layer_types") is None:
        pattern = settings.get("sliding_window_pattern") or settings.get("_sliding_window_pattern") or 6
        kinds = ["full_attention" if (n + 1) % pattern == 0 else "sliding_attention" for n in range(layers)]
        settings = {**settings, "layer_types": kinds}
    written = settings.get("rope_parameters") or {"full_attention": settings.get("rope_scaling")}
    bases = {"full_attention": ("rope_theta", 1e6), "sliding_attention": ("rope_local_base_freq", 1e4)}
    ropes = {k: {"rope_theta": settings.get(*base), **(written.get(k) or {})} for k, base in bases.items()}
    settings = {**settings, "rope_parameters": {**written, **ropes}}
    return replace(_gemma2(settings), query_key_norm=True)


def _phi(settings: Settings) -> DecoderConfig:
    names = Names(
        output="self_attn.dense",
        query_norm="self_attn.q_layernorm",
        key_norm="self_attn.k_layernorm",
        up="mlp.fc1",
        down="mlp.fc2",
        final_norm="final_layernorm",
    )
    return _common(
        {"partial_rotary_factor": 0.5, **settings},
        activation=settings.get("hidden_act", "gelu_new"),
        eps=float(settings.get("layer_norm_eps", 1e-5)),
        gated=False,
        norm="layer",
        parallel=True,
        query_bias=True,
        output_bias=True,
        mlp_bias=True,
        head_bias=True,
        query_key_norm=bool(settings.get("qk_layernorm")),
        names=names,
    )


def _phi3(settings: Settings) -> DecoderConfig:
    names = Names(joint="self_attn.qkv_proj", gate_up="mlp.gate_up_proj")
    defaults = {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "original_max_position_embeddings": 4096}
    settings = {**defaults, **settings}
    for name in ("rope_scaling", "rope_parameters"):
        rope = settings.get(name) or {}
        # An earlier name of the method of this family.
        if "yarn" in (rope.get("type"), rope.get("rope_type")):
            settings = {**settings, name: {**rope, "rope_type": "longrope"}}
    return _common(settings, names=names)


def _gpt2(settings: Settings) -> DecoderConfig:
    hidden, heads = size_of(settings, "n_embd"), size_of(settings, "n_head")
    layers = size_of(settings, "n_layer")
    names = Names(
        root="transformer.",
        embedding="wte",
        positions="wpe",
        layer="h.{}.",
        joint="attn.c_attn",
        output="attn.c_proj",
        before_attention="ln_1",
        before_mlp="ln_2",
        up="mlp.c_fc",
        down="mlp.c_proj",
        final_norm="ln_f",
    )
    return DecoderConfig(
        family="gpt2",
        vocabulary=size_of(settings, "vocab_size"),
        hidden=hidden,
        intermediate=size_of(settings, "n_inner", 4 * hidden),
        layers=layers,
        heads=heads,
        kv_heads=heads,
        head_size=hidden // heads,
        longest=size_of(settings, "n_positions"),
        eps=float(settings.get("layer_norm_epsilon", 1e-5)),
        activation=settings.get("activation_function", "gelu_new"),
        gated=False,
        norm="layer",
        query_bias=True,
        output_bias=True,
        mlp_bias=True,
        input_major=True,
        tied=settings.get("tie_word_embeddings", True),
        ropes=(None,) * layers,
        windows=(None,) * layers,
        learned_positions=size_of(settings, "n_positions"),
        attention_scale=None if settings.get("scale_attn_weights", True) else 1.0,
        stop=_stop(settings),
        names=names,
    )


def _mixtral(settings: Settings) -> DecoderConfig:
    experts = replace(
        MIXTRAL_EXPERTS,
        count=size_of(settings, "num_local_experts", 8),
        active=size_of(settings, "num_experts_per_tok", 2),
        size=size_of(settings, "intermediate_size"),
    )
    config = _common({"rms_norm_eps": 1e-5, "rope_theta": 1e6, **settings})
    return replace(config, experts=experts, sparse=(True,) * config.layers)


def _qwen_experts(config: DecoderConfig, settings: Settings, count: int, active: int, shared: int) -> DecoderConfig:
    experts = Experts(
        size_of(settings, "num_experts", settings.get("num_local_experts", count)),
        size_of(settings, "num_experts_per_tok", active),
        size_of(settings, "moe_intermediate_size"),
        normalized=bool(settings.get("norm_topk_prob")),
        shared=shared,
    )
    dense, step = settings.get("mlp_only_layers") or (), settings.get("decoder_sparse_step") or 1
    sparse = tuple(n not in dense and (n + 1) % step == 0 for n in range(config.layers))
    return replace(config, experts=experts, sparse=sparse)


def _qwen2_moe(settings: Settings) -> DecoderConfig:
    last = settings.get("max_window_layers", 28)
    settings = _with_windows(settings, lambda n: n % 2 == 0 and n < last)
    config = replace(_qwen2(settings), query_bias=bool(settings.get("qkv_bias", True)))
    shared = size_of(settings, "shared_expert_intermediate_size")
    return _qwen_experts(config, settings, 60, 4, shared)


def _qwen3_moe(settings: Settings) -> DecoderConfig:
    return _qwen_experts(_qwen3(_with_windows(settings, lambda n: True)), settings, 128, 8, 0)


FAMILIES: dict[str, Callable[[Settings], DecoderConfig]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "phi": _phi,
    "phi3": _phi3,
    "gpt2": _gpt2,
    "mixtral": _mixtral,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
}
