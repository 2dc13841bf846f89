"""Files of other libraries that sources read: an archive of Keras, and a checkpoint of Hugging Face."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

POLICY = {"module": "keras", "class_name": "DTypePolicy", "config": {"name": "float32"}, "registered_name": None}
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 1,
    "max_position_embeddings": 16,
    "vocab_size": 97,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "eos_token_id": 2,
}
BLOCK = "model.layers.0"
SHAPES = {
    "model.embed_tokens.weight": (97, 16),
    f"{BLOCK}.input_layernorm.weight": (16,),
    f"{BLOCK}.self_attn.q_proj.weight": (16, 16),
    f"{BLOCK}.self_attn.k_proj.weight": (8, 16),
    f"{BLOCK}.self_attn.v_proj.weight": (8, 16),
    f"{BLOCK}.self_attn.o_proj.weight": (16, 16),
    f"{BLOCK}.post_attention_layernorm.weight": (16,),
    f"{BLOCK}.mlp.gate_proj.weight": (24, 16),
    f"{BLOCK}.mlp.up_proj.weight": (24, 16),
    f"{BLOCK}.mlp.down_proj.weight": (16, 24),
    "model.norm.weight": (16,),
    "lm_head.weight": (97, 16),
}


def archive(path: Path) -> None:
    """Write the small network of two layers as Keras saves it."""
    import h5py

    def entry(kind: str, **config: Any) -> dict[str, Any]:
        return {"module": "keras.layers", "class_name": kind, "config": config, "registered_name": None}

    def dense(name: str, units: int, activation: str) -> dict[str, Any]:
        return entry(
            "Dense", name=name, trainable=True, dtype=POLICY, units=units, activation=activation, use_bias=True
        )

    layers = [
        entry("InputLayer", batch_shape=[None, 6], dtype="float32", sparse=False, ragged=False, name="input"),
        dense("first", 8, "tanh"),
        dense("last", 3, "linear"),
    ]
    net = {"name": "net", "trainable": True, "dtype": POLICY, "layers": layers}
    config = {"module": "keras", "class_name": "Sequential", "config": net, "registered_name": None}
    rng, weights = np.random.default_rng(0), io.BytesIO()
    with h5py.File(weights, "w") as file:
        for name, shape in (("dense", (6, 8)), ("dense_1", (8, 3))):
            file[f"layers/{name}/vars/0"] = rng.normal(size=shape).astype(np.float32)
            file[f"layers/{name}/vars/1"] = rng.normal(size=shape[1:]).astype(np.float32)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("metadata.json", json.dumps({"keras_version": "3.15.1", "date_saved": "2026-11-22@00:00:00"}))
        file.writestr("config.json", json.dumps(config))
        file.writestr("model.weights.h5", weights.getvalue())


def checkpoint(folder: Path) -> None:
    """Write a decoder of one block in the format of Hugging Face."""
    from safetensors.numpy import save_file

    rng = np.random.default_rng(0)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    tensors = {name: rng.normal(scale=0.3, size=shape).astype(np.float32) for name, shape in SHAPES.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
