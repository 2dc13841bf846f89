"""Record the results of transformers for small models of each family: ``python record.py [FAMILY ...]``.

The weights follow from the names of tensors (``checkpoints.py``), so a record holds the configuration, the shapes and
the results only. It requires torch, transformers and peft; the tests that read the records do not.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from checkpoints import RECORDS, folder_of, weight, write_folder

BASE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {"num_key_value_heads": 2}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
    "original_max_position_embeddings": 16,
}
EXPERTS = {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
SHARED_EXPERTS = {**EXPERTS, "shared_expert_intermediate_size": 40}
WINDOW = {"use_sliding_window": True, "sliding_window": 4}
WINDOWS = ["sliding_attention", "full_attention"]
# family: (class of the model, class of its configuration, settings)
DECODERS = {
    "llama2": ("LlamaForCausalLM", "LlamaConfig", {}),
    "llama3": ("LlamaForCausalLM", "LlamaConfig", {**GROUPED, "tie_word_embeddings": True, "rope_parameters": LLAMA3}),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**GROUPED, "sliding_window": 6, "head_dim": 16}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", GROUPED),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**GROUPED, "head_dim": 16}),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", {"num_key_value_heads": 1, "head_dim": 16}),
    "gemma2": (
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {**GROUPED, "head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 2.0},
    ),
    "gemma3": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {**GROUPED, "head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 20, "layer_types": WINDOWS},
    ),
    "phi": ("PhiForCausalLM", "PhiConfig", {}),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", {**GROUPED, "sliding_window": 6}),
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    ),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**GROUPED, "num_local_experts": 4}),
    "qwen2_moe": ("Qwen2MoeForCausalLM", "Qwen2MoeConfig", SHARED_EXPERTS),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {**EXPERTS, "head_dim": 16, "norm_topk_prob": True},
    ),
    "qwen2_windows": ("Qwen2ForCausalLM", "Qwen2Config", {**GROUPED, **WINDOW, "max_window_layers": 1}),
    "qwen2_moe_windows": ("Qwen2MoeForCausalLM", "Qwen2MoeConfig", {**SHARED_EXPERTS, **WINDOW}),
    "qwen3_moe_windows": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", {**EXPERTS, **WINDOW, "head_dim": 16}),
    "phi_tied": ("PhiForCausalLM", "PhiConfig", {"tie_word_embeddings": True}),
    "yarn": (
        "Qwen3ForCausalLM",
        "Qwen3Config",
        {
            **GROUPED,
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        },
    ),
    "linear": (
        "LlamaForCausalLM",
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "dynamic": (
        "LlamaForCausalLM",
        "LlamaConfig",
        {
            "max_position_embeddings": 16,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
        },
    ),
    "longrope": (
        "Phi3ForCausalLM",
        "Phi3Config",
        {**GROUPED, "original_max_position_embeddings": 16, "rope_parameters": LONGROPE},
    ),
}
PLACES = (0, 7, 19)  # of the recorded logits
LENGTHS = (5, 13)  # of the prompts of generation
PROMPT = np.random.default_rng(0).integers(3, 97, 20).astype(np.int32)


def small(kind: str, settings: dict) -> dict:
    """Return settings of a small model; GPT-2 has other names for sizes."""
    if kind == "GPT2Config":
        shared = {k: BASE[k] for k in ("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id")}
        return {**shared, **settings}
    return {**BASE, **settings}


def loaded(folder: Path) -> Any:
    """Return the model of transformers, which ends no text."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    model.generation_config.eos_token_id = None
    return model


def reference(folder: Path) -> tuple[np.ndarray[Any, Any], list[list[int]]]:
    """Return the logits of the prompt, and greedy tokens after its first 5 and 13 tokens."""
    import torch

    model, tokens = loaded(folder), torch.tensor(PROMPT[None].astype(np.int64))
    settings = {"max_new_tokens": 20, "do_sample": False}
    with torch.no_grad():
        logits = model(tokens).logits[0].numpy()
        rows = [model.generate(tokens[:, :n], attention_mask=torch.ones(1, n), **settings)[0, n:] for n in LENGTHS]
    return logits, [row.tolist() for row in rows]


def beams(folder: Path) -> dict[str, Any]:
    """Return the results of beam search, without an end and with a token that ends some texts earlier."""
    import torch

    model, tokens = loaded(folder), torch.tensor(PROMPT[None, :5].astype(np.int64))
    settings = {"max_new_tokens": 10, "num_beams": 4, "do_sample": False, "attention_mask": torch.ones(1, 5)}
    best = model.generate(tokens, pad_token_id=0, **settings)[0, 5:].tolist()
    stop = best[4]
    ended = model.generate(tokens, pad_token_id=0, eos_token_id=stop, **settings)[0, 5:].tolist()
    return {"best": best, "stop": stop, "ended": ended[: ended.index(stop) + 1] if stop in ended else ended}


def record_decoder(family: str) -> dict[str, Any]:
    """Return configuration, shapes, logits and tokens of a decoder."""
    import transformers
    from safetensors.numpy import load_file

    model_class, config_class, settings = DECODERS[family]
    config = getattr(transformers, config_class)(**small(config_class, settings))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        getattr(transformers, model_class)(config).save_pretrained(folder)
        shapes = {n: list(t.shape) for n, t in load_file(folder / "model.safetensors").items()}
        written = json.loads((folder / "config.json").read_text())
        write_folder(folder, written, shapes)
        logits, rows = reference(folder)
        searched = beams(folder)
    return {
        "config": written,
        "shapes": shapes,
        "prompt": PROMPT.tolist(),
        "logits": {str(p): [float(f"{x:.7g}") for x in logits[p]] for p in PLACES},
        "beams": searched,
        "tokens": {str(n): row for n, row in zip(LENGTHS, rows, strict=True)},
    }


ADAPTED = {  # family: layers with LoRA
    "llama2": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    "gpt2": ("c_attn", "c_proj", "c_fc"),
}


def adapter_weight(name: str, shape: Any) -> np.ndarray[Any, Any]:
    """Return a factor of LoRA, whose name is that of mithril."""
    return weight(name, list(shape)) * np.float32(0.5)


def record_adapted(family: str) -> dict[str, Any]:
    """Return the last logits of a decoder with LoRA, and the norms of gradients of half their squares, by peft."""
    import peft
    import torch

    settings = {"r": 8, "lora_alpha": 16, "target_modules": list(ADAPTED[family]), "fan_in_fan_out": family == "gpt2"}
    with tempfile.TemporaryDirectory() as name:
        model = peft.get_peft_model(loaded(folder_of(family, Path(name))), peft.LoraConfig(**settings)).eval()
        factors = {}
        for full, factor in model.named_parameters():
            if "lora_" in full:
                path, kind = full.removeprefix("base_model.model.").removesuffix(".default.weight").rsplit(".", 1)
                factors[f"{path}.{kind.lower()}"] = factor
        for full, factor in factors.items():
            factor.data = torch.tensor(adapter_weight(full, factor.shape))
        logits = model(torch.tensor(PROMPT[None].astype(np.int64))).logits
        (logits.square().sum() / 2).backward()
    return {
        "logits": [float(f"{x:.7g}") for x in logits[0, -1].tolist()],
        "gradients": {name: float(f"{factor.grad.norm().item():.7g}") for name, factor in factors.items()},
    }


SMALL = {k: BASE[k] for k in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")}
SMALL |= {"num_attention_heads": 4, "max_position_embeddings": 64}
VISION = {k: SMALL[k] for k in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")}
VISION |= {"image_size": 16, "patch_size": 8}
T5 = {"vocab_size": 97, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
DISTIL = {"vocab_size": 97, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 64}
WHISPER = {"vocab_size": 97, "d_model": 32, "num_mel_bins": 16, "max_source_positions": 20, "max_target_positions": 32}
WHISPER |= {f"{part}_layers": 2 for part in ("encoder", "decoder")}
WHISPER |= {f"{part}_attention_heads": 4 for part in ("encoder", "decoder")}
WHISPER |= {f"{part}_ffn_dim": 48 for part in ("encoder", "decoder")}
WHISPER |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3}
CLIP = {"text_config": {**SMALL, "eos_token_id": 96}, "vision_config": VISION, "projection_dim": 24}
NETWORKS = {
    "bert": ("BertModel", "BertConfig", SMALL),
    "bert_classes": ("BertForSequenceClassification", "BertConfig", {**SMALL, "num_labels": 3}),
    "roberta": ("RobertaModel", "RobertaConfig", SMALL),
    "roberta_classes": ("RobertaForSequenceClassification", "RobertaConfig", SMALL),
    "distilbert": ("DistilBertModel", "DistilBertConfig", DISTIL),
    "distilbert_classes": ("DistilBertForSequenceClassification", "DistilBertConfig", DISTIL),
    "vit": ("ViTModel", "ViTConfig", VISION),
    "vit_pooled": ("ViTModel", "ViTConfig", {**VISION, "pooler_act": "relu", "pooler_output_size": 20}),
    "vit_classes": ("ViTForImageClassification", "ViTConfig", {**VISION, "num_labels": 5}),
    "clip": ("CLIPModel", "CLIPConfig", CLIP),
    "t5": ("T5ForConditionalGeneration", "T5Config", T5),
    # its file says scale_decoder_outputs
    "t5_unscaled": ("T5ForConditionalGeneration", "T5Config", {**T5, "tie_word_embeddings": False}),
    "t5_gated": ("T5ForConditionalGeneration", "T5Config", {**T5, "feed_forward_proj": "gated-gelu"}),
    "whisper": ("WhisperForConditionalGeneration", "WhisperConfig", WHISPER),
}


def network_inputs(model: Any) -> dict[str, np.ndarray[Any, Any]]:
    """Return inputs for a network of mithril, with padding at the end of the second row."""
    rng = np.random.default_rng(0)
    lengths = {"input_ids": 21, "decoder_input_ids": 9}
    inputs: dict[str, np.ndarray[Any, Any]] = {}
    for name, (shape, kind) in model.types.items():
        if kind == "int64":
            inputs[name] = rng.integers(4, 96, (2, lengths[name])).astype(np.int32)
        else:
            inputs[name] = rng.normal(size=(2, *shape[1:])).astype(np.float32)
    if "attention_mask" in model.optional:
        inputs["attention_mask"] = (np.arange(21) < np.array([[21], [15]])).astype(np.int32)
        inputs["input_ids"] = np.where(inputs["attention_mask"], inputs["input_ids"], 1).astype(np.int32)
        inputs["input_ids"][:, 14] = 96  # the end of a text of CLIP
    return inputs


def network_reference(folder: Path, model_class: str, inputs: dict, outputs: tuple[str, ...]) -> dict[str, Any]:
    """Return the outputs of transformers."""
    import torch
    import transformers

    model = getattr(transformers, model_class).from_pretrained(folder, attn_implementation="eager").eval()
    tensors = {n: torch.tensor(x.astype(np.int64) if x.dtype.kind == "i" else x) for n, x in inputs.items()}
    with torch.no_grad():
        results = model(**tensors)
    return {name: getattr(results, name).numpy() for name in outputs}


def record_network(family: str) -> dict[str, Any]:
    """Return configuration, shapes and some numbers of the outputs of a network."""
    import transformers
    from safetensors.numpy import load_file

    import mithril as ml

    model_class, config_class, settings = NETWORKS[family]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        getattr(transformers, model_class)(getattr(transformers, config_class)(**settings)).save_pretrained(folder)
        shapes = {n: list(t.shape) for n, t in load_file(folder / "model.safetensors").items()}
        written = json.loads((folder / "config.json").read_text())
        write_folder(folder, written, shapes)
        model = ml.from_pretrained(folder)
        results = network_reference(folder, model_class, network_inputs(model), model.outputs)
        texts = {"tokens": generated(folder, family)} if family in GENERATORS else {}
    numbers = {name: [float(f"{x:.7g}") for x in selected(y)] for name, y in results.items()}
    return {"config": written, "shapes": shapes, "outputs": numbers, **texts}


GENERATORS = ("t5", "t5_gated", "whisper")
START = 3  # the first token of generated texts


def generation_source(family: str) -> Any:
    """Return the input of the encoder: two texts of different lengths, or two spectra."""
    rng = np.random.default_rng(0)
    if family == "whisper":
        return rng.normal(size=(2, WHISPER["num_mel_bins"], 2 * WHISPER["max_source_positions"])).astype(np.float32)
    return [rng.integers(4, 96, n).tolist() for n in (21, 15)]


def generated(folder: Path, family: str) -> list[list[int]]:
    """Return the most probable tokens after ``START``, computed from the whole text at each step."""
    import torch
    import transformers

    model = getattr(transformers, NETWORKS[family][0]).from_pretrained(folder, attn_implementation="eager").eval()
    name = "input_features" if family == "whisper" else "input_ids"
    texts = []
    for row in generation_source(family):
        text = [START]
        for _ in range(20):
            inputs = {name: torch.tensor(row)[None], "decoder_input_ids": torch.tensor([text])}
            with torch.no_grad():
                text.append(int(model(**inputs).logits[0, -1].argmax()))
        texts.append(text[1:])
    return texts


def selected(output: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return some of the numbers of an output: of the first positions of the last row."""
    return output[-1, :4, ::5].ravel() if output.ndim == 3 else output[-1].ravel()


if __name__ == "__main__":
    for name in sys.argv[1:] or [*DECODERS, *NETWORKS, *(f"{family}_lora" for family in ADAPTED)]:
        if name.removesuffix("_lora") in ADAPTED and name.endswith("_lora"):
            record = record_adapted(name.removesuffix("_lora"))
        else:
            record = record_decoder(name) if name in DECODERS else record_network(name)
        (RECORDS / f"{name}.json").write_text(json.dumps(record, separators=(",", ":")) + "\n")
        print(name)
