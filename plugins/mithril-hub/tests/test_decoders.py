"""Every decoder family against the records of transformers: logits, and greedy tokens through the cache."""

import numpy as np
import pytest
from checkpoints import read_record
from record import DECODERS

import mithril as ml


@pytest.mark.parametrize("family", DECODERS)
def test_logits_and_greedy_tokens(family, folders):
    record, folder = read_record(family), folders(family)
    prompt = np.array([record["prompt"]], np.int32)
    complete = ml.compile(ml.from_pretrained(folder), "numpy", inference=True)
    logits = np.asarray(complete({"input_ids": prompt})["logits"])[0]
    for place, expected in record["logits"].items():
        np.testing.assert_allclose(logits[int(place)], expected, atol=1e-5)

    cached = ml.compile(ml.from_pretrained(folder, cache=48), "numpy", inference=True)
    for length, tokens in record["tokens"].items():
        assert ml.generate(cached, record["prompt"][: int(length)], max_new_tokens=20, stop=()) == tokens


@pytest.mark.parametrize("family", ["gpt2", "gemma3", "qwen2_moe"])
def test_saved_models_are_read_without_their_classes(family, folders):
    model, prompt = ml.from_pretrained(folders(family)), np.array([[3, 5, 7]])
    compiled = ml.compile(model, "numpy", inference=True)
    again = ml.compile(ml.models.Layer.from_json(model.to_json()), "numpy", inference=True).bind(compiled.params)
    np.testing.assert_array_equal(again({"input_ids": prompt})["logits"], compiled({"input_ids": prompt})["logits"])


@pytest.mark.parametrize("family", ["llama2", "mixtral", "qwen2_moe"])
def test_tagged_layers_of_saved_models_return(family, folders):
    """Write an entry with its class for each, which the constructor of the decoder would make otherwise."""
    model = ml.from_pretrained(folders(family))
    for _, layer in model.walk():
        layer.set_attribute("stage", 1)
    again = ml.models.Layer.from_json(model.to_json())
    assert [(p, type(x), x.tags) for p, x in again.walk()] == [(p, type(x), x.tags) for p, x in model.walk()]


@pytest.mark.parametrize("family", ["llama2", "mistral", "gpt2", "longrope", "dynamic"])
def test_prompts_of_different_lengths_in_one_batch(family, folders):
    """Each row is what it would be alone."""
    record = read_record(family)
    compiled = ml.compile(ml.from_pretrained(folders(family), cache=48), "numpy", inference=True)
    prompts = [record["prompt"][:n] for n in (13, 5)]
    rows = ml.generate(compiled, prompts, max_new_tokens=20, stop=())
    assert rows == [record["tokens"]["13"], record["tokens"]["5"]]


@pytest.mark.parametrize("family", ["llama2", "gemma2"])
def test_padding_is_masked(family, folders):
    prompt = np.array(read_record(family)["prompt"], np.int32)
    compiled = ml.compile(ml.from_pretrained(folders(family)), "numpy", inference=True)
    single = compiled({"input_ids": prompt[None, :12]})["logits"]
    mask = np.arange(20)[None] < np.array([[20], [12]])
    batch = compiled({"input_ids": np.where(mask, prompt, 0), "attention_mask": mask.astype(np.int32)})["logits"]
    np.testing.assert_allclose(batch[1, :12], single[0], atol=1e-5)


def test_a_prompt_in_any_pieces_gives_the_same_logits(folders):
    prompt = np.array([read_record("mistral")["prompt"]], np.int32)
    compiled = ml.compile(ml.from_pretrained(folders("mistral"), cache=24), "numpy", inference=True)
    runner, complete = compiled.runner(), compiled.runner()({"input_ids": prompt, "position": np.int32(0)})["logits"]
    for pieces in ((20,), (1, 19), (7, 1, 12)):
        runner.reset()
        results, start = [], 0
        for size in pieces:
            piece = prompt[:, start : start + size]
            results.append(runner({"input_ids": piece, "position": np.int32(start)})["logits"])
            start += size
        np.testing.assert_allclose(np.concatenate(results, axis=1), complete, atol=1e-5)


def test_a_pretrained_model_is_trainable_and_a_block(folders):
    """Parameters have the names of the checkpoint, and gradients reach them."""
    model = ml.Model()
    model |= ml.from_pretrained(folders("llama2"))(input_ids="tokens", logits="logits")
    compiled = ml.compile(model, "numpy")
    tokens = np.array([read_record("llama2")["prompt"]], np.int32)
    params = compiled.randomize_params(inputs={"tokens": tokens})
    assert "decoder.model.layers.0.self_attn.q_proj.weight" in params
    _, gradients = compiled.evaluate(params, {"tokens": tokens}, np.ones((1, 20, 97), np.float32))
    assert np.abs(gradients["decoder.model.embed_tokens.weight"]).max() > 0
