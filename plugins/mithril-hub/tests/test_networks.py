"""Encoders, and models of an encoder and a decoder, against the records of transformers."""

import numpy as np
import pytest
from checkpoints import read_record
from record import NETWORKS, network_inputs, selected

import mithril as ml
from mithril.base import InputError


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


def test_an_encoder_has_no_cache(folders):
    with pytest.raises(InputError, match="have no cache"):
        ml.from_pretrained(folders("bert"), cache=8)
