"""Layers of pretrained models by the paths of their checkpoints: find, replace, hook, outputs."""

import numpy as np
import pytest
from checkpoints import read_record
from record import network_inputs, selected

import mithril as ml
from mithril.models import Linear, hook
from mithril_hub.decoder.decoder import Block
from mithril_hub.parts import Projection

QUERIES = {
    "bert": "encoder.layer.?.attention.self.query",
    "bert_classes": "bert.encoder.layer.?.attention.self.query",
    "distilbert": "transformer.layer.?.attention.q_lin",
    "vit": "encoder.layer.?.attention.attention.query",
    "clip": "text_model.encoder.layers.?.self_attn.q_proj",
    "t5": "decoder.block.?.layer.1.EncDecAttention.q",
    "whisper": "model.decoder.layers.?.encoder_attn.q_proj",
}


@pytest.mark.parametrize("family", QUERIES)
def test_layers_of_encoders_have_the_paths_of_the_checkpoint(family, folders):
    model = ml.from_pretrained(folders(family))
    assert len(model.find(QUERIES[family])) == 2
    names = {f"{path}.weight" for path, layer in model.walk() if isinstance(layer, Linear)}
    shapes = read_record(family)["shapes"]
    assert names <= {*shapes, *(root + n for n in shapes for root in ("bert.", "vit.", "model."))}


@pytest.mark.parametrize("family", ["bert_classes", "t5", "clip"])
def test_a_replaced_layer_computes_and_the_rest_keeps_its_weights(family, folders):
    model = ml.from_pretrained(folders(family))
    calls = []

    def twice(y):
        calls.append(y)
        return y * 2.0

    def results():
        return ml.compile(model, "numpy", inference=True)(network_inputs(model))

    model.replace(QUERIES[family], hook(lambda y: None))
    name, numbers = next(iter(read_record(family)["outputs"].items()))
    np.testing.assert_allclose(selected(np.asarray(results()[name])), numbers, atol=1e-5, rtol=1e-5)
    model.replace(QUERIES[family], hook(twice))
    assert np.abs(selected(np.asarray(results()[name])) - numbers).max() > 1e-4 and len(calls) >= 2


def test_hooks_on_blocks_of_a_decoder(folders):
    """A block is one layer with one result, such as for steering of its hidden states."""
    model = ml.from_pretrained(folders("llama2"))
    tokens = np.array([[5, 6, 7]])
    plain = ml.compile(model, "numpy", inference=True)({"input_ids": tokens})["logits"]
    assert [type(layer) for layer in model.find("model.layers.?").values()] == [Block, Block]
    model.replace("model.layers.1.self_attn.o_proj", hook(lambda y: y * 0.0))
    model.replace("model.layers.1.mlp", hook(lambda y: y * 0.0))
    inner = ml.compile(model, "numpy", inference=True, outputs=["model.layers.0", "model.layers.1", "logits"])
    results = inner({"input_ids": tokens})
    np.testing.assert_array_equal(results["model.layers.0"], results["model.layers.1"])
    assert np.abs(results["logits"] - plain).max() > 1e-3


def test_a_projection_is_a_linear_layer(folders):
    layers = ml.from_pretrained(folders("gpt2")).find(Linear)
    assert all(isinstance(layer, Projection) for layer in layers.values())
    assert "transformer.h.1.attn.c_attn" in layers and "transformer.h.0.mlp.c_fc" in layers


def test_a_head_of_another_size_starts_random_and_the_rest_pretrained(folders):
    x = {"input_ids": np.array([[5, 6, 7]], np.int64)}
    model = ml.from_pretrained(folders("llama2"))
    hidden = ml.compile(model, "numpy", inference=True, outputs=["model"])(x)["model"]
    compiled = ml.compile(model.replace("lm_head", Linear(7)), "numpy", shapes={"input_ids": [1, 3]})
    params = compiled.randomize_params(seed=0)
    assert params["lm_head.weight"].shape == (7, 32) and params.keys() - {"lm_head.bias"} == model.pretrained.keys()
    expected = hidden @ params["lm_head.weight"].T + params["lm_head.bias"]
    np.testing.assert_allclose(compiled.evaluate(params, x)["logits"], expected, rtol=1e-5, atol=1e-6)
    model = ml.from_pretrained(folders("llama2")).replace("lm_head", Linear(97, bias=False))
    np.testing.assert_array_equal(
        ml.compile(model, "numpy", shapes={"input_ids": [1, 3]}).randomize_params(seed=0)["lm_head.weight"],
        model.pretrained["lm_head.weight"],
    )
