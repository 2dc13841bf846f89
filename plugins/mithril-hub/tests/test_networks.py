"""Encoders, and models of an encoder and a decoder, against the records of transformers."""

import numpy as np
import pytest
from checkpoints import read_record, write_folder
from record import GENERATORS, NETWORKS, START, generation_source, network_inputs, selected

import mithril as ml
from mithril.graph import InputError


@pytest.mark.parametrize("family", NETWORKS)
def test_outputs(family, folders):
    model = ml.from_pretrained(folders(family))
    outputs = ml.compile(model, "numpy", inference=True)(network_inputs(model))
    expected = read_record(family)["outputs"]
    assert list(outputs) == list(expected)
    for name, numbers in expected.items():
        np.testing.assert_allclose(selected(np.asarray(outputs[name])), numbers, atol=1e-5, rtol=1e-5, err_msg=name)


def test_optional_inputs_may_be_left_out(folders):
    compiled = ml.compile(ml.from_pretrained(folders("bert")), "numpy", inference=True)
    tokens = np.array([[5, 6, 7]], np.int32)
    plain = compiled({"input_ids": tokens})["last_hidden_state"]
    complete = {"input_ids": tokens, "attention_mask": np.ones_like(tokens), "token_type_ids": np.zeros_like(tokens)}
    np.testing.assert_allclose(plain, compiled(complete)["last_hidden_state"], atol=1e-6)


@pytest.mark.parametrize("family", GENERATORS)
def test_generated_texts(family, folders):
    """Texts of a batch, of single rows, of a session that begins again, and of a prompt of several tokens."""
    compiled = ml.compile(ml.from_pretrained(folders(family), cache=24), "numpy", inference=True)
    source, expected = generation_source(family), read_record(family)["tokens"]
    settings = {"max_new_tokens": 20, "stop": ()}
    assert ml.generate(compiled, [START], source=source, **settings) == expected
    session = ml.Session(compiled)
    for n in (1, 0, 0):
        assert ml.generate(session, [START], source=source[n], **settings) == expected[n]
    prompts = [[START, *row[:n]] for row, n in zip(expected, (4, 9), strict=True)]
    rows = ml.generate(session, prompts, source=source, max_new_tokens=11, stop=())
    assert rows == [row[n : n + 11] for row, n in zip(expected, (4, 9), strict=True)]


def test_beams_of_a_batch_are_those_of_its_rows(folders):
    compiled = ml.compile(ml.from_pretrained(folders("t5_gated"), cache=24), "numpy", inference=True)
    source, settings = generation_source("t5_gated"), {"max_new_tokens": 8, "num_beams": 3}
    batch = ml.generate(compiled, [START], source=source, **settings)
    assert batch == [ml.generate(compiled, [START], source=row, **settings) for row in source]
    assert batch[0] != batch[1]


def test_generation_of_an_encoder_and_a_decoder_begins_and_ends_as_its_checkpoint_says(folders):
    compiled = ml.compile(ml.from_pretrained(folders("whisper"), cache=400), "numpy", inference=True)
    session = ml.Session(compiled)
    row = ml.generate(session, source=generation_source("whisper")[0], max_new_tokens=8)
    assert session.rows[0][0] == 3 and len(row) <= 8
    assert session.capacity == 32  # as many as the checkpoint has positions


def test_the_source_of_an_encoder(folders):
    compiled = ml.compile(ml.from_pretrained(folders("t5"), cache=24), "numpy", inference=True)
    with pytest.raises(InputError, match="the encoder of this model requires source"):
        ml.generate(compiled, [1, 2])
    with pytest.raises(InputError, match="source has no tokens"):
        ml.generate(compiled, source=[[]])
    with pytest.raises(InputError, match="3 prompts for 1 rows of source"):
        ml.generate(compiled, [[1], [2], [3]], source=[4, 5])
    with pytest.raises(InputError, match="holds 24 positions"):
        ml.generate(compiled, source=[4, 5], max_new_tokens=40, stop=())
    with pytest.raises(InputError, match="the encoder's cache holds 24 positions, and source has 30 tokens"):
        ml.generate(compiled, source=[4] * 30)
    decoder = ml.compile(ml.from_pretrained(folders("qwen3"), cache=24), "numpy", inference=True)
    with pytest.raises(InputError, match="has no encoder"):
        ml.generate(decoder, [1], source=[4, 5])


def test_an_encoder_has_no_cache(folders):
    with pytest.raises(InputError, match="have no cache"):
        ml.from_pretrained(folders("bert"), cache=8)


@pytest.mark.parametrize("family", ["xlm-roberta", "camembert"])
def test_relatives_of_roberta_have_its_outputs(family, tmp_path):
    record = read_record("roberta")
    folder = write_folder(tmp_path / "m", record["config"] | {"model_type": family}, record["shapes"])
    model = ml.from_pretrained(folder)
    inputs = network_inputs(model)
    results = ml.compile(model, "numpy", inference=True)(inputs)
    assert [*results] == ["last_hidden_state", "pooler_output"] and results["pooler_output"].shape == (2, 32)


def test_rows_with_other_sources_draw_as_without_each_other(folders):
    """Draw each text with the numbers of its source alone, whatever the padding; an equal source gives another text."""
    compiled = ml.compile(ml.from_pretrained(folders("t5_gated"), cache=24), "numpy", inference=True)
    source, settings = generation_source("t5_gated"), {"max_new_tokens": 6, "stop": (), "temperature": 1.5, "seed": 3}
    rows = ml.generate(compiled, [START], source=[*source, source[1]], **settings)
    assert rows[:2] == [ml.generate(compiled, [START], source=text, **settings) for text in source]
    assert rows[2] != rows[1]


@pytest.mark.parametrize("family", NETWORKS)
def test_saved_networks_are_read_without_their_classes(family, folders):
    model = ml.from_pretrained(folders(family))
    compiled = ml.compile(model, "numpy", inference=True)
    again = ml.compile(ml.models.Layer.from_json(model.to_json()), "numpy", inference=True).bind(compiled.params)
    inputs = network_inputs(model)
    outputs = again(inputs)
    for name, right in compiled(inputs).items():
        np.testing.assert_array_equal(outputs[name], right, err_msg=name)


@pytest.mark.parametrize("family", GENERATORS)
def test_saved_generators_begin_and_end_texts_as_before(family, folders):
    model = ml.from_pretrained(folders(family), cache=24)
    compiled = ml.compile(model, "numpy", inference=True)
    again = ml.compile(ml.models.Layer.from_json(model.to_json()), "numpy", inference=True).bind(compiled.params)
    source = generation_source(family)[0]
    assert ml.generate(again, source=source, max_new_tokens=8) == ml.generate(compiled, source=source, max_new_tokens=8)


def test_changed_layers_of_saved_networks_return(folders):
    """Layers below exist from the construction on, so that a file can name those that were changed."""
    model = ml.from_pretrained(folders("bert"))
    for _, layer in model.walk():
        layer.set_attribute("stage", 1)
    model.replace("encoder.layer.1.output.dense", ml.models.Linear(16))
    again = ml.models.Layer.from_json(model.to_json())
    assert [(p, type(x), x.tags) for p, x in again.walk()] == [(p, type(x), x.tags) for p, x in model.walk()]
