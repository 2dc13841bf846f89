"""Training does not depend on the optimization level: parts keep their own gradients at kinks."""

import numpy as np
import pytest
from small import trainer

import mithril as ml
from mithril import ops
from mithril.models import Layer, Linear, Model


class Rectified(Layer):
    """The larger of 0 and the input, whose gradient at 0 is a half."""

    def build(self, x):
        return ops.maximum(x, 0.0)


@pytest.mark.parametrize("level", ["low", "medium"])
def test_a_tie_sends_half_at_every_level(level):
    batch = np.zeros((4, 2), np.float32), np.ones((4, 3), np.float32)
    biases = []
    for tested_level in ("none", level):
        model = Model()
        model += Linear(2, 3, name="first")(input="input")
        model += Rectified()
        training = trainer(model, ml.SGD(1.0), loss="mse", optimization_level=tested_level, seed=0)
        training.begin(batch)
        training.params = {name: np.zeros_like(a) for name, a in training.params.items()}
        training.fit([batch], 1)
        biases.append(np.asarray(training.params["first.bias"]))
    assert np.abs(biases[0]).min() > 0
    np.testing.assert_array_equal(biases[1], biases[0])
