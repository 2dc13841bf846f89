"""LoRA of pretrained decoders: by the paths of their checkpoints, trained, and merged into the weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mithril as ml
from mithril_lora import LoRA, adapter_parameters, adapter_patterns, merge

pytest.importorskip("mithril_hub")
save_file = pytest.importorskip("safetensors.numpy").save_file

SIZES = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
GPT2 = {"vocab_size": 40, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
FAMILIES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "llama": ({**SIZES, "num_key_value_heads": 2}, ["*.q_proj", "*.v_proj", "*.mlp.*"]),
    "gemma2": ({**SIZES, "head_dim": 4, "num_key_value_heads": 2}, ["*.self_attn.*", "model.layers.0.mlp.up_proj"]),
    "gpt2": (GPT2, ["*.c_attn", "*.attn.c_proj"]),  # c_proj is square, and its weight is [in, out]
    "phi3": ({**SIZES, "num_key_value_heads": 2}, ["*.qkv_proj", "*.gate_up_proj"]),
    "bert": (
        {**SIZES, "hidden_act": "gelu", "max_position_embeddings": 16},
        ["*.query", "*.value", "*.intermediate.dense"],
    ),
    "mixtral": ({**SIZES, **EXPERTS, "num_key_value_heads": 2}, ["*.v_proj", "*.experts.?.w[123]"]),
}


def folder_of(family: str, folder: Path) -> Path:
    """Write a checkpoint with random weights."""
    from mithril_hub.architectures import build
    from mithril_hub.model import parameter_types

    config = {"model_type": family, **FAMILIES[family][0]}
    rng = np.random.default_rng(0)
    model, _ = build(config, dtype="float32", cache=None)
    types = parameter_types(model)
    save_file(
        {n: rng.normal(0, 0.2, t.shape).astype(np.float32) for n, t in types.items()}, folder / "model.safetensors"
    )
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(("family", "backend"), [*((f, "numpy") for f in FAMILIES if f != "bert"), ("llama", "torch")])
def test_three_steps_of_training_and_merging(family: str, backend: str, tmp_path: Path) -> None:
    if backend == "torch":
        pytest.importorskip("mithril_torch")
        pytest.importorskip("torch")
    model: Any = ml.from_pretrained(folder_of(family, tmp_path))
    tokens = np.random.default_rng(1).integers(0, 40, (2, 7)).astype(np.int32)
    plain = ml.compile(model, backend, inference=True)({"input_ids": tokens})["logits"]
    for pattern in FAMILIES[family][1]:
        model.replace(pattern, LoRA(rank=4, alpha=8))
    compiled = ml.compile(model, backend, shapes={"input_ids": [2, 7]}, trainable=adapter_patterns(model))
    params = dict(compiled.randomize_params(seed=0))
    to_numpy = compiled.backend.to_numpy
    first = compiled.evaluate(params, {"input_ids": tokens})["logits"]
    np.testing.assert_allclose(to_numpy(first), to_numpy(plain), atol=1e-5)
    frozen = {n: np.copy(to_numpy(x)) for n, x in params.items() if n not in adapter_parameters(params)}
    for _ in range(3):
        logits = to_numpy(compiled.evaluate(params, {"input_ids": tokens})["logits"])
        shifted = np.exp(logits - logits.max(-1, keepdims=True))
        ahead = np.roll(np.eye(40, dtype=np.float32)[tokens], -1, axis=1)
        gradient = (shifted / shifted.sum(-1, keepdims=True) - ahead).astype(np.float32)
        _, gradients = compiled.evaluate(params, {"input_ids": tokens}, output_gradients={"logits": gradient})
        assert set(gradients) == set(adapter_parameters(params))
        params |= {n: params[n] - 0.05 * g for n, g in gradients.items()}
    trained = to_numpy(compiled.evaluate(params, {"input_ids": tokens})["logits"])
    assert np.abs(trained - to_numpy(plain)).max() > 1e-3
    assert all(np.array_equal(to_numpy(params[n]), x) for n, x in frozen.items())

    merged = merge(model, {n: to_numpy(x) for n, x in params.items()})
    assert set(merged) == set(frozen)
    again = ml.compile(model, backend, inference=True).bind(merged)({"input_ids": tokens})["logits"]
    np.testing.assert_allclose(to_numpy(again), trained, atol=1e-4)


def test_an_encoder_is_adapted_and_merged(tmp_path: Path) -> None:
    model: Any = ml.from_pretrained(folder_of("bert", tmp_path))
    tokens = np.random.default_rng(1).integers(0, 40, (2, 7))
    for pattern in FAMILIES["bert"][1]:
        model.replace(pattern, LoRA(rank=4))
    compiled = ml.compile(model, "numpy", shapes={"input_ids": [2, 7]}, trainable=adapter_patterns(model))
    rng = np.random.default_rng(2)
    params = dict(compiled.randomize_params(seed=0))
    params |= {n: rng.normal(0, 0.2, x.shape).astype(np.float32) for n, x in adapter_parameters(params).items()}
    changed = compiled.evaluate(params, {"input_ids": tokens})["last_hidden_state"]
    merged = merge(model, params)
    assert len(merged) == len(params) - 2 * 6
    again = ml.compile(model, "numpy", inference=True).bind(merged)({"input_ids": tokens})["last_hidden_state"]
    np.testing.assert_allclose(again, changed, atol=1e-4)


def test_layers_by_the_paths_of_the_checkpoint(tmp_path: Path) -> None:
    model: Any = ml.from_pretrained(folder_of("llama", tmp_path))
    assert list(model.find("*.q_proj")) == [f"model.layers.{n}.self_attn.q_proj" for n in (0, 1)]
    paths = [path for path, _ in model.walk()]
    assert paths[:3] == ["model", "model.embed_tokens", "model.layers.0"] and paths[-1] == "lm_head"
    with pytest.raises(ml.ModelError, match="no layer matches '\\*.query'"):
        model.replace("*.query", LoRA())


def test_summary_lists_the_layers_with_their_sizes(tmp_path: Path) -> None:
    model: Any = ml.from_pretrained(folder_of("llama", tmp_path))
    lines = model.summary({"input_ids": [2, 7]}, width=120).splitlines()
    row = next(line for line in lines if "q_proj" in line)
    assert "q_proj (Projection)" in row and "f32[2, 7, 16]" in row and "256" in row
