"""Augmentation of images [N, C, H, W]: layers that change them in training only, each image by its own numbers."""

from __future__ import annotations

import math
from typing import Annotated, Any

from mithril import ops
from mithril.backend import Least
from mithril.graph import ModelError, ShapeError, Value, shape_text
from mithril.models import Layer

Share = Annotated[float, Least(0)]
Sizes = int | tuple[int, int]


class Augmentation(Layer):
    """Base class: ``augment`` runs in training; otherwise images pass unchanged."""

    def build(self, images: Value) -> Any:
        if images.ndim != 4:
            raise ShapeError(f"{type(self).__name__} expects images [N, C, H, W], got {shape_text(images.shape)}")
        return self.augment(images) if self.training else self.unchanged(images)

    def augment(self, images: Value) -> Any:
        raise ModelError(f"{type(self).__name__} has no method 'augment'")

    def unchanged(self, images: Value) -> Any:
        """Return the images as they are outside of training."""
        return images

    def numbers(self, images: Value, low: float = 0.0, high: float = 1.0) -> Value:
        """Return a uniform number for each image, of shape [N, 1, 1, 1]."""
        return ops.uniform(self.key(), shape=(images.shape[0], 1, 1, 1), low=low, high=high)


class RandomFlip(Augmentation):
    """Mirror images with probability ``p``: from left to right, or upside down with ``axis=-2``."""

    def __init__(self, p: Share = 0.5, *, axis: int = -1) -> None:
        if p > 1:
            raise ModelError(f"RandomFlip: p={p} is not a probability")
        self.p, self.axis = p, axis

    def augment(self, images: Value) -> Any:
        return ops.where(ops.less(self.numbers(images), self.p), ops.flip(images, axis=self.axis), images)


class RandomCrop(Augmentation):
    """Cut a window of ``size`` at a random position, after ``padding`` by zeros; outside of training at the center."""

    def __init__(self, size: Sizes, *, padding: Annotated[int, Least(0)] = 0) -> None:
        self.size = (size, size) if isinstance(size, int) else size
        self.padding = padding

    def augment(self, images: Value) -> Any:
        if self.padding:
            pads = ((0, 0), (0, 0), (self.padding, self.padding), (self.padding, self.padding))
            images = ops.pad(images, widths=pads)
        for axis, size in zip((2, 3), self.size, strict=True):
            start = ops.floor(self.numbers(images) * float(self._room(images, axis, size) + 1))
            images = _window(images, axis, ops.cast(start, dtype="int32"), size)
        return images

    def unchanged(self, images: Value) -> Any:
        for axis, size in zip((2, 3), self.size, strict=True):
            start = self._room(images, axis, size) // 2
            images = images[:, :, start : start + size] if axis == 2 else images[..., start : start + size]
        return images

    def _room(self, images: Value, axis: int, size: int) -> int:
        room = int(images.shape[axis]) - size
        if room < 0:
            window = f"{self.size[0]} x {self.size[1]}"
            raise ShapeError(
                f"RandomCrop: images {shape_text(images.shape)} are smaller than the window {window}",
                hint="a smaller size, or padding=",
            )
        return room


def _window(images: Value, axis: int, start: Value, size: int) -> Any:
    """Return ``size`` rows or columns of each image from its own start on."""
    shape = (1, 1, size, 1) if axis == 2 else (1, 1, 1, size)
    indices = start + ops.reshape(ops.iota(shape=(size,)), shape=shape)
    window = tuple(size if k == axis else n for k, n in enumerate(images.shape))
    return ops.take_along_axis(images, ops.broadcast_to(indices, shape=window), axis=axis)


class RandomAffine(Augmentation):
    """Rotate, move, scale and shear images around their centers, with bilinear interpolation and zeros outside.

    ``degrees`` and ``shear`` are the largest angles, ``translate`` the largest shift as a fraction of the size, and
    ``scale`` the range of the factor.
    """

    def __init__(
        self,
        degrees: Share = 0.0,
        *,
        translate: Share = 0.0,
        scale: tuple[float, float] = (1.0, 1.0),
        shear: Share = 0.0,
    ) -> None:
        if not 0 < scale[0] <= scale[1]:
            raise ModelError(f"RandomAffine: scale={scale} is not a range of positive factors")
        self.degrees, self.translate, self.scale, self.shear = degrees, translate, scale, shear

    def augment(self, images: Value) -> Any:
        height, width = (int(n) for n in images.shape[2:])
        angle = self.numbers(images, -1.0, 1.0) * math.radians(self.degrees)
        slant = self.numbers(images, -1.0, 1.0) * math.radians(self.shear)
        factor = self.numbers(images, *self.scale) if self.scale[0] < self.scale[1] else self.scale[0]
        down = self.numbers(images, -1.0, 1.0) * (self.translate * height)
        right = self.numbers(images, -1.0, 1.0) * (self.translate * width)
        y = _positions(height, (1, 1, height, 1)) - down
        x = _positions(width, (1, 1, 1, width)) - right
        cos, sin, tan = ops.cos(angle), ops.sin(angle), ops.sin(slant) / ops.cos(slant)
        source_x = (cos * x + sin * y - tan * (cos * y - sin * x)) / factor + (width - 1) / 2
        source_y = (cos * y - sin * x) / factor + (height - 1) / 2
        return bilinear(images, source_y, source_x)


def _positions(size: int, shape: tuple[int, ...]) -> Any:
    """Return the distances of rows or columns from the center."""
    return ops.cast(ops.reshape(ops.iota(shape=(size,)), shape=shape), dtype="float32") - (size - 1) / 2


def bilinear(images: Value, y: Value, x: Value) -> Any:
    """Return the images at fractional positions [N, 1, H, W]; positions outside count as zero."""
    n, channels, height, width = (int(s) for s in images.shape)
    rows, columns = int(y.shape[2]), int(y.shape[3])
    flat = ops.reshape(images, shape=(n, channels, height * width))
    top, left = ops.floor(y), ops.floor(x)
    total: Any = None
    for row, y_share in ((top, 1.0 - (y - top)), (top + 1.0, y - top)):
        for column, x_share in ((left, 1.0 - (x - left)), (left + 1.0, x - left)):
            coverage = _within(row, height) * _within(column, width)
            index = ops.clip(row, low=0.0, high=height - 1.0) * float(width) + ops.clip(
                column, low=0.0, high=width - 1.0
            )
            index = ops.reshape(ops.cast(index, dtype="int32"), shape=(n, 1, rows * columns))
            values = ops.take_along_axis(flat, ops.broadcast_to(index, shape=(n, channels, rows * columns)), axis=2)
            part = ops.reshape(values, shape=(n, channels, rows, columns)) * (y_share * x_share * coverage)
            total = part if total is None else total + part
    return total


def _within(position: Value, size: int) -> Any:
    covered = ops.logical_and(ops.greater_equal(position, 0.0), ops.less_equal(position, size - 1.0))
    return ops.cast(covered, dtype="float32")


# Luma of ITU-R BT.601, as Pillow and torchvision convert.
GRAY = (0.299, 0.587, 0.114)


class ColorJitter(Augmentation):
    """Change brightness, contrast and saturation by factors within ``1 - x`` and ``1 + x``, and the hue by a turn.

    ``hue`` is the largest turn of the color circle, at most 0.5. Values are not clipped. Saturation and hue need three
    channels: red, green, blue.
    """

    def __init__(
        self, *, brightness: Share = 0.0, contrast: Share = 0.0, saturation: Share = 0.0, hue: Share = 0.0
    ) -> None:
        if hue > 0.5:
            raise ModelError(f"ColorJitter: hue={hue} is more than half a turn", hint="at most hue=0.5")
        self.brightness, self.contrast, self.saturation, self.hue = brightness, contrast, saturation, hue

    def augment(self, images: Value) -> Any:
        if (self.saturation or self.hue) and images.shape[1] != 3:
            raise ShapeError(f"ColorJitter: saturation and hue need 3 channels, got images {shape_text(images.shape)}")
        if self.brightness:
            images = images * self._factor(images, self.brightness)
        if self.contrast:
            mean = ops.mean(_gray(images), axis=(1, 2, 3), keepdims=True)
            images = mean + (images - mean) * self._factor(images, self.contrast)
        if self.saturation:
            gray = _gray(images)
            images = gray + (images - gray) * self._factor(images, self.saturation)
        return self._turned(images) if self.hue else images

    def _factor(self, images: Value, amount: float) -> Value:
        return self.numbers(images, max(1.0 - amount, 0.0), 1.0 + amount)

    def _turned(self, images: Value) -> Any:
        """Rotate the colors around the gray axis."""
        angle = self.numbers(images, -1.0, 1.0) * (2 * math.pi * self.hue)
        red, green, blue = ops.split(images, sizes=(1, 1, 1), axis=1)
        along = (red + green + blue) * (1.0 - ops.cos(angle)) * (1 / 3)
        across, cos = ops.sin(angle) * math.sqrt(1 / 3), ops.cos(angle)
        rotated = (
            red * cos + along + (blue - green) * across,
            green * cos + along + (red - blue) * across,
            blue * cos + along + (green - red) * across,
        )
        return ops.concat(*rotated, axis=1)


def _gray(images: Value) -> Any:
    if images.shape[1] != 3:
        return ops.mean(images, axis=1, keepdims=True)
    red, green, blue = ops.split(images, sizes=(1, 1, 1), axis=1)
    return red * GRAY[0] + green * GRAY[1] + blue * GRAY[2]
