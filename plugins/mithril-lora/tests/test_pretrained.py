"""The layers of pretrained decoders have the paths of their checkpoints; tests/test_adapted_models.py trains them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mithril as ml
from mithril_lora import LoRA

pytest.importorskip("mithril_hub")
save_file = pytest.importorskip("safetensors.numpy").save_file

CONFIG = {"model_type": "llama", "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24}
CONFIG |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}


def pretrained(folder: Path) -> Any:
    """Return the model of a checkpoint with random weights."""
    from mithril_hub.architectures import build
    from mithril_hub.model import parameter_types

    rng = np.random.default_rng(0)
    types = parameter_types(build(CONFIG, dtype="float32", cache=None)[0])
    arrays = {name: rng.normal(0, 0.2, t.shape).astype(np.float32) for name, t in types.items()}
    save_file(arrays, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return ml.from_pretrained(folder)


def test_layers_by_the_paths_of_the_checkpoint(tmp_path: Path) -> None:
    model = pretrained(tmp_path)
    assert list(model.find("*.q_proj")) == [f"model.layers.{n}.self_attn.q_proj" for n in (0, 1)]
    paths = [path for path, _ in model.walk()]
    assert paths[:3] == ["model", "model.embed_tokens", "model.layers.0"] and paths[-1] == "lm_head"
    with pytest.raises(ml.ModelError, match="no layer matches '\\*.query'"):
        model.replace("*.query", LoRA())


def test_summary_lists_the_layers_with_their_sizes(tmp_path: Path) -> None:
    model = pretrained(tmp_path)
    lines = model.summary({"input_ids": [2, 7]}, width=120).splitlines()
    row = next(line for line in lines if "q_proj" in line)
    assert "q_proj (Projection)" in row and "f32[2, 7, 16]" in row and "256" in row
