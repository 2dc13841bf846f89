"""Types of models that mithril has no layers for, without transformers; tests/test_pretrained_types.py has it."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

import mithril as ml
from mithril.graph import UnsupportedError
from mithril_hub.others import model


def test_an_unknown_type_names_the_native_ones_and_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mpnet"}))
    save_file({"w": np.zeros(1, np.float32)}, tmp_path / "model.safetensors")
    monkeypatch.setattr(model, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedError) as caught:
        ml.from_pretrained(tmp_path)
    assert str(caught.value) == (
        "models of the type 'mpnet' are not supported\n"
        "  types with layers of mithril: bert, camembert, clip, distilbert, gemma, gemma2, gemma3_text, gpt2, "
        "llama, mistral, mixtral, phi, phi3, qwen2, qwen2_moe, qwen3, qwen3_moe, roberta, t5, vit, "
        "whisper, xlm-roberta\n"
        "  others are those of transformers; not installed: transformers, torch, mithril_torch\n"
        "hint: pip install 'mithril-hub[transformers]'"
    )
