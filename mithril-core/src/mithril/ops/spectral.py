"""Discrete Fourier transforms; complex numbers are pairs of a real and an imaginary part.

The bodies are the mixed-radix algorithm of Cooley and Tukey as products with small matrices, for backends without a
Fourier transform. The transformed axis needs a static size.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from mithril.graph import Axis, DType, Ints, ShapeError, Size, TensorType, composite, normalize_axis, product, sample
from mithril.ops.basic import downcast, upcast
from mithril.ops.products import matmul
from mithril.ops.shape import concat, flip, reshape, transpose
from mithril.ops.slicing import narrow

RADIX = 32  # the largest factor that is computed by one product
Complex = tuple[Any, Any]


def _flops(types: Sequence[Any], results: Sequence[TensorType], attributes: Mapping[str, Any]) -> Size:
    size = types[0].shape[attributes["axis"]]
    return product(types[0].shape) * 5 * (size.bit_length() if isinstance(size, int) else 10)


def _length(x: Any, axis: int) -> int:
    size = x.shape[axis]
    if not isinstance(size, int):
        raise ShapeError(f"the transformed axis {axis} needs a static size, got {size}")
    if size == 0:
        raise ShapeError(f"the transformed axis {axis} is empty")
    return size


# -- the algorithm ------------------------------------------------------------------------------------------------
@lru_cache(maxsize=64)
def _roots(rows: int, columns: int, size: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return cosines and sines of 2 pi j k / size for j < rows, k < columns."""
    angles = 2 * np.pi * (np.outer(np.arange(rows), np.arange(columns)) % size) / size
    return np.cos(angles), np.sin(angles)


def _factor(size: int) -> int:
    """Return the largest divisor up to RADIX, else the least one."""
    return next((p for p in range(RADIX, 1, -1) if size % p == 0), 0) or next(
        (p for p in range(RADIX + 1, int(size**0.5) + 1) if size % p == 0), size
    )


def _rotate(x: Complex, cos: Any, sin: Any, multiply: Any) -> Complex:
    """Return x (cos - i sin) for a product that may be a matrix product."""
    re, im = x
    if im is None:
        return multiply(cos, re), -multiply(sin, re)
    return multiply(cos, re) + multiply(sin, im), multiply(cos, im) - multiply(sin, re)


def _transform(x: Complex, inverse: bool) -> Complex:
    """Return the transform of the last axis without scaling; an imaginary part of None is zero."""
    n, kind = x[0].shape[-1], x[0].dtype.numpy if isinstance(x[0].dtype, DType) else x[0].dtype
    p = _factor(n)
    q = n // p

    def rotate(z: Complex, roots: tuple[Any, Any], multiply: Any) -> Complex:
        cos, sin = (part.astype(kind) for part in roots)
        return _rotate(z, cos, -sin if inverse else sin, multiply)

    lead = tuple(x[0].shape[:-1])
    re, im = (None if part is None else reshape(part, shape=(*lead, p, q)) for part in x)
    y = rotate((re, im), _roots(p, p, p), matmul)
    if q > 1:
        y = _transform(rotate(y, _roots(p, q, n), operator.mul), inverse)
    swap = (*range(len(lead)), len(lead) + 1, len(lead))
    first, second = (reshape(transpose(part, perm=swap), shape=(*lead, n)) for part in y)
    return first, second


def _last(x: Any, axis: int) -> Any:
    """Swap an axis with the last one."""
    perm = list(range(len(x.shape)))
    perm[axis], perm[-1] = perm[-1], perm[axis]
    return x if axis == len(perm) - 1 else transpose(x, perm=tuple(perm))


def _weights(like: Any, axis: int, size: int, total: int = 1) -> np.ndarray[Any, Any]:
    """Return how often each entry of a half spectrum occurs in the full one, divided by ``total``."""
    count = np.full(size // 2 + 1, 2.0)
    count[0] = 1.0
    if size % 2 == 0:
        count[-1] = 1.0
    kind = like.dtype.numpy if isinstance(like.dtype, DType) else like.dtype
    # Divided in float64: older ml_dtypes turn bfloat16 / 4 into float32.
    return (count / total).astype(kind).reshape([-1 if k == axis else 1 for k in range(len(like.shape))])


# -- complex transforms -------------------------------------------------------------------------------------------
@composite(
    results=("re", "im"),
    promotes="float",
    flops=_flops,
    tolerance=8.0,
    precision="full",
    linear="re im",
    samples=[
        sample((3, 6), (3, 6)),
        sample((4, 2), (4, 2), axis=0, label="axis"),
        sample((2, 37), (2, 37), label="prime"),
        sample((2, 192), (2, 192), label="steps"),
    ],
)
def fft(re, im, *, axis: Axis = -1):
    """The discrete Fourier transform along an axis: y_k = sum_j x_j exp(-2 pi i j k / n)."""
    _length(re, axis)
    y = _transform((_last(upcast(re), axis), _last(upcast(im), axis)), inverse=False)
    return downcast(_last(y[0], axis), re), downcast(_last(y[1], axis), re)


@composite(
    results=("re", "im"),
    promotes="float",
    flops=_flops,
    tolerance=8.0,
    precision="full",
    linear="re im",
    samples=[sample((3, 6), (3, 6)), sample((4, 2), (4, 2), axis=0, label="axis")],
)
def ifft(re, im, *, axis: Axis = -1):
    """The inverse of ``fft``: x_j = 1/n sum_k y_k exp(2 pi i j k / n)."""
    scale = 1.0 / _length(re, axis)
    x = _transform((_last(upcast(re), axis), _last(upcast(im), axis)), inverse=True)
    return downcast(_last(x[0], axis) * scale, re), downcast(_last(x[1], axis) * scale, re)


@fft.vjp
def _(g, y, re, im, *, axis):
    size = float(_length(re, axis))
    x = ifft(*g, axis=axis)
    return x[0] * size, x[1] * size


@ifft.vjp
def _(g, y, re, im, *, axis):
    scale = 1.0 / _length(re, axis)
    x = fft(*g, axis=axis)
    return x[0] * scale, x[1] * scale


# -- transforms of real numbers -----------------------------------------------------------------------------------
@composite(
    results=("re", "im"),
    promotes="float",
    flops=_flops,
    tolerance=8.0,
    precision="full",
    linear="x",
    samples=[
        sample((3, 6)),
        sample((5, 2), axis=0, label="odd"),
        sample((1, 1), label="one"),
        sample((2, 96), label="steps"),
    ],
)
def rfft(x, *, axis: Axis = -1):
    """The first n // 2 + 1 elements of ``fft`` of real numbers; the others are their conjugates."""
    n = _length(x, axis)
    y = _transform((_last(upcast(x), axis), None), inverse=False)
    re, im = (narrow(_last(part, axis), axis, 0, n // 2 + 1) for part in y)
    return downcast(re, x), downcast(im, x)


@composite(
    promotes="float",
    flops=_flops,
    tolerance=8.0,
    precision="full",
    linear="re im",
    samples=[
        sample((3, 4), (3, 4), size=6),
        sample((3, 2), (3, 2), size=5, axis=0, label="odd"),
        sample((1, 1), (1, 1), size=1, label="one"),
    ],
)
def irfft(re, im, *, size: int, axis: Axis = -1):
    """The inverse of ``rfft`` of ``size`` real numbers, from size // 2 + 1 elements along the axis."""
    if _length(re, axis) != size // 2 + 1:
        raise ShapeError(
            f"irfft: {size} numbers have a spectrum of {size // 2 + 1} elements, got {re.shape[axis]}",
            hint=f"size={2 * re.shape[axis] - 2} or {2 * re.shape[axis] - 1}",
        )
    rest = size - size // 2 - 1
    z = _last(upcast(re), axis), _last(upcast(im), axis)
    mirrored = [flip(narrow(part, len(part.shape) - 1, 1, 1 + rest), axis=(-1,)) for part in z]
    full = concat(z[0], mirrored[0], axis=-1), concat(z[1], -mirrored[1], axis=-1)
    return downcast(_last(_transform(full, inverse=True)[0], axis) * (1.0 / size), re)


@rfft.vjp
def _(g, y, x, *, axis):
    size = _length(x, axis)
    weights = _weights(x, axis, size)
    return (irfft(g[0] / weights, g[1] / weights, size=size, axis=axis) * float(size),)


@irfft.vjp
def _(g, y, re, im, *, size, axis):
    slopes = rfft(g, axis=axis)
    scale = _weights(re, axis, size, total=size)
    return slopes[0] * scale, slopes[1] * scale


# -- several axes -------------------------------------------------------------------------------------------------
def _flops_of_axes(types: Sequence[Any], results: Sequence[TensorType], attributes: Mapping[str, Any]) -> Size:
    return sum(_flops(types, results, {"axis": axis}) for axis in attributes["axes"])


def _distinct(x: Any, axes: Sequence[int]) -> Sequence[int]:
    rank = len(x.shape)
    if not axes or len({normalize_axis(axis, rank) for axis in axes}) < len(axes):
        raise ShapeError(f"the transformed axes {list(axes)} are not different ones", hint="write axes=(-2, -1)")
    return axes


@composite(
    results=("re", "im"),
    promotes="float",
    flops=_flops_of_axes,
    tolerance=8.0,
    precision="full",
    linear="re im",
    samples=[sample((3, 2, 4), (3, 2, 4), axes=(-1, 0), dtypes=False)],
)
def fftn(re, im, *, axes: Ints):
    """``fft`` along several axes, of images with ``axes=(-2, -1)``."""
    for axis in _distinct(re, axes):
        re, im = fft(re, im, axis=axis)
    return re, im


@composite(
    results=("re", "im"),
    promotes="float",
    flops=_flops_of_axes,
    tolerance=8.0,
    precision="full",
    linear="re im",
    samples=[sample((3, 2, 4), (3, 2, 4), axes=(-1, 0), dtypes=False)],
)
def ifftn(re, im, *, axes: Ints):
    """The inverse of ``fftn``."""
    for axis in _distinct(re, axes):
        re, im = ifft(re, im, axis=axis)
    return re, im


@composite(
    results=("re", "im"),
    promotes="float",
    flops=_flops_of_axes,
    tolerance=8.0,
    precision="full",
    linear="x",
    samples=[sample((3, 2, 5), axes=(0, -1), dtypes=False)],
)
def rfftn(x, *, axes: Ints):
    """``fftn`` of real numbers; the last of ``axes`` has n // 2 + 1 elements, as in ``rfft``."""
    *first, last = _distinct(x, axes)
    re, im = rfft(x, axis=last)
    for axis in first:
        re, im = fft(re, im, axis=axis)
    return re, im


@composite(
    promotes="float",
    flops=_flops_of_axes,
    tolerance=8.0,
    precision="full",
    linear="re im",
    samples=[sample((3, 2, 3), (3, 2, 3), size=5, axes=(0, -1), dtypes=False)],
)
def irfftn(re, im, *, size: int, axes: Ints):
    """The inverse of ``rfftn`` of real numbers, ``size`` of them along the last of ``axes``."""
    *first, last = _distinct(re, axes)
    for axis in first:
        re, im = ifft(re, im, axis=axis)
    return irfft(re, im, size=size, axis=last)


__all__ = ["fft", "fftn", "ifft", "ifftn", "irfft", "irfftn", "rfft", "rfftn"]
