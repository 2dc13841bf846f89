"""Convolution over one, two or three spatial axes, and its two gradients as operations.

Convolution is linear in the image and in the kernel, so gradients of any order use the same three primitives. Images
are ``[batch, channels, *spatial]``, kernels ``[out channels, in channels / groups, *spatial]``. A single stride or
dilation, or a single pair for padding, applies to all spatial axes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import product as every
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from mithril.graph import (
    Ints,
    OperationError,
    Pairs,
    Shape,
    ShapeError,
    Size,
    TensorType,
    assume,
    at_most,
    composite,
    equal,
    floordiv,
    numeric,
    op,
    product,
    sample,
    shape_text,
)
from mithril.ops.basic import to_float32

Array = np.ndarray[Any, Any]


# -- attributes and shapes, shared with pooling --------------------------------------------------------------------
def per_axis(attributes: dict[str, Any], names: Sequence[str], rank: int) -> dict[str, Any]:
    """Repeat attributes with one entry for each of ``rank`` spatial axes, and check them."""
    for name in names:
        value = attributes[name]
        if len(value) == 1:
            attributes[name] = value = value * rank
        if len(value) != rank:
            raise ShapeError(
                f"'{name}' has {len(value)} entries for {rank} spatial axes",
                facts=[f"got {value}", f"accepted: 1 or {rank}"],
            )
        minimum = 0 if name in ("padding", "output_padding") else 1
        numbers = [n for pair in value for n in pair] if name == "padding" else value
        if any(at_most(minimum, n) is False for n in numbers):
            raise ShapeError(f"'{name}' must be at least {minimum} for all axes, got {value}")
    return attributes


def windows_fit(axis: int, size: Size, kernel: Size, stride: int, padding: tuple[Size, Size], dilation: int) -> Size:
    """Return the number of windows along an axis; raise ShapeError if the window is larger than the padded axis."""
    reach = (kernel - 1) * dilation + 1
    padded = size + padding[0] + padding[1]
    if not assume(reach, "<=", padded, f"a window fits spatial axis {axis}"):
        raise ShapeError(
            f"a window of {reach} does not fit spatial axis {axis} of size {padded}",
            facts=[
                f"size {size} with padding {padding[0]} and {padding[1]}",
                f"kernel {kernel}" + (f" with dilation {dilation}" if dilation != 1 else ""),
            ],
            hint="increase the padding, or use a smaller kernel",
        )
    return floordiv(padded - reach, stride) + 1


def _conv_form(types: Sequence[TensorType | None], attributes: dict[str, Any]) -> dict[str, Any]:
    rank = types[0].rank - 2 if types[0] is not None else 0
    if rank not in (1, 2, 3):
        raise ShapeError(
            f"a convolution requires 1, 2 or 3 spatial axes, but the operand has rank {rank + 2}",
            facts=["accepted: [batch, channels, *spatial] of rank 3, 4 or 5"],
        )
    if attributes["groups"] < 1:
        raise OperationError(f"'groups' must be at least 1, got {attributes['groups']}")
    return per_axis(attributes, ("stride", "padding", "dilation"), rank)


def conv_shape(x: Shape, w: Shape, *, stride: Ints, padding: Pairs, dilation: Ints, groups: int) -> Shape:
    """Return the shape of the result; raise ShapeError if image, kernel and groups do not match."""
    if len(w) != len(x):
        raise ShapeError(f"the kernel {shape_text(w)} has rank {len(w)}, the image {shape_text(x)} has rank {len(x)}")
    out_channels, per_group = w[0], w[1]
    if not assume(per_group * groups, "==", x[1], "kernel and image have the same number of channels"):
        is_divisible = x[1] % groups == 0
        raise ShapeError(
            f"the image has {x[1]} channels, the kernel takes {per_group} in each of {groups} groups",
            facts=[f"accepted: a kernel [out channels, {floordiv(x[1], groups)}, ...]"] if is_divisible else [],
            hint=None if is_divisible else f"groups must divide the {x[1]} channels of the image",
        )
    if not assume(groups, "divides", out_channels, "groups divide the output channels"):
        raise ShapeError(
            f"{groups} groups do not divide the {out_channels} output channels",
            hint="use a number of groups that divides them",
        )
    rows = zip(x[2:], w[2:], stride, padding, dilation, strict=True)
    return (x[0], out_channels, *(windows_fit(k, *row) for k, row in enumerate(rows)))


def _input_grad_shape(g: Shape, w: Shape, *, shape: Shape, **attributes: Any) -> Shape:
    _expect(g, "cotangent", conv_shape(shape, w, **attributes))
    return shape


def _weight_grad_shape(x: Shape, g: Shape, *, shape: Shape, **attributes: Any) -> Shape:
    _expect(g, "cotangent", conv_shape(x, shape, **attributes))
    return shape


def _expect(actual: Shape, name: str, expected: Shape) -> None:
    if len(actual) != len(expected) or not all(
        assume(a, "==", b, f"the {name} has the shape of the result") for a, b in zip(actual, expected, strict=True)
    ):
        raise ShapeError(f"the {name} has shape {shape_text(actual)}, expected {shape_text(expected)}")


def _cost(image: int, kernel: int) -> Any:
    """Return a flop count: two per multiplication; ``image`` and ``kernel`` are operand indices, or -1: the result."""

    def flops(types: Sequence[Any], results: Sequence[TensorType], attributes: Mapping[str, Any]) -> Size:
        output = results[0] if image < 0 else types[image]
        weights = results[0] if kernel < 0 else types[kernel]
        return product(output.shape) * product(weights.shape[1:]) * 2

    return flops


# -- the reference: im2col and a matrix product -------------------------------------------------------------------
def windows(x: Array, kernel: Ints, stride: Ints, padding: Any, dilation: Ints, fill: Any = 0) -> Array:
    """Return a view of the padded image: ``[batch, channels, *windows, *kernel]``."""
    rank = len(kernel)
    if any(a or b for a, b in padding):
        x = np.pad(x, ((0, 0), (0, 0), *padding), constant_values=fill)
    reach = tuple((k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True))
    view = sliding_window_view(x, reach, axis=tuple(range(2, 2 + rank)))
    steps = (
        slice(None),
        slice(None),
        *(slice(None, None, s) for s in stride),
        *(slice(None, None, d) for d in dilation),
    )
    return view[steps]


def tap_slices(
    shape: Sequence[int], kernel: Ints, stride: Ints, dilation: Ints
) -> Iterator[tuple[tuple[int, ...], Any]]:
    """Yield the index of each kernel element and the slices of the padded image that it is multiplied with."""
    for index in every(*map(range, kernel)):
        steps = zip(index, shape, stride, dilation, strict=True)
        yield index, (..., *(slice(k * d, k * d + (n - 1) * s + 1, s) for k, n, s, d in steps))


def unpad(x: Array, padding: Any) -> Array:
    """Return the image without its padding."""
    interior = [slice(a, n - b) for n, (a, b) in zip(x.shape[2:], padding, strict=True)]
    return x[(slice(None), slice(None), *interior)]


def _columns(x: Array, kernel: Any, stride: Ints, padding: Any, dilation: Ints, groups: int) -> Array:
    """Return the im2col matrix: ``[groups, batch * windows, channels / groups * kernel]``."""
    view = windows(x, kernel, stride, padding, dilation)
    n, channels, rank = view.shape[0], view.shape[1], len(kernel)
    split = view.reshape(n, groups, channels // groups, *view.shape[2:])
    order = (1, 0, *range(3, 3 + rank), 2, *range(3 + rank, 3 + 2 * rank))
    rows = n * math.prod(view.shape[2 : 2 + rank])
    return split.transpose(order).reshape(groups, rows, channels // groups * math.prod(kernel))


def _by_group(g: Array, groups: int) -> Array:
    """Reshape an array of the result's shape to ``[groups, batch * windows, channels / groups]``."""
    n, channels, count = g.shape[0], g.shape[1], math.prod(g.shape[2:])
    split = g.reshape(n, groups, channels // groups, count)
    return split.transpose(1, 0, 3, 2).reshape(groups, n * count, channels // groups)


def _kernels(w: Array, groups: int) -> Array:
    """Return the kernel as matrices: ``[groups, out channels / groups, channels / groups * kernel]``."""
    return to_float32(w).reshape(groups, w.shape[0] // groups, math.prod(w.shape[1:]))


UNEVEN: dict[str, Any] = {"stride": (2, 1), "padding": ((1, 2), (0, 1)), "dilation": (1, 2), "groups": 2}
SAMPLES: dict[str, tuple[Shape, Shape, dict[str, Any]]] = {
    "": ((2, 3, 8), (4, 3, 3), {"stride": (2,), "padding": ((1, 1),)}),
    "2d": ((2, 4, 7, 6), (6, 2, 3, 2), UNEVEN),
    "depthwise": ((1, 3, 5, 5), (3, 1, 3, 3), {"padding": ((1, 1), (1, 1)), "groups": 3}),
    "3d": ((1, 2, 4, 3, 5), (2, 2, 2, 1, 3), {"stride": (1, 1, 2)}),
}


@op(
    shape=conv_shape,
    dtype=numeric,
    canonical=_conv_form,
    promotes="same",
    flops=_cost(-1, 1),
    tolerance=4,
    samples=[sample(x, w, label=label, **attributes) for label, (x, w, attributes) in SAMPLES.items()],
    axes="n (g:groups c) *h, (g o) c *k -> n (g o) *p | c sum, h window, k p whole",
    linear="x | w",
)
def conv(x, w, *, stride: Ints = (1,), padding: Pairs = ((0, 0),), dilation: Ints = (1,), groups: int = 1):
    """Convolution of ``x [batch, channels, *spatial]`` with ``w [out, channels / groups, *kernel]``.

    The kernel is not flipped. 16-bit floats accumulate in float32.
    """
    shape = conv_shape(x.shape, w.shape, stride=stride, padding=padding, dilation=dilation, groups=groups)
    columns = _columns(to_float32(x), w.shape[2:], stride, padding, dilation, groups)
    kernels = _kernels(w, groups)
    out = np.matmul(columns, kernels.transpose(0, 2, 1))  # [groups, batch * windows, out / groups]
    out = out.reshape(groups, x.shape[0], math.prod(shape[2:]), w.shape[0] // groups).transpose(1, 0, 3, 2)
    return out.reshape(shape).astype(x.dtype)


@conv.vjp
def _(g, y, x, w, **attributes):
    return (
        conv_input_grad(g, w, shape=x.shape, **attributes),
        conv_weight_grad(x, g, shape=w.shape, **attributes),
    )


def _result(x: Shape, w: Shape, attributes: Mapping[str, Any]) -> Shape:
    """Return the shape of the result of a sample."""
    rank = len(x) - 2
    filled = {"stride": (1,) * rank, "padding": ((0, 0),) * rank, "dilation": (1,) * rank, "groups": 1, **attributes}
    return conv_shape(x, w, **filled)


@op(
    shape=_input_grad_shape,
    dtype=numeric,
    canonical=_conv_form,
    promotes="same",
    flops=_cost(0, 1),
    tolerance=4,
    samples=[sample(_result(x, w, a), w, label=label, shape=x, **a) for label, (x, w, a) in SAMPLES.items()],
    axes="n (g:groups o) *p, (g o) c *k -> n (g c) *h | o sum, h window, k p whole, shape=result",
    linear="g | w",
)
def conv_input_grad(
    g, w, *, shape: Shape, stride: Ints = (1,), padding: Pairs = ((0, 0),), dilation: Ints = (1,), groups: int = 1
):
    """Input gradient of ``conv`` for an image of the given shape; ``g`` is the cotangent of the result."""
    kernel = w.shape[2:]
    columns = np.matmul(_by_group(to_float32(g), groups), _kernels(w, groups))
    rank = len(kernel)
    columns = columns.reshape(groups, shape[0], *g.shape[2:], shape[1] // groups, *kernel)
    columns = columns.transpose(1, 0, 2 + rank, *range(2, 2 + rank), *range(3 + rank, 3 + 2 * rank))
    columns = columns.reshape(shape[0], shape[1], *g.shape[2:], *kernel)
    padded = np.zeros((*shape[:2], *(n + a + b for n, (a, b) in zip(shape[2:], padding, strict=True))), columns.dtype)
    for index, window in tap_slices(g.shape[2:], kernel, stride, dilation):
        padded[window] += columns[(..., *index)]
    return unpad(padded, padding).astype(g.dtype)


@conv_input_grad.vjp
def _(gg, y, g, w, *, shape, **attributes):
    return conv(gg, w, **attributes), conv_weight_grad(gg, g, shape=w.shape, **attributes)


@op(
    shape=_weight_grad_shape,
    dtype=numeric,
    canonical=_conv_form,
    promotes="same",
    flops=_cost(1, -1),
    tolerance=4,
    samples=[sample(x, _result(x, w, a), label=label, shape=w, **a) for label, (x, w, a) in SAMPLES.items()],
    axes="n (g:groups c) *h, n (g o) *p -> (g o) c *k | n sum, h window, k p whole, shape=result",
    linear="x | g",
)
def conv_weight_grad(
    x, g, *, shape: Shape, stride: Ints = (1,), padding: Pairs = ((0, 0),), dilation: Ints = (1,), groups: int = 1
):
    """Weight gradient of ``conv`` for a kernel of the given shape; ``g`` is the cotangent of the result."""
    columns = _columns(to_float32(x), shape[2:], stride, padding, dilation, groups)
    grad = np.matmul(_by_group(to_float32(g), groups).transpose(0, 2, 1), columns)
    return grad.reshape(shape).astype(x.dtype)


@conv_weight_grad.vjp
def _(gg, y, x, g, *, shape, **attributes):
    return conv_input_grad(g, gg, shape=x.shape, **attributes), conv(x, gg, **attributes)


# -- transposed ---------------------------------------------------------------------------------------------------
def _transpose_form(types: Sequence[TensorType | None], attributes: dict[str, Any]) -> dict[str, Any]:
    attributes = _conv_form(types, attributes)
    return per_axis(attributes, ("output_padding",), len(attributes["stride"]))


@composite(
    canonical=_transpose_form,
    promotes="same",
    flops=_cost(0, 1),
    tolerance=4,
    samples=[
        sample((2, 4, 5), (4, 3, 3), stride=(2,), padding=((1, 1),), output_padding=(1,)),
        sample((1, 4, 3, 4), (4, 2, 3, 2), label="2d", **UNEVEN, output_padding=(1, 0)),
    ],
    precision="low",
)
def conv_transpose(
    x,
    w,
    *,
    stride: Ints = (1,),
    padding: Pairs = ((0, 0),),
    output_padding: Ints = (0,),
    dilation: Ints = (1,),
    groups: int = 1,
):
    """Transposed convolution of ``x [batch, channels, *spatial]`` with ``w [channels, out / groups, *kernel]``.

    A convolution with the same attributes maps the result's shape to that of ``x``. With strides several sizes do;
    ``output_padding``, smaller than the stride, selects one of them.
    """
    if len(x.shape) != len(w.shape):
        raise ShapeError(f"the kernel has rank {len(w.shape)}, the image has rank {len(x.shape)}")
    if equal(x.shape[1], w.shape[0]) is False:
        raise ShapeError(
            f"the image has {x.shape[1]} channels, the kernel takes {w.shape[0]}",
            facts=[f"accepted: a kernel [{x.shape[1]}, out channels / groups, ...]"],
        )
    sizes = []
    for k, (extra, step, (before, after)) in enumerate(zip(output_padding, stride, padding, strict=True)):
        if extra >= step:
            raise ShapeError(f"output_padding {extra} of spatial axis {k} must be smaller than its stride {step}")
        reach = (w.shape[2 + k] - 1) * dilation[k] + 1
        size = (x.shape[2 + k] - 1) * step + reach - before - after + extra
        if at_most(1, size) is False:
            raise ShapeError(
                f"padding {before} and {after} is too large for spatial axis {k}", facts=[f"its size would be {size}"]
            )
        sizes.append(size)
    shape = (x.shape[0], w.shape[1] * groups, *sizes)
    return conv_input_grad(x, w, shape=shape, stride=stride, padding=padding, dilation=dilation, groups=groups)


__all__ = ["conv", "conv_input_grad", "conv_transpose", "conv_weight_grad"]
