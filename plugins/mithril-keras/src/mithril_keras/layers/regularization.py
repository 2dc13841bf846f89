"""Layers that only act in training: dropout and noise."""

from __future__ import annotations

from typing import Any

from mithril import ops
from mithril_keras.table import layer
from mithril_keras.tensor import Tensor, elementwise
from mithril_keras.weights import Weights


@layer("Dropout", masks="pass")
def dropout(weights: Weights, x: Tensor, *, rate: float, noise_shape: Any = None) -> Tensor:
    """Return random zeros in training."""
    if not weights.training or not rate:
        return x
    if noise_shape is None:
        return elementwise(lambda v: ops.dropout(v, weights.key(), p=rate), x)
    shape = tuple(n if m is None else m for n, m in zip(x.shape, noise_shape, strict=True))
    return _shared(weights, x, shape, rate)


def _shared(weights: Weights, x: Tensor, shape: tuple[Any, ...], rate: float) -> Tensor:
    ones = ops.full(shape=shape, value=1.0, dtype=x.dtype)
    return Tensor(x.value * ops.dropout(ones, weights.key(), p=rate))


@layer("SpatialDropout1D", "SpatialDropout2D", "SpatialDropout3D", masks="pass")
def spatial_dropout(weights: Weights, x: Tensor, *, rate: float, data_format: str | None = None) -> Tensor:
    """Return random channels of zeros in training."""
    if not weights.training or not rate:
        return x
    ones = (1,) * (x.rank - 2)
    first = data_format == "channels_first"
    shape = (*x.shape[:2], *ones) if first else (x.shape[0], *ones, x.shape[-1])
    return _shared(weights, x, shape, rate)


@layer("GaussianNoise", masks="pass")
def gaussian_noise(weights: Weights, x: Tensor, *, stddev: float) -> Tensor:
    """Return normal noise in training."""
    if not weights.training or not stddev:
        return x
    return Tensor(x.value + ops.normal(weights.key(), shape=x.shape) * stddev)


@layer("GaussianDropout", masks="pass")
def gaussian_dropout(weights: Weights, x: Tensor, *, rate: float) -> Tensor:
    """Return normal factors in training."""
    if not weights.training or not rate:
        return x
    deviation = (rate / (1.0 - rate)) ** 0.5
    return Tensor(x.value * (ops.normal(weights.key(), shape=x.shape) * deviation + 1.0))


@layer("AlphaDropout", masks="pass")
def alpha_dropout(weights: Weights, x: Tensor, *, rate: float, noise_shape: Any = None) -> Tensor:
    """Return random values of saturation in training, which keep mean and variance."""
    if not weights.training or not rate:
        return x
    low = -1.6732632423543772 * 1.0507009873554805
    a = ((1 - rate) * (1 + rate * low**2)) ** -0.5
    shape = x.shape if noise_shape is None else tuple(noise_shape)
    valid = ops.bernoulli(weights.key(), p=1.0 - rate, shape=shape)
    return Tensor(ops.where(ops.not_equal(valid, 0), x.value, low) * a - a * low * rate)


@layer("StochasticDepth")
def stochastic_depth(weights: Weights, x: Tensor, *, drop_path_rate: float) -> Tensor:
    """Return random samples of zeros in training, of ConvNeXt."""
    if not weights.training or not drop_path_rate:
        return x
    return _shared(weights, x, (x.shape[0], *(1,) * (x.rank - 1)), drop_path_rate)
