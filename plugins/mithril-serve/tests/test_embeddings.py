"""Vectors of texts by the official client of OpenAI: equal to those of the model, padded or not, and wrong requests."""

import base64
import json
from dataclasses import replace

import httpx2
import numpy as np
import openai
import pytest
from small_servers import Words, running

import mithril as ml
from mithril_hub.encoder.blocks import Tower
from mithril_hub.encoder.text import BERT, TextConfig, TextEncoder
from mithril_serve.limits import Limits
from mithril_serve.serving import application

TEXTS = ["HELLO", "A", "WORLD", "A LONGER TEXT THAN THESE"]


class CompilesEachLength(ml.NumpyBackend):
    """NumPy with the capability of engines that compile a program for each length."""

    @property
    def capabilities(self):
        return replace(super().capabilities, recompiles=True)


def encoder(backend="numpy"):
    tower = Tower(2, 2, 8, 16, 1e-12, "gelu", BERT, pre_norm=False)
    config = TextConfig("bert", 64, 40, 2, padding=None, classes=0, pooler=False, tower=tower, pooling="mean")
    compiled = ml.compile(TextEncoder(config), backend, inference=True)
    return compiled.bind(compiled.randomize_params(seed=4))


def expected(compiled, tokens):
    vector = compiled({"input_ids": np.array([tokens], np.int32)})["embedding"][0]
    return vector / np.linalg.norm(vector)


@pytest.fixture(scope="module", params=["numpy", CompilesEachLength()], ids=["exact", "padded"])
def served(request):
    app = application(
        encoder(request.param), name="encoder", tokenizer=Words(), limits=Limits(rows=2, body_bytes=100_000)
    )
    with running(app) as address:
        yield address


@pytest.fixture(scope="module")
def client(served):
    return openai.OpenAI(base_url=f"{served}/v1", api_key="none", max_retries=0)


def test_vectors_are_those_of_the_model(client):
    compiled = encoder()
    assert [m.id for m in client.models.list()] == ["encoder"]
    for encoding in ("float", "base64", openai.omit):
        answer = client.embeddings.create(model="encoder", input=TEXTS, encoding_format=encoding)
        assert [row.index for row in answer.data] == [0, 1, 2, 3]
        for text, row in zip(TEXTS, answer.data, strict=True):
            raw = row.embedding if encoding != "base64" else np.frombuffer(base64.b64decode(row.embedding), np.float32)
            np.testing.assert_allclose(raw, expected(compiled, Words().encode(text)), rtol=2e-5, atol=2e-6)
        assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, TEXTS))
    (row,) = client.embeddings.create(model="encoder", input=[5, 7, 9], dimensions=8).data
    np.testing.assert_allclose(row.embedding, expected(compiled, [5, 7, 9]), rtol=2e-5, atol=2e-6)


WRONG = {
    "no input": ({}, "the field input is missing"),
    "empty": ({"input": []}, "the input is empty"),
    "empty text": ({"input": [""]}, "the input has no tokens"),
    "numbers": ({"input": [1.5]}, "input is a text, a list of tokens, or a list of either"),
    "too many": ({"input": ["A"] * 2049}, "a request may have 2048 texts, not 2049"),
    "too long": ({"input": "A" * 41}, "a text has 41 tokens, and the model reads at most 40"),
    "no token": ({"input": [64]}, "token 64 is out of range, the model has 64"),
    "other size": ({"input": "A", "dimensions": 4}, "the vectors of this model have 8 dimensions"),
    "encoding": ({"input": "A", "encoding_format": "int8"}, "encoding_format is 'int8', expected float or base64"),
    "other field": ({"input": "A", "temperature": 1}, "the field 'temperature' is not supported"),
}


@pytest.mark.parametrize(("fields", "message"), WRONG.values(), ids=WRONG)
def test_wrong_requests(served, fields, message):
    answer = httpx2.post(f"{served}/v1/embeddings", content=json.dumps({"model": "encoder", **fields}))
    assert (answer.status_code, message in answer.json()["error"]["message"]) == (400, True), answer.text


def test_the_tensors_of_an_encoder_are_served_too(served):
    tensor = {"name": "input_ids", "shape": [1, 3], "datatype": "INT64", "data": [5, 7, 9]}
    answer = httpx2.post(f"{served}/v2/models/encoder/infer", json={"inputs": [tensor]}).json()
    assert [o["name"] for o in answer["outputs"]] == ["last_hidden_state", "embedding"]
