"""Shape operations: reshape, transpose, broadcast, concatenate, flip, repeat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mithril.graph import (
    Axes,
    Axis,
    Dim,
    Ints,
    Shape,
    ShapeError,
    Size,
    TensorType,
    assume,
    composite,
    equal,
    expect_equal,
    floordiv,
    like,
    normalize_axis,
    op,
    operation,
    product,
    same_shape,
    sample,
    shape_text,
)
from mithril.ops.layout_axes import reshape_axes
from mithril.ops.slicing import narrow


# -- reshape, transpose, broadcast --------------------------------------------------------------------------------
def _reshape_form(types: Sequence[TensorType | None], attributes: dict[str, Any]) -> dict[str, Any]:
    shape: Shape = attributes["shape"]
    unknown = [k for k, d in enumerate(shape) if type(d) is int and d == -1]
    if not unknown or types[0] is None:
        return attributes
    if len(unknown) > 1:
        raise ShapeError(f"a shape can contain only one -1, got {shape_text(shape)}")
    total = product(types[0].shape)
    rest = product(d for k, d in enumerate(shape) if k != unknown[0])
    if rest == 0:
        raise ShapeError(
            f"cannot infer the -1 in {shape_text(shape)}: another size is 0", hint="replace -1 by the size"
        )
    if type(total) is int and type(rest) is int and total % rest:
        raise ShapeError(
            f"cannot reshape {shape_text(types[0].shape)} to {shape_text(shape)}",
            facts=[f"{total} elements are not a multiple of {rest}"],
        )
    attributes["shape"] = tuple(floordiv(total, rest) if k == unknown[0] else d for k, d in enumerate(shape))
    return attributes


def _reshape_shape(x: Shape, *, shape: Shape) -> Shape:
    for d in shape:
        if type(d) is int and d < 0:
            raise ShapeError(
                f"a shape cannot contain {d}", facts=[f"got {shape_text(shape)}"], hint="use -1 for one size to infer"
            )
    total = product(x)
    for k, d in enumerate(shape):
        rest = product(shape[:k] + shape[k + 1 :])
        if isinstance(d, Dim) and rest != 0 and d == floordiv(total, rest) and equal(total, d * rest) is not True:
            assume(rest, "divides", total, "a reshape keeps the number of elements")
            return shape
    left, right = _without_common(x, shape)
    if not assume(product(left), "==", product(right), "a reshape keeps the number of elements"):
        raise ShapeError(
            f"cannot reshape {shape_text(x)} to {shape_text(shape)}",
            facts=[f"{total} elements cannot fill {product(shape)}"],
        )
    return shape


def _without_common(a: Shape, b: Shape) -> tuple[Shape, Shape]:
    """Remove the symbolic sizes common to both shapes; the products of the remaining sizes must be equal."""
    left, right = list(a), list(b)
    for size in a:
        if isinstance(size, Dim) and size in right:
            left.remove(size)
            right.remove(size)
    return tuple(left), tuple(right)


@op(
    shape=_reshape_shape,
    dtype=like,
    canonical=_reshape_form,
    samples=[
        sample((2, 6), shape=(3, -1)),
        sample((2, 3), shape=(6,), label="flat"),
        sample((1, 1), shape=(), label="scalar"),
        sample((0, 3), shape=(3, 0), label="empty"),
    ],
    axes=reshape_axes,
    moves=True,
    linear="x",
)
def reshape(x, *, shape: Shape):
    """The same elements in row-major order with another shape; one size can be -1 and is inferred."""
    return np.reshape(x, shape)


@reshape.vjp
def _(g, y, x, *, shape):
    return (reshape(g, shape=x.shape),)


@reshape.vmap
def _(rows, has_rows, x, *, shape):
    return reshape(x, shape=(rows, *shape))


def _transpose_form(types: Sequence[TensorType | None], attributes: dict[str, Any]) -> dict[str, Any]:
    if types[0] is None:
        return attributes
    rank, perm = types[0].rank, attributes["perm"]
    if perm is None:
        perm = tuple(reversed(range(rank)))
    axes = tuple(normalize_axis(p, rank) for p in perm)
    if sorted(axes) != list(range(rank)):
        raise ShapeError(
            f"{list(perm)} is not a permutation of the axes of rank {rank}",
            facts=[f"accepted: each of 0 to {rank - 1} once" if rank else "accepted: (), as the operand is a scalar"],
        )
    attributes["perm"] = axes
    return attributes


@op(
    shape=lambda x, *, perm: tuple(x[p] for p in perm),
    dtype=like,
    canonical=_transpose_form,
    samples=[sample((2, 3)), sample((2, 3, 4), perm=(1, 2, 0), label="perm"), sample((), label="scalar")],
    axes="*x -> x[perm]",
    moves=True,
    linear="x",
)
def transpose(x, *, perm: Ints | None = None):
    """Axes permuted: axis k of the result is axis ``perm[k]`` of x; the default reverses the axes."""
    return np.transpose(x, perm)


@transpose.vjp
def _(g, y, x, *, perm):
    inverse = [0] * len(perm)
    for k, p in enumerate(perm):
        inverse[p] = k
    return (transpose(g, perm=tuple(inverse)),)


def _broadcast_shape(x: Shape, *, shape: Shape) -> Shape:
    lead = len(shape) - len(x)
    fits = lead >= 0
    for n, size in zip(x, shape[max(lead, 0) :], strict=False):
        fits = fits and (n == 1 or assume(n, "==", size, "an array is broadcast to a shape"))
    if not fits:
        raise ShapeError(
            f"cannot broadcast {shape_text(x)} to {shape_text(shape)}",
            facts=["accepted: trailing sizes equal, or 1 in the operand"],
        )
    return shape


@op(
    shape=_broadcast_shape,
    dtype=like,
    samples=[
        sample((3, 1), shape=(2, 3, 4)),
        sample((), shape=(2, 2), label="scalar"),
        sample((3,), shape=(0, 3), label="empty"),
    ],
    axes="... -> ... | shape=result",
    moves=True,
    linear="x",
)
def broadcast_to(x, *, shape: Shape):
    """x repeated along axes of size 1 and new leading axes to match the shape."""
    return np.broadcast_to(x, tuple(map(int, shape)))


@broadcast_to.vjp
def _(g, y, x, *, shape):
    lead = len(shape) - x.ndim
    axes = tuple(k for k in range(len(shape)) if k < lead or (x.shape[k - lead] == 1 and shape[k] != 1))
    if axes:
        g = operation("sum")(g, axis=axes)
    return (g if g.shape == x.shape else reshape(g, shape=x.shape),)


def spread(x: Any, rows: Size) -> Any:
    """Broadcast x along a new first axis of size ``rows``."""
    return broadcast_to(x, shape=(rows, *x.shape))


# -- concatenation, reversal, repetition --------------------------------------------------------------------------
def _concat_shape(*xs: Shape, axis: int) -> Shape:
    if not xs:
        raise ShapeError("concat requires at least one operand")
    first = list(xs[0])
    for k, x in enumerate(xs[1:], 1):
        if len(x) != len(first):
            raise ShapeError(f"concat: operand {k} has rank {len(x)}, the first has rank {len(first)}")
        for a, size in enumerate(x):
            if a != axis:
                first[a] = expect_equal(f"concat along axis {axis}: axis {a} of operands 0 and {k}", first[a], size)
    total: Size = 0
    for x in xs:
        total = total + x[axis]
    first[axis] = total
    return tuple(first)


@op(
    shape=_concat_shape,
    dtype=like,
    promotes="same",
    samples=[
        sample((2, 3), (1, 3)),
        sample((2, 1), (2, 2), (2, 3), axis=-1, label="three"),
        sample((0, 3), (2, 3), label="empty"),
    ],
    axes="*i c@axis *j -> *i c@axis *j | c whole",
    moves=True,
    linear="xs",
)
def concat(*xs, axis: Axis = 0):
    """Operands concatenated along an axis; their other sizes must be equal."""
    return np.concatenate(xs, axis)


@concat.vjp
def _(g, y, *xs, axis):
    parts, start = [], 0
    for x in xs:
        parts.append(narrow(g, axis, start, start + x.shape[axis]) if x.dtype.is_float else None)
        start = start + x.shape[axis]
    return tuple(parts)


@op(
    shape=same_shape,
    dtype=like,
    samples=[sample((2, 3), axis=None), sample((2, 3, 2), axis=(0, -1), label="two")],
    axes="*x -> *x | x[axis] whole",
    moves=True,
    linear="x",
)
def flip(x, *, axis: Axes):
    """Elements in reverse order along axes; None means all axes."""
    return np.flip(x, axis)


@flip.vjp
def _(g, y, x, *, axis):
    return (flip(g, axis=axis),)


@composite(samples=[sample((2, 1, 3, 1)), sample((1, 2, 1), axis=(-1,), label="axis")])
def squeeze(x, *, axis: Ints | None = None):
    """x without axes of size 1: those in ``axis``, or by default all whose static size is 1."""
    if axis is None:
        removed = {k for k, d in enumerate(x.shape) if d == 1}
    else:
        removed = {normalize_axis(a, x.ndim) for a in axis}
        for k in removed:
            if equal(x.shape[k], 1) is False:
                raise ShapeError(f"cannot squeeze axis {k}: its size is {x.shape[k]}, not 1")
    return reshape(x, shape=tuple(d for k, d in enumerate(x.shape) if k not in removed))


@composite(samples=[sample((2, 3), axis=(0,)), sample((2, 3), axis=(1, -1), label="two")])
def unsqueeze(x, *, axis: Ints):
    """x with new axes of size 1; ``axis`` lists their positions in the result."""
    rank = x.ndim + len(axis)
    new = {normalize_axis(a, rank) for a in axis}
    if len(new) != len(axis):
        raise ShapeError(f"duplicate axis in {tuple(axis)}")
    old = iter(x.shape)
    return reshape(x, shape=tuple(1 if k in new else next(old) for k in range(rank)))


@composite(samples=[sample((2, 3), (2, 3)), sample((3,), (3,), (3,), axis=-1, label="last")])
def stack(*xs, axis: int = 0):
    """Operands of equal shape, stacked along a new axis."""
    if not xs:
        raise ShapeError("stack requires at least one operand")
    position = normalize_axis(axis, xs[0].ndim + 1)
    for k, x in enumerate(xs[1:], 1):
        if x.ndim != xs[0].ndim:
            raise ShapeError(f"stack: operand {k} has shape {shape_text(x.shape)}, the first {shape_text(xs[0].shape)}")
    return concat(*[unsqueeze(x, axis=(position,)) for x in xs], axis=position)


@composite(samples=[sample((2, 3), repeats=(2, 1)), sample((3,), repeats=(2, 3), label="more")])
def tile(x, *, repeats: Ints):
    """The array repeated along each axis; additional entries of ``repeats`` add leading axes."""
    for count in repeats:
        if count < 0:
            raise ShapeError(f"tile: repeats must be at least 0, got {count}", facts=[f"repeats {list(repeats)}"])
    rank = max(len(repeats), x.ndim)
    counts = (1,) * (rank - len(repeats)) + tuple(repeats)
    sizes = (1,) * (rank - x.ndim) + tuple(x.shape)
    if all(c == 1 for c in counts):
        return x if rank == x.ndim else reshape(x, shape=sizes)
    inner = [(1, d) for d in sizes]
    y = reshape(x, shape=tuple(d for pair in inner for d in pair))
    y = broadcast_to(y, shape=tuple(d for c, n in zip(counts, sizes, strict=True) for d in (c, n)))
    return reshape(y, shape=tuple(c * n for c, n in zip(counts, sizes, strict=True)))


@composite(samples=[sample((2, 3), repeats=2, axis=-1), sample((3,), repeats=3, axis=0, label="vector")])
def repeat(x, *, repeats: int, axis: Axis):
    """Each element repeated ``repeats`` times along an axis."""
    if repeats < 0:
        raise ShapeError(f"repeat: repeats must be at least 0, got {repeats}")
    before, size, after = x.shape[:axis], x.shape[axis], x.shape[axis + 1 :]
    y = broadcast_to(reshape(x, shape=(*before, size, 1, *after)), shape=(*before, size, repeats, *after))
    return reshape(y, shape=(*before, size * repeats, *after))


__all__ = [  # noqa: PLE0604
    *("broadcast_to", "concat", "eye", "flip", "full", "iota", "repeat", "reshape", "shape_of"),
    *("size_of", "size_value", "squeeze", "stack", "tile", "transpose", "tril", "triu", "unsqueeze"),
]
