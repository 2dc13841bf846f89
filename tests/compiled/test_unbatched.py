"""Convolutions and pools of one image, without the batch axis."""

import numpy as np
import pytest

import mithril as ml
from mithril import models


@pytest.mark.parametrize(
    "layer",
    [
        models.Conv1d(2, 3, kernel_size=2),
        models.Conv2d(2, 3, kernel_size=2, padding=1),
        models.ConvTranspose2d(2, 3, kernel_size=2),
        models.DepthwiseConv2d(2, kernel_size=2),
        models.MaxPool1d(2),
        models.MaxPool2d(2),
        models.AvgPool2d(2),
        models.AdaptiveAvgPool2d(2),
        models.GlobalAvgPool2d(),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_images_may_come_without_a_batch_axis(layer):
    shape = (2, 5) if "1d" in type(layer).__name__ else (2, 5, 4)
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    model = models.Model()
    model |= layer(input="x", output="y")
    single = ml.compile(model, "numpy", shapes={"x": shape})
    batched = ml.compile(model, "numpy", shapes={"x": (1, *shape)})
    params = single.randomize_params(seed=0)
    expected = batched.evaluate(params, {"x": x[None]})["y"]
    np.testing.assert_array_equal(single.evaluate(params, {"x": x})["y"], expected[0])
