"""The settings of a ``config.json`` that each family accounts for; any other one is refused by its name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mithril.graph import InputError, UnsupportedError

Settings = Mapping[str, Any]

FILE = """
    model_type architectures transformers_version torch_dtype dtype auto_map tokenizer_class finetuning_task
    task_specific_params cache_implementation transformers.js_config is_llama_config unsloth_version unsloth_fixed
    _name_or_path _commit_hash _attn_implementation _attn_implementation_autoset attn_implementation
"""
TRAINING = """
    initializer_range initializer_factor init_std logit_scale_init_value gradient_checkpointing
    dropout dropout_rate hidden_dropout attention_dropout activation_dropout classifier_dropout qa_dropout
    seq_classif_dropout hidden_dropout_prob attention_probs_dropout_prob resid_pdrop embd_pdrop attn_pdrop
    encoder_layerdrop decoder_layerdrop output_router_logits router_aux_loss_coef router_jitter_noise
    apply_spec_augment mask_time_prob mask_time_length mask_time_min_masks mask_feature_prob mask_feature_length
    mask_feature_min_masks
"""
FORM_OF_RESULTS = """
    use_cache return_dict use_return_dict output_attentions output_hidden_states output_past torchscript
    tf_legacy_loss use_bfloat16 chunk_size_feed_forward pretraining_tp problem_type id2label label2id num_labels
    _num_labels
"""
OTHER_TASKS = """
    summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout encoder_stride
    use_weighted_layer_sum classifier_proj_size
"""
GENERATION = """
    bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id forced_bos_token_id prefix
    forced_eos_token_id forced_decoder_ids suppress_tokens begin_suppress_tokens bad_words_ids max_length min_length
    max_new_tokens do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p
    typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size output_scores
    num_return_sequences exponential_decay_length_penalty remove_invalid_values return_dict_in_generate
    median_filter_width alignment_heads
"""
# Settings without an effect on the results of inference.
NEUTRAL = frozenset(f"{FILE}{TRAINING}{FORM_OF_RESULTS}{OTHER_TASKS}{GENERATION}".split())
# Settings that transformers has for every family, with the value that is supported.
SHARED = {
    "pruned_heads": {},
    "is_encoder_decoder": False,
    "is_decoder": False,
    "add_cross_attention": False,
    "tie_encoder_decoder": False,
    "attention_bias": False,
    "mlp_bias": False,
    "rope_interleaved": False,
    "use_mrope": False,
    "partial_rotary_factor": 1.0,  # most families ignore it, some only for some types of positions
}
ROTARY = """
    vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim
    max_position_embeddings original_max_position_embeddings tie_word_embeddings
    rope_theta rope_scaling rope_parameters
"""
RMS = f"{ROTARY} rms_norm_eps hidden_act"
QWEN = f"{RMS} sliding_window use_sliding_window max_window_layers"
QWEN_EXPERTS = f"""{QWEN}
    num_experts num_local_experts num_experts_per_tok moe_intermediate_size norm_topk_prob decoder_sparse_step
    mlp_only_layers
"""
GEMMA_2 = f"""{ROTARY}
    rms_norm_eps hidden_activation attention_bias query_pre_attn_scalar sliding_window layer_types
    final_logit_softcapping
"""
GPT2 = """
    vocab_size n_positions n_embd n_layer n_head n_inner n_ctx activation_function layer_norm_epsilon
    scale_attn_weights tie_word_embeddings reorder_and_upcast_attn
"""
TOWER = "hidden_size intermediate_size num_hidden_layers num_attention_heads hidden_act layer_norm_eps"
TEXT = f"{TOWER} vocab_size max_position_embeddings type_vocab_size tie_word_embeddings"
DISTILBERT = """
    vocab_size max_position_embeddings n_layers n_heads dim hidden_dim activation tie_word_embeddings tie_weights_
    sinusoidal_pos_embds
"""
T5 = """
    vocab_size d_model d_kv d_ff num_layers num_decoder_layers num_heads n_positions relative_attention_num_buckets
    relative_attention_max_distance feed_forward_proj dense_act_fn is_gated_act layer_norm_epsilon
    scale_decoder_outputs tie_word_embeddings
"""
WHISPER = """
    vocab_size num_mel_bins encoder_layers encoder_attention_heads encoder_ffn_dim decoder_layers
    decoder_attention_heads decoder_ffn_dim d_model activation_function max_source_positions max_target_positions
    num_hidden_layers scale_embedding
"""  # no version of transformers multiplies by scale_embedding
ABSOLUTE = {"position_embedding_type": "absolute"}  # other positions of older versions of transformers
CAUSAL = {"use_bidirectional_attention": False}
GEMMA_FIXED = {**CAUSAL, "hidden_act": "gelu_pytorch_tanh"}
# By family: the settings that are read, and others with the only value that is supported.
KNOWN: dict[str, tuple[str, Mapping[str, Any]]] = {
    "llama": (f"{RMS} attention_bias mlp_bias", {}),
    "mistral": (f"{RMS} sliding_window", {}),
    "qwen2": (f"{QWEN} layer_types", {}),
    "qwen3": (f"{QWEN} layer_types attention_bias", {}),
    "gemma": (f"{RMS} attention_bias", {**CAUSAL, "hidden_activation": "gelu_pytorch_tanh"}),
    "gemma2": (f"{GEMMA_2} attn_logit_softcapping", GEMMA_FIXED),
    "gemma3_text": (f"{GEMMA_2} sliding_window_pattern _sliding_window_pattern rope_local_base_freq", GEMMA_FIXED),
    "phi": (f"{ROTARY} layer_norm_eps hidden_act qk_layernorm partial_rotary_factor", {}),
    "phi3": (f"{RMS} sliding_window partial_rotary_factor", {}),
    "gpt2": (GPT2, {"scale_attn_by_inverse_layer_idx": False}),
    "mixtral": (f"{RMS} sliding_window num_local_experts num_experts_per_tok", {}),
    "qwen2_moe": (f"{QWEN_EXPERTS} layer_types qkv_bias shared_expert_intermediate_size", {}),
    "qwen3_moe": (f"{QWEN_EXPERTS} attention_bias", {}),
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "camembert"), (TEXT, ABSOLUTE)),
    "distilbert": (DISTILBERT, {}),
    "vit": (f"{TOWER} image_size patch_size num_channels pooler_output_size pooler_act", {"qkv_bias": True}),
    "clip": ("text_config vision_config text_config_dict vision_config_dict projection_dim", {}),
    "clip_text_model": (f"{TOWER} vocab_size max_position_embeddings projection_dim", {}),
    "clip_vision_model": (f"{TOWER} image_size patch_size num_channels projection_dim", {}),
    "t5": (T5, {"is_encoder_decoder": True}),
    "whisper": (WHISPER, {"is_encoder_decoder": True, "tie_word_embeddings": True}),
}
GENERATORS = ("ForCausalLM", "LMHeadModel", "Model", "ForConditionalGeneration")  # ends of names of classes


def check_settings(family: str, settings: Settings, where: str = "config.json") -> None:
    """Raise UnsupportedError that names each setting which the family does not account for."""
    names, fixed = KNOWN[family]
    accepted = NEUTRAL | {*names.split()}
    supported = {**SHARED, **fixed}
    flat = dict(settings)
    for positions in (settings.get("rope_parameters"), settings.get("rope_scaling")):
        for part in (positions or {}, *(positions or {}).values()):
            if isinstance(part, Mapping) and "partial_rotary_factor" in part:
                flat["partial_rotary_factor"] = part["partial_rotary_factor"]
    unknown = {
        name: value
        for name, value in flat.items()
        if value is not None and name not in accepted and not (name in supported and supported[name] == value)
    }
    if unknown:
        facts = [
            f"{name}: {value!r:.80}" + (f", supported: {supported[name]!r}" if name in supported else "")
            for name, value in unknown.items()
        ]
        raise UnsupportedError(
            f"{where} has settings that models of the type '{family}' do not support: {', '.join(unknown)}",
            facts=facts,
            hint="remove a setting that does not change the results of the model, or import the module: ml.from_torch",
        )


def check_generator(settings: Settings) -> None:
    """Raise UnsupportedError for a decoder with the head of another task, whose logits would be those of tokens."""
    classes = settings.get("architectures") or ()
    if classes and not any(str(name).endswith(GENERATORS) for name in classes):
        raise UnsupportedError(
            f"config.json is that of a {classes[0]}; decoders are supported as language models only",
            facts=[f"supported: classes whose names end in {', '.join(GENERATORS)}"],
            hint="import the module: ml.from_torch",
        )


def size_of(settings: Settings, name: str, default: int | None = None) -> int:
    """Return a positive integer of the settings."""
    value = settings.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 1 << 31:
        raise InputError(f"config.json: '{name}' is {value!r}, expected a positive integer")
    return value
