"""Transformer stacks with ``cache=``: decoding in steps gives the numbers of the whole sequence."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mithril as ml
from mithril.models import Embedding, Linear, Model, TransformerDecoder, TransformerEncoder

BACKENDS = sorted(ml.plugins.backends())
TOKENS = np.random.default_rng(0).integers(0, 11, (2, 6)).astype(np.int32)
MEMORY = np.random.default_rng(1).standard_normal((2, 5, 8)).astype(np.float32)
STEPS = ((0, 5), (5, 6))  # a prompt, and a token
COMPILED = ("c", "jax")  # compile for seconds: one layer of one stack


def encoder(cache: int | None = None, layers: int = 2) -> Model:
    model = Model()
    model |= Embedding(11, 8, name="embed")(input="input", output="h")
    options: Any = {"dropout": 0.0, "norm_first": True, "causal": True, "rotary": True, "norm": True, "cache": cache}
    stack = TransformerEncoder(layers, 8, 2, name="stack", **options)
    model |= stack(input="h", output="y", **({"position": "position"} if cache else {}))
    model |= Linear(11, name="head")(input="y", output="logits")
    return model


def decoder(cache: int | None = None, layers: int = 2) -> Model:
    model = Model()
    model |= Embedding(11, 8, name="embed")(input="input", output="h")
    stack = TransformerDecoder(layers, 8, 2, dropout=0.0, cache=cache, name="stack")
    model |= stack(input="h", memory="memory", output="logits", **({"position": "position"} if cache else {}))
    return model


@pytest.mark.parametrize(
    ("build", "backend"),
    [(encoder, name) for name in BACKENDS] + [(decoder, name) for name in BACKENDS if name not in COMPILED],
)
def test_decoding_in_steps_equals_the_whole_sequence(build: Any, backend: str) -> None:
    layers = 1 if backend in COMPILED else 2
    memory = {"memory": MEMORY} if build is decoder else {}
    shapes = {name: list(x.shape) for name, x in memory.items()}
    full = ml.compile(build(layers=layers), backend, shapes={"input": [2, 6], **shapes}, inference=True)
    params = full.randomize_params(0)
    expected = full.backend.to_numpy(full.evaluate(params, {"input": TOKENS, **memory})["logits"])
    cached = ml.compile(build(cache=8, layers=layers), backend, shapes={"input": [2, None], **shapes}, inference=True)
    state, parts = cached.initial_state(), []
    for start, stop in STEPS:
        inputs = {"input": TOKENS[:, start:stop], "position": np.int32(start), **memory}
        outputs, state = cached.evaluate(params, inputs, state=state)
        parts.append(cached.backend.to_numpy(outputs["logits"]))
    np.testing.assert_allclose(np.concatenate(parts, axis=1), expected, atol=2e-5)


def test_a_full_cache_raises() -> None:
    cached = ml.compile(encoder(cache=4), "numpy", shapes={"input": [2, None]}, inference=True)
    with pytest.raises(ml.MithrilError, match="input_1 <= 4"):
        cached.evaluate(cached.randomize_params(0), {"input": TOKENS, "position": np.int32(0)})
