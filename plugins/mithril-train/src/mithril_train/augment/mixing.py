"""Augmentation that mixes the images of a batch, and their labels in the same shares: MixUp and CutMix."""

from __future__ import annotations

from typing import Annotated, Any

from mithril import ops
from mithril.backend import Least, Positive
from mithril.graph import ShapeError, Value, shape_text
from mithril.models import Layer

ATTEMPTS = 8  # each is accepted with a probability above 0.95


class Mixing(Layer):
    """Base class: ``mixed`` returns the images and the share of each image that is its own.

    Inputs are images and labels, outputs images and probabilities of the classes. The partner of an image is the one
    before it in the batch, which is shuffled.
    """

    inputs = ("input", "target")
    outputs = ("output", "probabilities")

    def __init__(self, classes: Positive, *, alpha: Annotated[float, Least(0, open=True)] = 1.0) -> None:
        self.classes, self.alpha = classes, alpha

    def build(self, images: Value, target: Value) -> Any:
        if target.ndim == 1:
            target = ops.one_hot(target, depth=self.classes)
        if target.ndim != 2 or target.shape[-1] != self.classes:
            expected = f"labels [N] or probabilities [N, {self.classes}]"
            raise ShapeError(f"{type(self).__name__} expects {expected}, got {shape_text(target.shape)}")
        if not self.training:
            return images, target
        share = beta(self, images.shape[0], self.alpha)
        images, share = self.mixed(images, ops.roll(images, shift=(1,), axis=(0,)), share)
        partner = ops.roll(target, shift=(1,), axis=(0,))
        return images, partner + (target - partner) * ops.reshape(share, shape=(-1, 1))

    def mixed(self, images: Value, partners: Value, share: Value) -> tuple[Any, Any]:
        raise TypeError(f"{type(self).__name__} has no method 'mixed'")


class MixUp(Mixing):
    """Average each image and its label with another one; the share is sample from Beta(alpha, alpha)."""

    def mixed(self, images: Value, partners: Value, share: Value) -> tuple[Any, Any]:
        weight = ops.reshape(share, shape=(-1,) + (1,) * (images.ndim - 1))
        return partners + (images - partners) * weight, share


class CutMix(Mixing):
    """Replace a rectangle of each image by that of another one; labels are mixed by its area.

    The area is sample from Beta(alpha, alpha), the center anywhere in the image.
    """

    def mixed(self, images: Value, partners: Value, share: Value) -> tuple[Any, Any]:
        if images.ndim != 4:
            raise ShapeError(f"CutMix expects images [N, C, H, W], got {shape_text(images.shape)}")
        n, side = images.shape[0], ops.sqrt(1.0 - share)
        mask: Any = None
        for axis in (2, 3):
            size = int(images.shape[axis])
            shape = (1, 1, size, 1) if axis == 2 else (1, 1, 1, size)
            center = ops.floor(ops.uniform(self.key(), shape=(n, 1, 1, 1)) * float(size))
            half = ops.reshape(side, shape=(-1, 1, 1, 1)) * (size / 2)
            position = ops.cast(ops.reshape(ops.iota(shape=(size,)), shape=shape), dtype="float32")
            span = ops.less(ops.abs(position - center), half)
            mask = span if mask is None else ops.logical_and(mask, span)
        area = ops.mean(ops.cast(mask, dtype="float32"), axis=(1, 2, 3))
        return ops.where(mask, partners, images), 1.0 - area


def beta(layer: Layer, n: Any, alpha: float) -> Any:
    """Return n numbers from Beta(alpha, alpha), the share of one gamma variable in two."""
    if alpha == 1.0:
        return ops.uniform(layer.key(), shape=(n,))
    first, second = gamma(layer, n, alpha), gamma(layer, n, alpha)
    return first / (first + second)


def gamma(layer: Layer, n: Any, alpha: float) -> Any:
    """Return n numbers from the gamma distribution, by the method of Marsaglia and Tsang with bounded attempts."""
    # That of alpha + 1, which a power of a uniform number turns into that of alpha.
    d = alpha + 1.0 - 1.0 / 3.0
    sample: Any = d
    for _ in range(ATTEMPTS):
        z = ops.normal(layer.key(), shape=(n,))
        root = 1.0 + z / (9.0 * d) ** 0.5
        cube = root * root * root
        positive = ops.greater(cube, 0.0)
        volume = ops.where(positive, cube, 1.0)
        u = ops.maximum(ops.uniform(layer.key(), shape=(n,)), 1e-7)
        accepted = ops.less(ops.log(u), 0.5 * z * z + d - d * volume + d * ops.log(volume))
        sample = ops.where(ops.logical_and(positive, accepted), d * volume, sample)
    u = ops.maximum(ops.uniform(layer.key(), shape=(n,)), 1e-7)
    return ops.maximum(sample * ops.exp(ops.log(u) * (1.0 / alpha)), 1e-30)
