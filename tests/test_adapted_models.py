"""LoRA on every family of pretrained models, trained, merged and exported; the soak tries all records and engines."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mithril as ml
from mithril.models import Linear
from mithril_lora import LoRA, adapter_patterns

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "plugins" / "mithril-hub" / "tests"))
from adapting import equal, train_merge_and_write
from checkpoints import folder_of, read_record
from record import ADAPTED, DECODERS, NETWORKS, adapter_weight, network_inputs

FAMILIES = {  # record: engine; those that differ in their layers
    **dict.fromkeys(("qwen3", "gemma2", "phi", "phi3", "gpt2", "qwen2_moe", "bert_classes"), "numpy"),
    "clip": "numpy",
    "t5_gated": "numpy",
    "whisper": "numpy",
    "llama2": "torch",
    "vit": "jax",
}
GGUF = {
    **{family: family for family in ("qwen2", "qwen3", "gemma", "bert")},
    "llama2": "llama",
    "llama3": "llama",
    "linear": "llama",
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "bert_classes": "bert",
}
ROWS = [(family, backend, False) for family, backend in FAMILIES.items()]
ROWS += [(family, backend, True) for family in (*DECODERS, *NETWORKS) for backend in ("numpy", "torch", "jax")]


def inputs_of(family: str, model: Any) -> dict[str, Any]:
    if family in NETWORKS:
        return network_inputs(model)
    return {"input_ids": np.array(read_record(family)["prompt"], np.int32).reshape(2, 10)}


@pytest.mark.parametrize(
    ("family", "backend", "in_all_formats"),
    [pytest.param(*row, marks=pytest.mark.soak if row[2] else ()) for row in ROWS],
)
def test_families_are_trained_merged_and_exported(family, backend, in_all_formats, tmp_path):
    model = ml.from_pretrained(folder_of(family, tmp_path))
    formats: dict[str, Any] = {"gguf": {"architecture": GGUF[family]}} if family in GGUF else {"onnx": {}}
    if in_all_formats:
        formats["onnx"] = {}
    paths = [path for path, layer in model.walk() if isinstance(layer, Linear)]
    train_merge_and_write(model, paths, inputs_of(family, model), backend, tmp_path, formats)


TABLES = {"phi_tied": "*.embed_tokens", "t5": "shared", "whisper": "*.embed_tokens", "gpt2": "*.wte"}


@pytest.mark.parametrize("family", TABLES)
def test_heads_have_the_products_of_tables_that_they_share(family, tmp_path):
    model = ml.from_pretrained(folder_of(family, tmp_path))
    train_merge_and_write(model, [TABLES[family]], inputs_of(family, model), "numpy", tmp_path, {})


@pytest.mark.parametrize("family", ADAPTED)
def test_results_and_gradients_equal_those_of_peft(family, tmp_path):
    record, model = read_record(f"{family}_lora"), ml.from_pretrained(folder_of(family, tmp_path))
    for name in ADAPTED[family]:
        model.replace(f"*.{name}", LoRA(rank=8, alpha=16))
    inputs = {"input_ids": np.array(read_record(family)["prompt"])[None]}
    compiled = ml.compile(model, "numpy", shapes={"input_ids": (1, 20)}, trainable=adapter_patterns(model))
    params = dict(compiled.randomize_params(seed=0))
    params |= {name: adapter_weight(name, np.shape(params[name])) for name in record["gradients"]}
    values = compiled.evaluate(params, inputs)
    numbers = {"logits": np.array(record["logits"])}
    equal({"logits": values["logits"][0, -1]}, numbers)
    _, gradients = compiled.evaluate(params, inputs, output_gradients=values)
    assert set(gradients) == set(record["gradients"])
    for name, expected in record["gradients"].items():
        np.testing.assert_allclose(np.linalg.norm(gradients[name]), expected, rtol=1e-4, err_msg=name)
