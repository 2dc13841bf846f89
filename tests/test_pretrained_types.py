"""Types of models that transformers has: imported by ``ml.from_pretrained`` and equal to transformers."""

from __future__ import annotations

import json
import shutil
import sys
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

import mithril as ml
from mithril.graph import InputError, UnsupportedError
from mithril_lora import LoRA, adapter_patterns, merge

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
types = pytest.importorskip("bench_pretrained_types")  # which needs transformers, as the environment `all` of tox has


@pytest.fixture(scope="module")
def albert(tmp_path_factory):
    folder = tmp_path_factory.mktemp("albert")
    assert types.write("albert", folder) == ""
    return folder


@pytest.fixture(scope="module")
def model(albert):
    return ml.from_pretrained(albert)


@pytest.mark.soak
@pytest.mark.parametrize("kind", "deberta electra mpnet opt bloom gpt_neo olmoe convnext resnet wav2vec2 blip".split())
def test_types_of_text_images_and_sound_equal_transformers(kind):
    assert types.attempt(kind)["result"] == "equal"


def test_images_equal_transformers():
    assert types.attempt("dinov2")["result"] == "equal"


def test_open_sizes_padding_and_inputs_that_are_left_out(albert, model):
    assert types.difference(albert, model) < 1e-5
    assert (model.inputs, model.optional) == (("input_ids",), ("attention_mask", "token_type_ids"))
    ids = np.arange(3, 17).reshape(2, 7)
    compiled = ml.compile(model, "numpy", inference=True)
    full = compiled({"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)})
    np.testing.assert_array_equal(compiled({"input_ids": ids.astype(np.int32)})["logits"], full["logits"])


def test_layers_have_the_paths_of_transformers_and_weights_stay_mapped(albert, model):
    paths = [path for path, _ in model.walk()]
    assert "albert.encoder.albert_layer_groups.0.albert_layers.0.attention.query" in paths
    assert not [path for path in paths if "metadata" in path]
    array = model.pretrained["albert.embeddings.word_embeddings.weight"]
    while array.base is not None and not isinstance(array, np.memmap):
        array = array.base
    assert isinstance(array, np.memmap)


def test_lora_is_merged_into_the_weights(model):
    adapted, inputs = deepcopy(model), {"input_ids": np.arange(3, 17).reshape(2, 7)}
    adapted.replace("*.query", LoRA(rank=4))
    compiled = ml.compile(adapted, "numpy", shapes={"input_ids": (2, 7)}, trainable=adapter_patterns(adapted))
    rng = np.random.default_rng(0)
    params = dict(compiled.randomize_params(seed=0))
    params |= {n: rng.normal(size=x.shape).astype(np.float32) for n, x in params.items() if "lora" in n}
    values = compiled.evaluate(params, inputs)
    _, gradients = compiled.evaluate(params, inputs, output_gradients=values)
    assert set(gradients) == {name for name in params if "lora" in name} != set()
    merged = merge(adapted, params)
    assert set(merged) == set(model.pretrained)
    result = ml.compile(adapted, "numpy", inference=True).evaluate(merged, inputs)["logits"]
    np.testing.assert_allclose(result, values["logits"], atol=1e-5, rtol=1e-5)


def test_changed_weights_are_written_as_a_folder_that_transformers_reads(model, tmp_path):
    compiled = ml.compile(model, "numpy", inference=True)
    changed = {name: x * np.float32(1.5) for name, x in model.pretrained.items()}
    folder = compiled.export(tmp_path / "changed", params=changed, format="huggingface").path
    ids = np.arange(3, 17).reshape(2, 7)
    module = types.transformers.AlbertForMaskedLM.from_pretrained(folder).eval()
    with torch.no_grad():
        expected = module(torch.from_numpy(ids)).logits.numpy()
    result = compiled.evaluate(changed, {"input_ids": ids})["logits"]
    np.testing.assert_allclose(result, expected, atol=1e-5, rtol=1e-5)


def test_a_model_without_a_head_pools_as_sentence_transformers(albert, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(albert, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({n: x for n, x in config.items() if n != "architectures"}))
    pooler = {f"albert.pooler.{n}": np.ones(shape, np.float32) for n, shape in (("weight", (32, 32)), ("bias", (32,)))}
    save_file(load_file(folder / "model.safetensors") | pooler, folder / "model.safetensors", {"format": "pt"})
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    model = ml.from_pretrained(folder, dtype="float16")
    assert model.outputs == ("last_hidden_state", "pooler_output", "embedding")
    inputs = types.call(model)
    values = ml.compile(model, "numpy", inference=True)(inputs)
    assert values["embedding"].dtype == np.float16
    last = values["last_hidden_state"][-1, inputs["attention_mask"][-1] == 1]
    np.testing.assert_allclose(values["embedding"][-1], last.mean(axis=0), rtol=1e-2, atol=1e-2)


def test_files_that_do_not_fit_are_an_error(albert, tmp_path):
    config = json.loads((albert / "config.json").read_text())
    tensors = load_file(albert / "model.safetensors")

    def read(settings, weights=tensors, **options):
        (tmp_path / "config.json").write_text(json.dumps({**config, **settings}))
        save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
        return ml.from_pretrained(tmp_path, **options)

    with pytest.raises(InputError, match="take no cache="):
        read({}, cache=8)
    with pytest.raises(InputError, match=r"missing: 'albert.embeddings.word_embeddings.weight'"):
        read({}, {n: x for n, x in tensors.items() if not n.endswith("word_embeddings.weight")})
    with pytest.raises(InputError, match="cannot create the model"):
        read({"hidden_size": 48})
    with pytest.raises(InputError, match="has no model 'pipeline' of the type 'albert'"):
        read({"architectures": ["pipeline"]})
    with pytest.raises(UnsupportedError, match="quantized"):
        read({"quantization_config": {"quant_method": "gptq"}})
    with pytest.raises(UnsupportedError, match=r"'alberta' are not supported(.|\n)*transformers, .* has no such type"):
        read({"model_type": "alberta", "auto_map": {"AutoModel": "code.Model"}})
