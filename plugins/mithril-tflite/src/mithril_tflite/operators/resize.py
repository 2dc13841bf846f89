"""Resizing of images: positions are computed in float32, as by the reference kernels."""

from __future__ import annotations

import numpy as np

from mithril import ops
from mithril.graph import OperationError
from mithril_tflite.table import Sizes, operator


def _scale(old, new, align_corners):
    is_aligned = align_corners and new > 1
    return np.float32(old - 1) / np.float32(new - 1) if is_aligned else np.float32(old) / np.float32(new)


def _checked(x, size):
    old = x.shape[1:3]
    if x.ndim != 4 or len(size) != 2 or any(type(n) is not int or n < 1 for n in (*old, *size)):
        raise OperationError(
            f"an image {list(x.shape)} is resized to {list(size)}",
            facts=["accepted: static sizes of images, also in open batches"],
            hint="fix the sizes: ml.compile(model, shapes={'INPUT': [...]})",
        )
    return list(zip((1, 2), old, size, strict=True))


@operator(moves=True)
def RESIZE_NEAREST_NEIGHBOR(x, size: Sizes, *, align_corners, half_pixel_centers):
    for axis, old, new in _checked(x, size):
        places = np.arange(new, dtype=np.float32) + np.float32(0.5 if half_pixel_centers else 0)
        places *= _scale(old, new, align_corners)
        index = np.floor(places + np.float32(0.5)) if align_corners else np.floor(places)
        x = ops.take(x, np.clip(index, 0, old - 1).astype(np.int32), axis=axis)
    return x


@operator
def RESIZE_BILINEAR(x, size: Sizes, *, align_corners, half_pixel_centers):
    for axis, old, new in _checked(x, size):
        scale = _scale(old, new, align_corners)
        places = np.arange(new, dtype=np.float32)
        places = (places + np.float32(0.5)) * scale - np.float32(0.5) if half_pixel_centers else places * scale
        places = np.clip(places, 0, old - 1)
        lower = np.floor(places).astype(np.int64)
        weights = np.zeros((new, old), np.float32)
        rows = np.arange(new)
        weights[rows, lower] = 1 - (places - lower)
        weights[rows, np.minimum(lower + 1, old - 1)] += places - lower
        order = (0, 2, 3, 1) if axis == 1 else (0, 1, 3, 2)
        inverse = tuple(order.index(k) for k in range(4))
        x = ops.transpose(ops.matmul(ops.transpose(x, perm=order), weights.T), perm=inverse)
    return x
