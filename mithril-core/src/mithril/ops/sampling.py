"""Images read at computed positions: affine grids, sampling on a grid, and regions of fixed size."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product as combinations
from typing import Any

import numpy as np

from mithril.graph import (
    OperationError,
    Shape,
    ShapeError,
    Size,
    assume,
    composite,
    exactly,
    product,
    sample,
    shape_text,
    unknown,
)
from mithril.ops.along_axis import take_along_axis
from mithril.ops.basic import cast, downcast, dtype_of, upcast
from mithril.ops.control_flow import stop_gradient
from mithril.ops.creation import full, size_value
from mithril.ops.derived_gradients import BY_KERNEL, cotangents
from mithril.ops.elementwise import (
    abs as abs_,
    clip,
    floor,
    greater_equal,
    less_equal,
    logical_and,
    maximum,
    minimum,
    round as round_,
    where,
)
from mithril.ops.indexing import gather_nd
from mithril.ops.products import matmul
from mithril.ops.reduction import mean
from mithril.ops.shape import broadcast_to, reshape, stack, transpose, unsqueeze
from mithril.ops.slicing import narrow

MODES = ("nearest", "bilinear", "bicubic")
PADDINGS = ("zeros", "border", "reflection")
THETA = exactly(*(0.9, 0.2, 0.1, -0.1, 1.1, -0.2), shape=(1, 2, 3))
INSIDE = exactly(*(-0.83, -0.41, 0.12, 0.37, 0.55, -0.7, 0.91, 0.23, -0.2, 0.61, 0.47, 0.09), shape=(1, 2, 3, 2))
BEYOND = exactly(*(-1.43, -0.41, 0.12, 1.57, 2.15, -0.7, 0.91, 1.23), shape=(1, 2, 2, 2))

SOLID = exactly(*(-0.4, 0.3, 0.2, 0.6, -0.7, 1.3), shape=(1, 1, 1, 2, 3))


# -- grids --------------------------------------------------------------------------------------------------------
@composite(
    promotes="float",
    samples=[
        sample((2, 2, 3), size=(3, 4)),
        sample((1, 2, 3), size=(2, 2), align_corners=True, label="corners"),
        sample((1, 3, 4), size=(2, 3, 2), label="3d"),
    ],
    precision="full",
)
def affine_grid(theta, *, size: Shape, align_corners: bool = False):
    """Positions [batch, *size, axes] for ``grid_sample``: those of an image, moved by matrices ``theta``.

    ``theta`` is [batch, axes, axes + 1]. Positions are ordered x, y (z), from -1 to 1.
    """
    rank = len(size)
    if len(theta.shape) != 3 or tuple(theta.shape[1:]) != (rank, rank + 1):
        raise ShapeError(
            f"affine_grid to {list(size)} requires theta [batch, {rank}, {rank + 1}], got {shape_text(theta.shape)}"
        )
    if any(type(n) is not int for n in size):
        raise ShapeError(f"affine_grid requires static sizes, got {list(size)}")
    lines = [_unit_positions(int(n), align_corners) for n in size]
    grids = np.meshgrid(*lines, indexing="ij")[::-1]  # x is the last axis
    points = np.stack([g.reshape(-1) for g in grids] + [np.ones(math.prod(size))], axis=1)
    z = upcast(theta)
    positions = matmul(points.astype(dtype_of(z).numpy), transpose(z, perm=(0, 2, 1)))
    return downcast(reshape(positions, shape=(theta.shape[0], *size, rank)), theta)


def _unit_positions(n: int, align_corners: bool) -> np.ndarray[Any, Any]:
    if align_corners:
        return np.linspace(-1.0, 1.0, n) if n > 1 else np.zeros(1)
    return (np.arange(n) * 2 + 1) / n - 1


@composite(
    promotes="float",
    tolerance=4.0,
    samples=[
        sample((1, 2, 4, 5), INSIDE),
        sample((1, 2, 3, 3), BEYOND, padding_mode="border", label="border"),
        sample((1, 1, 3, 3), BEYOND, padding_mode="reflection", align_corners=True, label="reflection"),
        sample((1, 2, 4, 4), INSIDE, mode="bicubic", label="bicubic"),
        sample((1, 1, 3, 3), BEYOND, mode="nearest", label="nearest", gradient=False),
        sample((1, 1, 2, 3, 2), SOLID, label="3d"),
    ],
    precision="full",
)  # fmt: skip
def grid_sample(x, grid, *, mode: str = "bilinear", padding_mode: str = "zeros", align_corners: bool = False):
    """Elements of images ``x`` [batch, channels, *spatial] at the positions ``grid`` [batch, *size, axes].

    A position has one coordinate from -1 to 1 per spatial axis, the last axis first (x, y). Positions beyond the image
    read zeros, the border, or the reflected image ("reflection").
    """
    _check_grid(x.shape, grid.shape, mode, padding_mode)
    pixels = reshape(upcast(x), shape=(x.shape[0], x.shape[1], product(x.shape[2:])))

    def read(point: list[Any], weight: Any) -> Any:
        number: Any = None
        for p, n in zip(point, x.shape[2:], strict=True):
            step = cast(p, dtype="int32")
            size = n if isinstance(n, int) else size_value(value=n)
            number = step if number is None else number * size + step
        return take_along_axis(pixels, unsqueeze(number, axis=(1,)), axis=2) * unsqueeze(weight, axis=(1,))

    y = _sampled(x, grid, read, mode, padding_mode, align_corners)
    return downcast(reshape(y, shape=(x.shape[0], x.shape[1], *grid.shape[1:-1])), x)


@composite(
    promotes="float",
    tolerance=4.0,
    results=("x_grad", "grid_grad"),
    samples=[
        sample((1, 2, 2, 3), (1, 2, 4, 5), INSIDE),
        sample((1, 2, 2, 2), (1, 2, 3, 3), BEYOND, padding_mode="border", label="border", gradient=False),
        sample((1, 1, 2, 2), (1, 1, 3, 3), BEYOND, padding_mode="reflection", align_corners=True, label="reflection",
               gradient=False),
        sample((1, 2, 2, 3), (1, 2, 4, 4), INSIDE, mode="bicubic", label="bicubic", gradient=False),
        sample((1, 1, 2, 2), (1, 1, 3, 3), BEYOND, mode="nearest", label="nearest", gradient=False),
        sample((1, 1, 1, 1, 2), (1, 1, 2, 3, 2), SOLID, label="3d", gradient=False),
    ],
    precision="full",
)  # fmt: skip
def grid_sample_grad(g, x, grid, *, mode: str = "bilinear", padding_mode: str = "zeros", align_corners: bool = False):
    """Cotangents of images and positions of ``grid_sample`` for the cotangent ``g`` of its result."""

    def images(x: Any, grid: Any) -> Any:
        return grid_sample.reference(x, grid, mode=mode, padding_mode=padding_mode, align_corners=align_corners)

    return cotangents(images, (0, 1), g, x, grid)


@grid_sample.vjp
def _(g, y, x, grid, **attributes):
    return grid_sample_grad(g, x, grid, **attributes)


BY_KERNEL.add(grid_sample)


def _sampled(x: Any, grid: Any, read: Callable[..., Any], mode: str, padding_mode: str, align_corners: bool) -> Any:
    """Return the elements at the positions of a grid, as ``read`` returns them."""
    sizes = [_extent(n, grid) for n in _checked_sizes("grid_sample", x)]
    rank, places = len(sizes), product(grid.shape[1:-1])
    positions = reshape(upcast(grid), shape=(grid.shape[0], places, rank))
    axes = [reshape(narrow(positions, 2, rank - 1 - k, rank - k), shape=(grid.shape[0], places)) for k in range(rank)]
    axes = [_in_pixels(p, n, align_corners) for p, n in zip(axes, sizes, strict=True)]
    if mode != "bicubic":
        axes = [_padded(p, n, padding_mode, align_corners) for p, n in zip(axes, sizes, strict=True)]

    def place(p: Any, n: Any) -> Any:  # only bicubic sampling needs padding of each element
        return _padded(p, n, padding_mode, align_corners) if mode == "bicubic" else p

    return _interpolated(axes, sizes, read, place, mode)


def _checked_sizes(op: str, x: Any) -> list[Size]:
    sizes = list(x.shape[2:])
    if not sizes or any(isinstance(n, int) and n < 1 for n in sizes):
        raise ShapeError(f"{op} requires images [batch, channels, ...] that are not empty, got {shape_text(x.shape)}")
    return sizes


def _extent(size: Size, positions: Any) -> Any:
    """Return a size as a number, an open one as a value."""
    return size if isinstance(size, int) else cast(size_value(value=size), dtype=dtype_of(upcast(positions)))


def _in_image(p: Any, n: Any) -> Any:
    """Move positions to the nearest pixel of the image."""
    return clip(p, low=0.0, high=n - 1.0) if isinstance(n, int) else minimum(maximum(p, 0.0), n - 1.0)


def _check_grid(x: Any, grid: Any, mode: str, padding_mode: str) -> None:
    for kind, value, accepted in (("mode", mode, MODES), ("padding_mode", padding_mode, PADDINGS)):
        if value not in accepted:
            message, facts, hint = unknown(f"{kind} of grid_sample", value, accepted)
            raise OperationError(message, facts=facts, hint=hint)
    rank = len(x) - 2
    if len(grid) < 2 or grid[-1] != rank:
        raise ShapeError(
            f"grid_sample of an image {shape_text(x)} requires a grid [batch, ..., {rank}], got {shape_text(grid)}"
        )
    if not assume(x[0], "==", grid[0], "the batch of 'grid_sample'"):
        raise ShapeError(f"grid_sample got {x[0]} images and {grid[0]} grids")


def _in_pixels(p: Any, n: Any, align_corners: bool) -> Any:
    """Convert positions from -1 to 1 to pixels."""
    return (p + 1.0) * ((n - 1) / 2) if align_corners else (p + 1.0) * (n / 2) - 0.5


def _padded(p: Any, n: Any, padding_mode: str, align_corners: bool) -> Any:
    """Move positions beyond the image into it."""
    if padding_mode == "reflection":
        low, span = (0.0, n - 1.0) if align_corners else (-0.5, n * 1.0)
        span = max(span, 1.0) if isinstance(n, int) else maximum(span, 1.0)  # an image of one pixel has no span
        distance = abs_(p - low)
        turns = floor(stop_gradient(distance) / span)
        rest = distance - turns * span
        is_odd = greater_equal(turns - floor(turns / 2.0) * 2.0, 0.5)
        p = where(is_odd, span - rest, rest) + low
    return p if padding_mode == "zeros" else _in_image(p, n)


def _interpolated(
    axes: list[Any], sizes: list[Any], read: Callable[..., Any], place: Callable[..., Any], mode: str
) -> Any:
    """Sum over the neighbors of each position: elements times the product of their weights along the axes.

    ``read`` returns the elements at positions, one per axis, times the weights.
    """
    neighbors = [[(place(q, n), w) for q, w in _neighbors(p, mode)] for p, n in zip(axes, sizes, strict=True)]
    total: Any = None
    for corner in combinations(*neighbors):
        weight: Any = None
        point = []
        for (q, w), n in zip(corner, sizes, strict=True):
            in_image = logical_and(greater_equal(q, 0.0), less_equal(q, n - 1.0))
            w = where(in_image, w, 0.0)
            weight = w if weight is None else weight * w
            point.append(_in_image(q, n))
        term = read(point, weight)
        total = term if total is None else total + term
    return total


def _neighbors(p: Any, mode: str) -> list[tuple[Any, Any]]:
    """Return the positions of neighbors along one axis with their weights."""
    fixed = stop_gradient(p)
    if mode == "nearest":
        return [(round_(fixed), fixed * 0.0 + 1.0)]
    low = floor(fixed)
    t = p - low
    if mode == "bilinear":
        return [(low, 1.0 - t), (low + 1.0, t)]
    a = -0.75
    weights = [_far(t + 1.0, a), _near(t, a), _near(1.0 - t, a), _far(2.0 - t, a)]
    return [(low + float(k - 1), w) for k, w in enumerate(weights)]


def _near(d: Any, a: float) -> Any:
    return (d * (a + 2.0) - (a + 3.0)) * d * d + 1.0


def _far(d: Any, a: float) -> Any:
    return (((d - 5.0) * d + 8.0) * d - 4.0) * a


# -- regions ------------------------------------------------------------------------------------------------------
@composite(
    promotes="float",
    promoted=("x", "boxes"),
    tolerance=4.0,
    samples=[
        sample((2, 2, 5, 6), exactly(*(0.7, 0.4, 4.1, 3.3, 1.3, 1.7, 5.6, 4.2), shape=(2, 4)),
               exactly(1, 0, dtype="int32"), size=(2, 2)),
        sample((1, 1, 4, 4), exactly(*(1.3, 0.6, 7.1, 5.7), shape=(1, 4)), exactly(0, dtype="int32"), size=(1, 3),
               scale=0.5, samples=1, aligned=True, label="scale"),
    ],
    precision="full",
)  # fmt: skip
def roi_align(x, boxes, image, *, size: Shape, scale: float = 1.0, samples: int = 2, aligned: bool = False):
    """Regions [boxes, channels, *size] of images ``x`` [batch, channels, height, width], as averages of samples.

    ``boxes`` [boxes, 4] are x1, y1, x2, y2, multiplied by ``scale``; ``image`` [boxes] numbers the image of each box.
    Each element averages ``samples`` x ``samples`` positions. ``aligned`` shifts boxes by half a pixel.
    """
    sizes = _checked_sizes("roi_align", x)
    if len(sizes) != 2 or len(boxes.shape) != 2 or boxes.shape[1] != 4 or len(image.shape) != 1 or len(size) != 2:
        raise ShapeError(
            "roi_align requires x [batch, channels, height, width], boxes [boxes, 4], image [boxes] and two sizes, got "
            f"{shape_text(x.shape)}, {shape_text(boxes.shape)}, {shape_text(image.shape)} and {list(size)}"
        )
    if samples < 1:
        raise OperationError(f"roi_align: samples={samples} must be at least 1")
    corners = upcast(boxes) * scale - (0.5 if aligned else 0.0)
    count = boxes.shape[0]
    shape = (count, *(n * samples for n in size))
    axes, in_image = [], None
    extents = [_extent(n, boxes) for n in sizes]
    # The rows of a box lie between y1 and y2, its columns between x1 and x2.
    for k, n in enumerate(extents):
        start = narrow(corners, 1, 1 - k, 2 - k)
        extent = narrow(corners, 1, 3 - k, 4 - k) - start
        if not aligned:
            extent = where(greater_equal(extent, 1.0), extent, 1.0)
        offsets = ((np.arange(shape[1 + k]) + 0.5) / shape[1 + k]).astype(dtype_of(corners).numpy)
        p = broadcast_to(unsqueeze(start + extent * offsets, axis=(2 - k,)), shape=shape)
        within = logical_and(greater_equal(p, -1.0), less_equal(p, n * 1.0))
        in_image = within if in_image is None else logical_and(in_image, within)
        axes.append(_in_image(p, n))
    numbers = unsqueeze(cast(image, dtype="float32"), axis=(1, 2)) + full(shape=shape, value=0.0)
    pixels = transpose(upcast(x), perm=(0, 2, 3, 1))

    def read(point: list[Any], weight: Any) -> Any:
        elements = gather_nd(pixels, cast(stack(numbers, *point, axis=3), dtype="int32"))
        return elements * unsqueeze(weight, axis=(-1,))

    y = _interpolated(axes, extents, read, lambda p, _: p, "bilinear")
    y = where(unsqueeze(in_image, axis=(3,)), y, 0.0)
    y = reshape(y, shape=(count, size[0], samples, size[1], samples, x.shape[1]))
    return downcast(transpose(mean(y, axis=(2, 4)), perm=(0, 3, 1, 2)), x)


__all__ = ["affine_grid", "grid_sample", "grid_sample_grad", "roi_align"]
