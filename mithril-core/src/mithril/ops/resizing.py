"""Resampling of images: along each axis a product with a matrix whose rows hold the weights of one position."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from mithril.graph import OperationError, Shape, ShapeError, composite, sample, unknown
from mithril.ops.basic import downcast, dtype_of, upcast
from mithril.ops.indexing import take
from mithril.ops.products import matmul
from mithril.ops.shape import transpose

Array = np.ndarray[Any, Any]


class _Kernel(NamedTuple):
    """The weight of an element at a distance from the position, and the distance at which it vanishes."""

    weight: Callable[[Array, float], Array]
    reach: int
    sharpness: float = 0.0  # slope of a cubic kernel at distance 1
    antialiased_sharpness: float = 0.0


def _triangle(distance: Array, _: float) -> Array:
    return np.maximum(1.0 - np.abs(distance), 0.0)


def _cubic(distance: Array, a: float) -> Array:
    """Return the weights of the cubic convolution of Keys."""
    d = np.abs(distance)
    inner = ((a + 2) * d - (a + 3)) * d * d + 1
    outer = a * (((d - 5) * d + 8) * d - 4)
    return np.where(d <= 1, inner, np.where(d < 2, outer, 0.0))


KERNELS = {"bilinear": _Kernel(_triangle, 1), "bicubic": _Kernel(_cubic, 2, -0.75, -0.5)}
MODES = ("nearest", *KERNELS)


@composite(
    promotes="float",
    flops=8,
    samples=[
        sample((1, 2, 3, 4), size=(6, 8)),
        sample((1, 1, 4, 5), size=(3, 2), label="smaller"),
        sample((1, 2, 3, 4), size=(5, 7), mode="bilinear", label="bilinear"),
        sample((1, 2, 4, 4), size=(2, 3), mode="bilinear", label="bilinear smaller"),
        sample((1, 1, 3, 3), size=(5, 5), mode="bilinear", align_corners=True, label="corners"),
        sample((2, 3, 5), size=(8,), mode="bilinear", label="1d"),
        sample((1, 2, 3, 4), size=(5, 7), mode="bicubic", label="bicubic"),
        sample((1, 1, 7, 5), size=(3, 4), mode="bicubic", antialias=True, label="bicubic antialias"),
        sample((2, 1, 7), size=(3,), mode="bilinear", antialias=True, label="bilinear antialias"),
    ],
    precision="full",
)
def resize(x, *, size: Shape, mode: str = "nearest", align_corners: bool = False, antialias: bool = False):
    """Resampling of the spatial axes of [batch, channels, ...]: "nearest", "bilinear" (linear) or "bicubic".

    Positions are pixel centers; with ``align_corners`` the centers of the corner pixels coincide. With ``antialias``
    a smaller result averages over all pixels that it covers.
    """
    if mode not in MODES:
        message, facts, hint = unknown("mode of resize", mode, MODES)
        raise OperationError(message, facts=facts, hint=hint)
    if antialias and mode == "nearest":
        raise OperationError("resize: antialias=True requires mode 'bilinear' or 'bicubic', got 'nearest'")
    if len(size) != len(x.shape) - 2:
        raise ShapeError(f"resize to {list(size)} requires an image of rank {len(size) + 2}, got rank {len(x.shape)}")
    for axis, n in enumerate(size, start=2):
        old = x.shape[axis]
        if type(old) is not int or type(n) is not int:
            raise ShapeError("resize requires static spatial sizes", facts=[f"axis {axis}: {old} to {n}"])
        if old != n:
            if mode == "nearest":
                x = take(x, np.minimum(np.floor(np.arange(n) * (old / n)).astype(np.int32), old - 1), axis=axis)
            else:
                x = _weighed(x, axis, _weights(KERNELS[mode], old, n, align_corners, antialias))
    return x


def _weights(kernel: _Kernel, old: int, new: int, align_corners: bool, antialias: bool) -> Array:
    """Return the weights [new, old] of the elements for each new position."""
    if align_corners:
        scale = (old - 1) / (new - 1) if new > 1 else 0.0
        positions = np.arange(new) * scale
    else:
        scale = old / new
        positions = (np.arange(new) + 0.5) * scale - 0.5
    if antialias:
        stretch = max(scale, 1.0)
        distance = (np.arange(old) - positions[:, None]) / stretch
        weights = kernel.weight(distance, kernel.antialiased_sharpness)
        return np.asarray(weights / weights.sum(axis=1, keepdims=True))
    first = np.floor(positions).astype(int) - kernel.reach + 1
    weights = np.zeros((new, old))
    for k in range(2 * kernel.reach):  # elements beyond the edge repeat it
        weight = kernel.weight(first + k - positions, kernel.sharpness)
        np.add.at(weights, (np.arange(new), np.clip(first + k, 0, old - 1)), weight)
    return weights


def _weighed(x: Any, axis: int, weights: Array) -> Any:
    """Multiply one axis by a matrix."""
    z = upcast(x)
    matrix = weights.astype(dtype_of(z).numpy)
    last = len(x.shape) - 1
    swap = tuple(last if k == axis else axis if k == last else k for k in range(last + 1))
    y = matmul(z if axis == last else transpose(z, perm=swap), matrix.T)
    return downcast(y if axis == last else transpose(y, perm=swap), x)


__all__ = ["resize"]
