"""Generation by a model of the user on every backend: greedy tokens equal those of reading the whole text again.

Drawn tokens depend on the seed only, also those of another backend.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

import mithril as ml
from mithril.models import Embedding, IOKey, LayerNorm, Linear, Model, MultiHeadAttention, PositionalEmbedding

BACKENDS = ["numpy", "jax", "torch", "mlx", "c", "ggml"]
PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6]]  # of different lengths: each row is at its own position
COUNT = 5
DRAWN = [
    {"temperature": 2.0, "top_k": 6, "seed": 1},
    {"temperature": 3.0, "top_p": 0.8, "min_p": 0.05, "repetition_penalty": 1.3, "seed": 2},
]


def decoder(capacity: int | None = 24) -> Model:
    tokens, position = IOKey("tokens", dtype="int32"), IOKey("position", dtype="int32")
    table = PositionalEmbedding(24, init="normal")
    attention = MultiHeadAttention(16, 2, causal=True, cache=capacity)
    x = Embedding(20, 16)(tokens)
    x = table(x, position) if capacity else table(x)
    x = x + (attention(x, position) if capacity else attention(x))
    return Model.create(outputs={"scores": Linear(20)(LayerNorm(16)(x))})


def runner(backend: str, seed: int = 0) -> Any:
    compiled = ml.compile(decoder(), backend, shapes={"tokens": [None, None]}, inference=True)
    return compiled.runner(parameters(seed))


@cache
def parameters(seed: int) -> Any:
    compiled = ml.compile(decoder(None), "numpy", shapes={"tokens": [None, None]}, inference=True)
    return compiled.randomize_params(seed)


@cache
def greedy(prompt: tuple[int, ...]) -> list[int]:
    """Read the whole text for each token, by a model without a cache."""
    compiled = ml.compile(decoder(None), "numpy", shapes={"tokens": [None, None]}, inference=True)
    text = list(prompt)
    for _ in range(COUNT):
        scores = compiled.evaluate(parameters(0), {"tokens": np.array([text], np.int32)})["scores"]
        text.append(int(scores[0, -1].argmax()))
    return text[len(prompt) :]


@cache
def beams() -> Any:
    return ml.generate(runner("numpy"), PROMPTS[0], num_beams=3, max_new_tokens=COUNT, stop=())


@cache
def drawn() -> Any:
    session = ml.Session(runner("numpy"))
    texts = [ml.generate(session, PROMPTS, max_new_tokens=COUNT, stop=(), **settings) for settings in DRAWN]
    assert len({str(text) for text in texts}) == len(DRAWN)
    return texts


@pytest.mark.parametrize("backend", BACKENDS)
def test_generation_is_equal_on_all_backends(backend):
    pytest.importorskip({"c": "mithril_cbackend"}.get(backend, f"mithril_{backend}"))
    run, expected = runner(backend), [greedy(tuple(p)) for p in PROMPTS]
    options = {"max_new_tokens": COUNT, "stop": ()}
    session = ml.Session(run)
    assert ml.generate(session, PROMPTS[0], **options) == expected[0]
    reused = ml.generate(session, PROMPTS[0] + expected[0][:2], max_new_tokens=COUNT - 2, stop=())
    assert reused == expected[0][2:]
    seen: list[list[int]] = [[], []]
    assert ml.generate(session, PROMPTS, on_token=lambda k, token: seen[k].append(token), **options) == expected == seen
    assert ml.generate(session, PROMPTS[0], max_new_tokens=COUNT, stop=[expected[0][1:3]]) == expected[0][:3]
    assert [ml.generate(session, PROMPTS, **options, **settings) for settings in DRAWN] == drawn()
    run.reset()
    draft = runner(backend, 1) if backend == "numpy" else runner("numpy", 1)
    assert ml.generate(run, PROMPTS[1], draft=draft, draft_tokens=2, **options) == expected[1]
    run.reset()
    assert ml.generate(run, PROMPTS[0], num_beams=3, **options) == beams()


@pytest.mark.parametrize("backend", ["numpy", "mlx", "ggml"])
def test_models_of_bfloat16_generate(backend):
    pytest.importorskip({"c": "mithril_cbackend"}.get(backend, f"mithril_{backend}"))
    shapes = {"tokens": [None, None], "position": [None]}
    compiled = ml.compile(decoder(), backend, shapes=shapes, inference=True, precision="bfloat16")
    run = compiled.runner(parameters(0))
    assert ml.generate(run, PROMPTS[0], max_new_tokens=2, stop=()) == greedy(tuple(PROMPTS[0]))[:2]
    assert len(ml.generate(run, PROMPTS[0], num_beams=2, max_new_tokens=2, stop=())) == 2


def test_positions_have_the_declared_rank():
    """Generate with a position for each row, with one for all, and with one token at a time."""
    expected = [greedy(tuple(p)) for p in PROMPTS]
    for shapes in ({"tokens": ["b", "s"], "position": [None]}, {"tokens": [None, 1], "position": []}):
        compiled = ml.compile(decoder(), "numpy", shapes=shapes, static_inference=True)
        compiled.bind(parameters(0))
        assert ml.generate(compiled, PROMPTS[0], max_new_tokens=COUNT) == expected[0]
        if shapes["position"]:
            assert ml.generate(compiled, PROMPTS, max_new_tokens=COUNT) == expected
        else:
            with pytest.raises(ml.InputError, match="require a number for each in the input 'position'"):
                ml.generate(compiled, PROMPTS, max_new_tokens=COUNT)


def test_models_without_tokens_or_a_cache_are_rejected():
    for model in (decoder(None), Linear(3)):
        compiled = ml.compile(model, "numpy", inference=True)
        with pytest.raises(ml.MithrilError, match="has no cache|no input of this model reads tokens"):
            ml.Session(compiled)
