"""Errors of the layers whose shapes are known do not wait until the shapes of all inputs are."""

from __future__ import annotations

import numpy as np
import pytest

import mithril as ml
from mithril.models import Add, Dropout, Embedding, IOKey, Linear, Model

BACKENDS = ("numpy", "torch", "jax", "mlx", "c", "ggml")


def network(**weight) -> Model:
    """Return a layer and a bias that depend on ``x`` and ``b``, and a sum that depends on ``target`` as well."""
    model = Model()
    model |= Linear(4, name="first")(input="x", output="hidden", **weight)
    model |= Dropout(0.5)(input="hidden", output="dropped")
    model |= Add(name="bias")(left="dropped", right="b", output="biased")
    model |= Add(name="rest")(left="biased", right="target", output="output")
    return model


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_wrong_bias_is_rejected_before_other_shapes_are_known(backend):
    with pytest.raises(ml.ShapeError, match=r"shapes \[2, 4\] and \[5\] do not broadcast[\s\S]*layer 'bias'"):
        ml.compile(network(), backend, shapes={"x": [2, 3], "b": [5]})


def test_a_wrong_weight_is_rejected_before_other_shapes_are_known():
    with pytest.raises(ml.ShapeError, match="first"):
        ml.compile(network(weight=IOKey("w", shape=[4, 7])), "numpy", shapes={"x": [2, 3]})


@pytest.mark.parametrize("backend", BACKENDS)
def test_unknown_shapes_and_dtypes_wait_for_the_call(backend):
    compiled = ml.compile(network(), backend, shapes={"x": [2, 3], "b": [4]})
    arrays = {"x": np.ones((2, 3), np.float32), "b": np.ones(4, np.float32), "target": np.ones((2, 4), np.float32)}
    params = compiled.randomize_params(0, inputs=arrays)
    assert compiled.evaluate(params, arrays)["output"].shape == (2, 4)
    with pytest.raises(ml.ShapeError, match="rest"):
        compiled.evaluate(params, arrays | {"target": np.ones((2, 5), np.float32)})
    model = Model()
    model |= Embedding(7, 4)(input="words", output="rows")
    model |= Add()(left="rows", right="target", output="output")
    ml.compile(model, backend, shapes={"words": [2, 3]})  # the dtype of words is unknown
