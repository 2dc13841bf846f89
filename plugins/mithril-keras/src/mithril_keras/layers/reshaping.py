"""Layers that move elements: reshapes, crops, padding, upsampling."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from mithril import ops
from mithril_keras.table import layer
from mithril_keras.tensor import Tensor, channels_first, from_channels_first, pair
from mithril_keras.weights import Weights


@layer("Flatten")
def flatten(weights: Weights, x: Tensor, *, data_format: str | None = None) -> Tensor:
    """Return all axes after the batch as one, in the order of Keras."""
    del weights
    v = x.value
    if data_format == "channels_first" and x.rank > 2:
        v = ops.transpose(v, perm=(0, *range(2, x.rank), 1))
    if x.rank == 1:
        return Tensor(ops.unsqueeze(v, axis=1))
    return Tensor(ops.reshape(v, shape=(v.shape[0], prod(v.shape[1:]))))


@layer("Reshape")
def reshape(weights: Weights, x: Tensor, *, target_shape: Sequence[int]) -> Tensor:
    """Return another shape after the batch; one size can be -1."""
    v = x.value
    sizes: list[Any] = [-1 if n is None else n for n in target_shape]
    if sizes.count(-1) > 1:
        raise weights.unsupported(f"target_shape={list(target_shape)}")
    if -1 in sizes:
        rest = prod(n for n in sizes if n != -1)
        sizes[sizes.index(-1)] = prod(v.shape[1:]) // rest
    return Tensor(ops.reshape(v, shape=(v.shape[0], *sizes)))


@layer("Permute")
def permute(weights: Weights, x: Tensor, *, dims: Sequence[int]) -> Tensor:
    """Return another order of the axes, with 1 for the first after the batch."""
    del weights
    return Tensor(ops.transpose(x.value, perm=(0, *dims)))


@layer("RepeatVector")
def repeat_vector(weights: Weights, x: Tensor, *, n: int) -> Tensor:
    """[batch, features] as n steps."""
    del weights
    batch, features = x.shape
    return Tensor(ops.broadcast_to(ops.unsqueeze(x.value, axis=1), shape=(batch, n, features)))


def _pairs(value: Any, count: int) -> tuple[tuple[int, int], ...]:
    """Return the elements before and after each axis; one number applies to all, one per axis to both ends."""
    if isinstance(value, int):
        return ((value, value),) * count
    if count == 1 and all(isinstance(n, int) for n in value):
        before, after = value
        return ((before, after),)
    return tuple((n, n) if isinstance(n, int) else (int(n[0]), int(n[1])) for n in value)


@layer("ZeroPadding1D", "ZeroPadding2D", "ZeroPadding3D")
def zero_padding(weights: Weights, x: Tensor, *, padding: Any = 1, data_format: str | None = None) -> Tensor:
    """Return zeros around the axes of an image."""
    del weights
    v = channels_first(x, data_format)
    widths = ((0, 0), (0, 0), *_pairs(padding, len(v.shape) - 2))
    return from_channels_first(ops.pad(v, widths=widths), data_format)


@layer("Cropping1D", "Cropping2D", "Cropping3D")
def cropping(weights: Weights, x: Tensor, *, cropping: Any = 1, data_format: str | None = None) -> Tensor:
    """Return an image without its border."""
    del weights
    v = channels_first(x, data_format)
    index = tuple(slice(a, n - b) for (a, b), n in zip(_pairs(cropping, len(v.shape) - 2), v.shape[2:], strict=True))
    return from_channels_first(v[(slice(None), slice(None), *index)], data_format)


@layer("UpSampling1D", "UpSampling2D", "UpSampling3D")
def up_sampling(
    weights: Weights,
    x: Tensor,
    *,
    size: Any = 2,
    data_format: str | None = None,
    interpolation: str = "nearest",
) -> Tensor:
    """Return each element several times, or linear interpolation."""
    v = channels_first(x, data_format)
    factors = pair(size, len(v.shape) - 2)
    if interpolation == "nearest":
        for axis, n in enumerate(factors, start=2):
            v = v if n == 1 else ops.repeat(v, repeats=n, axis=axis)
    elif interpolation == "bilinear":
        sizes = tuple(n * f for n, f in zip(v.shape[2:], factors, strict=True))
        v = ops.resize(v, size=sizes, mode="bilinear")
    else:
        raise weights.unsupported(f"interpolation='{interpolation}'")
    return from_channels_first(v, data_format)
