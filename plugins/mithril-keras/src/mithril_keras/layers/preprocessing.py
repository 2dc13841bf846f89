"""Preprocessing of numbers and images that is part of a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mithril import ops
from mithril_keras.table import layer
from mithril_keras.tensor import Tensor, channels_first, elementwise, from_channels_first
from mithril_keras.weights import Weights

# The default of keras.config.epsilon().
EPSILON = 1e-7


@layer("Rescaling", masks="pass")
def rescaling(weights: Weights, x: Tensor, *, scale: Any, offset: Any = 0.0) -> Tensor:
    """Return a factor and an offset, for all elements or per channel."""
    numbers = isinstance(scale, (int, float)) and isinstance(offset, (int, float))
    if numbers:
        return elementwise(lambda v: ops.cast(v, dtype=weights.dtype) * float(scale) + float(offset), x)
    a, b = (np.asarray(n, dtype=np.float32) for n in (scale, offset))
    return Tensor(ops.cast(x.value, dtype=weights.dtype) * a + b)


@layer("Normalization", masks="pass")
def normalization(
    weights: Weights, x: Tensor, *, axis: Any = -1, mean: Any = None, variance: Any = None, invert: bool = False
) -> Tensor:
    """Return subtraction of a mean and division by a deviation, which the archive holds."""
    v = ops.cast(x.value, dtype=weights.dtype)
    rank = len(v.shape)
    axes = () if axis is None else sorted(a % rank for a in ([axis] if isinstance(axis, int) else axis))
    shape = tuple(v.shape[a] for a in axes)
    broadcast_shape = tuple(v.shape[k] if k in axes else 1 for k in range(rank))
    if mean is None:
        m, s = weights.constant(shape), weights.constant(shape)
        m, s = m.reshape(broadcast_shape), s.reshape(broadcast_shape)
    else:
        m, s = (np.asarray(n, np.float32) for n in (mean, variance))
        aligned = [1] * rank
        for k in range(1, m.ndim + 1):
            aligned[axes[-k]] = m.shape[-k]
        m, s = (np.broadcast_to(n.reshape(aligned if n.ndim else [1] * rank), broadcast_shape) for n in (m, s))
    deviation = np.maximum(np.sqrt(s), np.float32(EPSILON))
    return Tensor(v * deviation + m if invert else (v - m) / deviation)


@layer("Resizing")
def resizing(
    weights: Weights,
    x: Tensor,
    *,
    height: int,
    width: int,
    interpolation: str = "bilinear",
    crop_to_aspect_ratio: bool = False,
    pad_to_aspect_ratio: bool = False,
    antialias: bool = False,
    fill_mode: str = "constant",
    fill_value: float = 0.0,
    data_format: str | None = None,
) -> Tensor:
    """Return an image of another size, by linear interpolation."""
    del fill_mode, fill_value
    if interpolation != "bilinear" or crop_to_aspect_ratio or pad_to_aspect_ratio or antialias:
        raise weights.unsupported(
            f"interpolation='{interpolation}', crop_to_aspect_ratio, pad_to_aspect_ratio or antialias",
            "resize images before the model",
        )
    v = ops.cast(channels_first(x, data_format), dtype=weights.dtype)
    return from_channels_first(ops.resize(v, size=(height, width), mode="bilinear"), data_format)


@layer("CenterCrop")
def center_crop(weights: Weights, x: Tensor, *, height: int, width: int, data_format: str | None = None) -> Tensor:
    """Return the middle of an image."""
    v = channels_first(x, data_format)
    rows, columns = v.shape[2:]
    if not (isinstance(rows, int) and isinstance(columns, int) and rows >= height and columns >= width):
        raise weights.unsupported(f"a crop of [{height}, {width}] from [{rows}, {columns}]")
    top, left = (rows - height) // 2, (columns - width) // 2
    return from_channels_first(v[:, :, top : top + height, left : left + width], data_format)


@layer("Discretization")
def discretization(
    weights: Weights,
    x: Tensor,
    *,
    bin_boundaries: Sequence[float],
    num_bins: Any = None,
    epsilon: float = 0.01,
    output_mode: str = "int",
    sparse: bool = False,
) -> Tensor:
    """Return the number of the bin of each element."""
    del num_bins, epsilon, sparse
    if output_mode != "int":
        raise weights.unsupported(f"output_mode='{output_mode}'", "follow it by CategoryEncoding")
    bounds = np.asarray(bin_boundaries, np.float32)
    above = ops.greater_equal(ops.unsqueeze(ops.cast(x.value, dtype="float32"), axis=x.rank), bounds)
    return Tensor(ops.sum(ops.cast(above, dtype="int32"), axis=-1))


@layer("CategoryEncoding")
def category_encoding(
    weights: Weights, x: Tensor, *, num_tokens: int, output_mode: str = "multi_hot", sparse: bool = False
) -> Tensor:
    """Return indices as vectors with ones or counts."""
    del sparse
    indices = ops.cast(x.value, dtype="int32")
    if output_mode == "one_hot":
        if x.shape[-1] == 1 and x.rank > 1:
            indices = ops.squeeze(indices, axis=-1)
        return Tensor(ops.one_hot(indices, depth=num_tokens))
    marks = ops.one_hot(indices, depth=num_tokens)
    if output_mode not in ("multi_hot", "count") or x.rank < 2:
        raise weights.unsupported(f"output_mode='{output_mode}'")
    return Tensor((ops.max if output_mode == "multi_hot" else ops.sum)(marks, axis=-2))


@layer(
    *("AugMix", "CutMix", "MixUp", "RandAugment", "RandomBrightness", "RandomColorDegeneration", "RandomColorJitter"),
    *("RandomContrast", "RandomCrop", "RandomElasticTransform", "RandomErasing", "RandomFlip", "RandomGaussianBlur"),
    *("RandomGrayscale", "RandomHue", "RandomInvert", "RandomPerspective", "RandomPosterization", "RandomRotation"),
    *("RandomSaturation", "RandomSharpness", "RandomShear", "RandomTranslation", "RandomZoom"),
)
def augmentation(weights: Weights, x: Tensor, **settings: Any) -> Tensor:
    """Return a random change in training; the input in inference."""
    if weights.training or ("height" in settings and x.shape[1:3] != (settings["height"], settings.get("width"))):
        raise weights.unsupported("a random change of images", "change images before the model")
    return x
