"""Pooling over spatial axes: maximum and average, over windows, adaptive and global.

Images are ``[batch, channels, *spatial]``. A single kernel size, stride or dilation, or a single pair for padding,
applies to all spatial axes. Maxima treat padding as minus infinity.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mithril.graph import (
    Ints,
    Pairs,
    Shape,
    ShapeError,
    Size,
    TensorType,
    always,
    assume,
    composite,
    dtype as as_dtype,
    exactly,
    floating,
    int32,
    is_static,
    numeric,
    op,
    operation,
    product,
    sample,
    shape_text,
)
from mithril.ops.along_axis import scatter_add_along_axis
from mithril.ops.basic import to_float32
from mithril.ops.convolution import per_axis, tap_slices, unpad, windows, windows_fit
from mithril.ops.creation import full
from mithril.ops.indexing import take
from mithril.ops.shape import reshape, transpose

Array = np.ndarray[Any, Any]


# -- attributes and shapes ----------------------------------------------------------------------------------------
def _spatial(types: Sequence[TensorType | None], minimum: int = 1) -> int:
    rank = types[0].rank - 2 if types[0] is not None else 0
    if rank < minimum:
        raise ShapeError(
            f"pooling requires spatial axes, but the operand has rank {rank + 2}",
            facts=["accepted: [batch, channels, *spatial] of rank 3 or more"],
        )
    return rank


def _pool_form(types: Sequence[TensorType | None], attributes: dict[str, Any]) -> dict[str, Any]:
    names = [n for n in ("kernel", "stride", "padding", "dilation") if n in attributes]
    attributes = per_axis(attributes, names, _spatial(types))
    dilation = attributes.get("dilation", (1,) * len(attributes["kernel"]))
    for k, (pair, kernel, step) in enumerate(zip(attributes["padding"], attributes["kernel"], dilation, strict=True)):
        reach = (kernel - 1) * step + 1
        # A window of padding only has no maximum, and the mean without padding is 0 / 0.
        if any(isinstance(p, int) and p >= reach for p in pair):
            raise ShapeError(
                f"padding {pair[0]} and {pair[1]} of spatial axis {k} contains an entire window of {reach}",
                facts=[f"accepted: at most {reach - 1} on each side"],
            )
    return attributes


def pool_shape(x: Shape, *, kernel: Ints, stride: Ints, padding: Pairs, dilation: Ints = (), **_: Any) -> Shape:
    """Return the shape of the result: one element per window."""
    rows = zip(x[2:], kernel, stride, padding, dilation or (1,) * len(kernel), strict=True)
    return (*x[:2], *(windows_fit(k, *row) for k, row in enumerate(rows)))


def _expect_cotangent(g: Shape, expected: Shape) -> None:
    if len(g) != len(expected) or not all(
        assume(a, "==", b, "a cotangent has the shape of the result") for a, b in zip(g, expected, strict=True)
    ):
        raise ShapeError(f"the cotangent has shape {shape_text(g)}, expected {shape_text(expected)}")


def _cost(operand: int) -> Any:
    """Return a flop count: one per window element; ``operand`` is the index of the pooled array, or -1: the result."""

    def flops(types: Sequence[Any], results: Sequence[TensorType], attributes: Mapping[str, Any]) -> Size:
        output = results[0] if operand < 0 else types[operand]
        return product((*output.shape, *attributes["kernel"]))

    return flops


# -- maximum ------------------------------------------------------------------------------------------------------
def _lowest(x: Array) -> Any:
    kind = as_dtype(x.dtype)
    return -np.inf if kind.is_float else kind.limits[0]


UNEVEN: dict[str, Any] = {"kernel": (3, 2), "stride": (2, 1), "padding": ((1, 2), (0, 1)), "dilation": (2, 1)}
MAX_SAMPLES: list[tuple[str, Shape, dict[str, Any]]] = [
    ("", (2, 3, 8), {"kernel": (2,), "stride": (2,)}),
    ("2d", (1, 2, 7, 5), UNEVEN),
    ("overlap", (1, 1, 5, 5), {"kernel": (3, 3), "padding": ((1, 1), (1, 1))}),
]
SPECIAL = exactly(1.0, float("nan"), 3.0, 3.0, float("-inf"), float("-inf"), shape=(1, 1, 6))


@op(
    shape=pool_shape,
    dtype=numeric,
    canonical=_pool_form,
    flops=_cost(-1),
    samples=[
        *(sample(x, label=label, **attributes) for label, x, attributes in MAX_SAMPLES),
        sample(SPECIAL, kernel=(2,), stride=(2,), label="special", gradient=False),
    ],
    axes="n c *h -> n c *p | h window, p whole",
    precision="follow",
)
def max_pool(x, *, kernel: Ints, stride: Ints = (1,), padding: Pairs = ((0, 0),), dilation: Ints = (1,)):
    """Maximum of each window; nan propagates."""
    view = windows(x, kernel, stride, padding, dilation, _lowest(x))
    return np.max(view, axis=tuple(range(x.ndim, view.ndim)))


@max_pool.vjp
def _(g, y, x, *, kernel, stride, padding, dilation):
    return (max_pool_grad(g, x, kernel=kernel, stride=stride, padding=padding, dilation=dilation),)


@op(
    shape=pool_shape,
    dtype=always(int32),
    canonical=_pool_form,
    flops=_cost(-1),
    samples=[
        *(sample(x, label=label, **attributes) for label, x, attributes in MAX_SAMPLES),
        sample(SPECIAL, kernel=(2,), stride=(2,), label="special", gradient=False),
    ],
    axes="n c *h -> n c *p | h window, p whole",
)
def max_pool_positions(x, *, kernel: Ints, stride: Ints = (1,), padding: Pairs = ((0, 0),), dilation: Ints = (1,)):
    """Argmax of each window, int32: an index into the flattened spatial axes.

    The first of equal maxima wins, nan is the largest; -1 for windows that contain only padding.
    """
    view = windows(x, kernel, stride, padding, dilation, _lowest(x))
    spatial = x.shape[2:]
    numbers = np.arange(math.prod(spatial), dtype=np.int64).reshape(1, 1, *spatial)
    numbers = windows(numbers, kernel, stride, padding, dilation, -1)
    count = math.prod(kernel)
    flat, numbers = (v.reshape(*v.shape[: x.ndim], count) for v in (view, numbers))
    top = np.max(flat, axis=-1, keepdims=True)
    hits = ((flat == top) | ((flat != flat) & (top != top))) & (numbers >= 0)  # excludes padding, which equals -inf
    first = np.argmax(hits, axis=-1)[..., None]
    numbers = np.broadcast_to(numbers, flat.shape)
    indices = np.where(np.take_along_axis(hits, first, -1), np.take_along_axis(numbers, first, -1), -1)
    return indices[..., 0].astype(np.int32)


max_pool_positions.no_vjp("positions are integers")


@composite(
    canonical=_pool_form,
    promotes="same",
    flops=_cost(0),
    samples=[
        sample((2, 3, 4), (2, 3, 8), kernel=(2,), stride=(2,)),
        sample((1, 2, 3, 5), (1, 2, 7, 5), label="2d", **UNEVEN),
        sample((1, 1, 5, 5), (1, 1, 5, 5), label="overlap", **MAX_SAMPLES[2][2]),
    ],
    axes="n c *p, n c *h -> n c *h | h window, p whole",
)
def max_pool_grad(g, x, *, kernel: Ints, stride: Ints = (1,), padding: Pairs = ((0, 0),), dilation: Ints = (1,)):
    """Input gradient of ``max_pool``: the cotangent of each window is added to its first maximum."""
    # Positions, not equality with the maximum: each window gives its cotangent to one element, as
    # frameworks do.
    indices = max_pool_positions(x, kernel=kernel, stride=stride, padding=padding, dilation=dilation)
    _expect_cotangent(tuple(g.shape), tuple(indices.shape))
    lead, zero = tuple(x.shape[:2]), full(shape=(), value=0, dtype=g.dtype)
    masked = operation("where")(operation("less")(indices, 0), zero, g)
    flat = [reshape(v, shape=(*lead, product(v.shape[2:]))) for v in (indices, masked)]
    none = full(shape=(*lead, product(x.shape[2:])), value=0, dtype=g.dtype)
    return reshape(scatter_add_along_axis(none, flat[0], flat[1], axis=2), shape=tuple(x.shape))


# -- average ------------------------------------------------------------------------------------------------------
AVERAGE_SAMPLES: list[tuple[str, Shape, dict[str, Any]]] = [
    ("", (2, 3, 8), {"kernel": (2,), "stride": (2,)}),
    ("2d", (1, 2, 7, 5), {"kernel": (3, 2), "stride": (2, 1), "padding": ((1, 2), (0, 1))}),
    ("without padding", (1, 2, 5, 5), {"kernel": (3,), "padding": ((1, 1),), "count_include_pad": False}),
]


def _counts(shape: Sequence[Any], kernel: Ints, stride: Ints, padding: Any, count_include_pad: bool) -> Any:
    """Return the number of elements in each mean."""
    if count_include_pad:
        return math.prod(kernel)
    counts = windows(np.ones((1, 1, *shape[2:])), kernel, stride, padding, (1,) * len(kernel))
    return counts.sum(axis=tuple(range(len(shape), counts.ndim)))


@op(
    shape=pool_shape,
    dtype=floating,
    canonical=_pool_form,
    promotes="float",
    flops=_cost(-1),
    samples=[sample(x, label=label, **attributes) for label, x, attributes in AVERAGE_SAMPLES],
    axes="n c *h -> n c *p | h window, p whole",
    linear="x",
    precision="follow",
)
def avg_pool(x, *, kernel: Ints, stride: Ints = (1,), padding: Pairs = ((0, 0),), count_include_pad: bool = True):
    """Mean of each window, with or without padding, which is 0. 16-bit floats accumulate in float32."""
    view = windows(to_float32(x), kernel, stride, padding, (1,) * len(kernel))
    total = np.sum(view, axis=tuple(range(x.ndim, view.ndim)))
    return (total / _counts(x.shape, kernel, stride, padding, count_include_pad)).astype(x.dtype)


@avg_pool.vjp
def _(g, y, x, **attributes):
    return (avg_pool_grad(g, shape=x.shape, **attributes),)


def _average_grad_shape(g: Shape, *, shape: Shape, **attributes: Any) -> Shape:
    if len(shape) != len(g):
        raise ShapeError(f"the cotangent has rank {len(g)}, the operand's shape has rank {len(shape)}")
    _expect_cotangent(g, pool_shape(shape, **attributes))
    return shape


@op(
    shape=_average_grad_shape,
    dtype=floating,
    canonical=_pool_form,
    promotes="float",
    flops=_cost(0),
    samples=[
        sample((2, 3, 4), shape=(2, 3, 8), kernel=(2,), stride=(2,)),
        sample((1, 2, 4, 5), label="2d", shape=(1, 2, 7, 5), **AVERAGE_SAMPLES[1][2]),
        sample((1, 2, 5, 5), label="without padding", shape=(1, 2, 5, 5), **AVERAGE_SAMPLES[2][2]),
    ],
    axes="n c *p -> n c *h | h window, p whole, shape=result",
    linear="g",
)
def avg_pool_grad(
    g,
    *,
    shape: Shape,
    kernel: Ints,
    stride: Ints = (1,),
    padding: Pairs = ((0, 0),),
    count_include_pad: bool = True,
):
    """Input gradient of ``avg_pool`` for an operand of the given shape: windows distribute their cotangents evenly."""
    share = to_float32(g)
    share = share / np.asarray(_counts(shape, kernel, stride, padding, count_include_pad), share.dtype)
    out = np.zeros((*shape[:2], *(n + a + b for n, (a, b) in zip(shape[2:], padding, strict=True))), share.dtype)
    for _, window in tap_slices(g.shape[2:], kernel, stride, (1,) * len(kernel)):
        out[window] += share
    return unpad(out, padding).astype(g.dtype)


@avg_pool_grad.vjp
def _(gg, y, g, *, shape, **attributes):
    return (avg_pool(gg, **attributes),)


# -- adaptive and global ------------------------------------------------------------------------------------------
def _adaptive(x: Any, size: Ints) -> Ints:
    """Return the spatial sizes of the result, one per axis."""
    rank = _spatial([TensorType(as_dtype(x.dtype), tuple(x.shape))])
    sizes: Ints = per_axis({"size": size}, ("size",), rank)["size"]
    if all(n == 1 for n in sizes):
        return sizes  # global pooling, which also supports symbolic sizes
    for k, n in enumerate(x.shape[2:]):
        if not isinstance(n, int):
            raise ShapeError(
                f"adaptive pooling to {sizes[k]} requires a static size of spatial axis {k}, got '{n}'",
                hint="pass shapes=... with an int for this axis; only pooling to size 1 supports symbolic sizes",
            )
        if n == 0:
            raise ShapeError(f"cannot pool spatial axis {k}: its size is 0")
    return sizes


def _bounds(n: int, size: int) -> list[tuple[int, int]]:
    """Return ``size`` windows that cover an axis of n elements; they overlap if ``size`` does not divide n."""
    return [(i * n // size, -(-(i + 1) * n // size)) for i in range(size)]


def _swap_with_last(x: Any, axis: int) -> tuple[int, ...]:
    """Return the permutation that swaps an axis with the last."""
    perm = list(range(len(x.shape)))
    perm[axis], perm[-1] = perm[-1], perm[axis]
    return tuple(perm)


@composite(
    samples=[
        sample((2, 3, 8), size=(4,)),
        sample((1, 2, 7, 5), size=(3, 2), label="uneven"),
        sample((1, 2, 2, 3), size=(3, 1), label="more than there are"),
    ],
    precision="full",
)
def adaptive_avg_pool(x, *, size: Ints):
    """Mean over windows that yield the given spatial size."""
    sizes = _adaptive(x, size)
    if all(n == 1 for n in sizes):
        return global_avg_pool(x)
    spatial = x.shape[2:]
    if all(n % m == 0 for n, m in zip(spatial, sizes, strict=True)):
        kernel = tuple(n // m for n, m in zip(spatial, sizes, strict=True))
        return avg_pool(x, kernel=kernel, stride=kernel)
    kind = as_dtype(x.dtype)
    y = operation("cast")(x, dtype="float32") if not kind.is_float or kind.bits < 32 else x
    for axis, (n, m) in enumerate(zip(spatial, sizes, strict=True), 2):
        if n == m:
            continue
        # The mean over a box is the mean of means along its axes.
        weights = np.zeros((n, m), as_dtype(y.dtype).numpy)
        for i, (a, b) in enumerate(_bounds(n, m)):
            weights[a:b, i] = 1 / (b - a)
        perm = _swap_with_last(y, axis)
        y = transpose(operation("matmul")(transpose(y, perm=perm), weights), perm=perm)
    return operation("cast")(y, dtype=kind) if kind.is_float and kind.bits < 32 else y


@composite(
    samples=[
        sample((2, 3, 8), size=(4,)),
        sample((1, 2, 7, 5), size=(3, 2), label="uneven"),
        sample((1, 2, 2, 3), size=(3, 1), label="more than there are"),
    ]
)
def adaptive_max_pool(x, *, size: Ints):
    """Maximum over windows that yield the given spatial size."""
    sizes = _adaptive(x, size)
    spatial = x.shape[2:]
    if not is_static(spatial):
        return global_max_pool(x)
    if all(n % m == 0 for n, m in zip(spatial, sizes, strict=True)):
        kernel = tuple(n // m for n, m in zip(spatial, sizes, strict=True))
        return max_pool(x, kernel=kernel, stride=kernel)
    rank = len(spatial)
    for k, (n, m) in enumerate(zip(spatial, sizes, strict=True)):
        pieces = _bounds(n, m)
        longest = max(b - a for a, b in pieces)  # shorter windows repeat their last element
        indices = np.array([min(a + j, b - 1) for a, b in pieces for j in range(longest)], np.int32)
        kernel = tuple(longest if i == k else 1 for i in range(rank))
        x = max_pool(take(x, indices, axis=2 + k), kernel=kernel, stride=kernel)
    return x


@composite(samples=[sample((2, 3, 4)), sample((1, 2, 3, 3), label="2d")])
def global_avg_pool(x):
    """Mean over all spatial axes, which have size 1 in the result."""
    _spatial([TensorType(as_dtype(x.dtype), tuple(x.shape))])
    return operation("mean")(x, axis=tuple(range(2, len(x.shape))), keepdims=True)


@composite(samples=[sample((2, 3, 4)), sample((1, 2, 3, 3), label="2d")])
def global_max_pool(x):
    """Maximum over all spatial axes, which have size 1 in the result; equal maxima split the cotangent evenly."""
    _spatial([TensorType(as_dtype(x.dtype), tuple(x.shape))])
    return operation("max")(x, axis=tuple(range(2, len(x.shape))), keepdims=True)


__all__ = [
    "adaptive_avg_pool",
    "adaptive_max_pool",
    "avg_pool",
    "avg_pool_grad",
    "global_avg_pool",
    "global_max_pool",
    "max_pool",
    "max_pool_grad",
    "max_pool_positions",
]
