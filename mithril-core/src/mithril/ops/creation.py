"""Arrays created from a shape, triangular masks, and sizes as values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from mithril.graph import (
    Axis,
    DType,
    DTypeError,
    OperationError,
    Shape,
    ShapeError,
    Size,
    always,
    composite,
    float32,
    int32,
    is_static,
    like,
    normalize_axis,
    number,
    op,
    operation,
    sample,
    shape_text,
)
from mithril.ops.shape import stack


def _creation_shape(*, shape: Shape, **_: Any) -> Shape:
    for d in shape:
        if type(d) is int and d < 0:
            raise ShapeError(f"a shape cannot contain {d}", facts=[f"got {shape_text(shape)}"])
    return shape


def _fill_dtype(_: Any, attributes: Mapping[str, Any]) -> DType:
    kind: DType = attributes["dtype"]
    value = attributes["value"]
    if kind.is_integer:
        low, high = kind.limits
        if not math.isfinite(value) or int(value) != value or not low <= value <= high:
            raise DTypeError(f"{value!r} is not a valid {kind}", facts=[f"accepted: integers from {low} to {high}"])
    return kind


def _fill_value(_: Any, attributes: dict[str, Any]) -> dict[str, Any]:
    """Convert the value to the kind of the dtype, so that generated programs contain integers and bools."""
    value = attributes["value"]
    if attributes["dtype"].is_integer and isinstance(value, float) and value.is_integer():
        attributes["value"] = int(value)
    elif attributes["dtype"].is_bool:
        attributes["value"] = bool(value)
    return attributes


@op(
    shape=_creation_shape,
    dtype=_fill_dtype,
    canonical=_fill_value,
    samples=[
        sample(shape=(2, 3), value=1.5),
        sample(shape=(), value=7, dtype="int32", label="scalar"),
        sample(shape=(2,), value=7.0, dtype="int32", label="integral"),
    ],
    axes="-> *s | shape=result",
    moves=True,
)
def full(*, shape: Shape, value: number, dtype: DType = float32):
    """An array filled with one number."""
    return np.full(shape, value, dtype.numpy)


full.no_vjp("it has no operands")


def _iota_shape(*, shape: Shape, axis: int, dtype: DType) -> Shape:
    if not 0 <= axis < len(shape):
        raise ShapeError(f"iota has no axis {axis}: its shape is {shape_text(shape)}")
    return _creation_shape(shape=shape)


def _iota_form(types: Any, attributes: dict[str, Any]) -> dict[str, Any]:
    attributes["axis"] = normalize_axis(attributes["axis"], len(attributes["shape"]))
    return attributes


def _iota_dtype(dtypes: Any, attributes: Mapping[str, Any]) -> DType:
    kind: DType = attributes["dtype"]
    if kind.is_bool:
        raise DTypeError("iota does not support bool", facts=["accepted: integers and floats"])
    return kind


@op(
    shape=_iota_shape,
    dtype=_iota_dtype,
    canonical=_iota_form,
    samples=[sample(shape=(5,)), sample(shape=(2, 3), axis=-1, dtype="float32", label="axis")],
    axes="-> *s | s[axis] count, shape=result",
)
def iota(*, shape: Shape, axis: int = 0, dtype: DType = int32):
    """0, 1, 2, ... along an axis, broadcast along the others."""
    line = np.arange(int(shape[axis])).astype(dtype.numpy)
    return np.broadcast_to(line.reshape([-1 if k == axis else 1 for k in range(len(shape))]), tuple(map(int, shape)))


iota.no_vjp("it has no operands")


def _matrix(x: Shape, *, k: int) -> Shape:
    if len(x) < 2:
        raise ShapeError(f"tril and triu require a matrix, got rank {len(x)}", facts=["accepted: rank 2 or more"])
    return x


def _triangle(x: np.ndarray[Any, Any], k: int, *, lower: bool) -> np.ndarray[Any, Any]:
    mask = np.tri(x.shape[-2], x.shape[-1], k if lower else k - 1, dtype=bool)
    return np.where(mask if lower else ~mask, x, np.zeros((), x.dtype))


@op(
    shape=_matrix,
    dtype=like,
    samples=[sample((3, 4)), sample((2, 3, 3), k=-1, label="batch")],
    axes="... m n -> ... m n | m n whole",
    moves=True,
    linear="x",
)
def tril(x, *, k: int = 0):
    """The lower triangle of the last two axes, up to diagonal ``k``; zero above."""
    return _triangle(x, k, lower=True)


@tril.vjp
def _(g, y, x, *, k):
    return (tril(g, k=k),)


@op(
    shape=_matrix,
    dtype=like,
    samples=[sample((3, 4)), sample((2, 3, 3), k=1, label="batch")],
    axes="... m n -> ... m n | m n whole",
    moves=True,
    linear="x",
)
def triu(x, *, k: int = 0):
    """The upper triangle of the last two axes, from diagonal ``k``; zero below."""
    return _triangle(x, k, lower=False)


@triu.vjp
def _(g, y, x, *, k):
    return (triu(g, k=k),)


@composite(samples=[sample(n=3), sample(n=2, m=4, k=1, dtype="int32", label="shifted")])
def eye(*, n: Size, m: Size | None = None, k: int = 0, dtype: DType = float32):
    """Ones on diagonal ``k`` of an n by m matrix (default: n by n), zeros elsewhere."""
    shape = (n, n if m is None else m)
    row, column = iota(shape=shape, axis=0), iota(shape=shape, axis=1)
    return operation("cast")(operation("equal")(row + k if k else row, column), dtype=dtype)


@composite(samples=[sample(shape=(2, 3)), sample(shape=(), dtype="int32", label="scalar")])
def zeros(*, shape: Shape, dtype: DType = float32):
    """An array of zeros."""
    return full(shape=shape, value=0, dtype=dtype)


@composite(samples=[sample(shape=(2, 3)), sample(shape=(2,), dtype="bool", label="bool")])
def ones(*, shape: Shape, dtype: DType = float32):
    """An array of ones."""
    return full(shape=shape, value=1, dtype=dtype)


@composite(samples=[sample((2, 3))])
def zeros_like(x):
    """Zeros of the shape and dtype of x."""
    return full(shape=x.shape, value=0, dtype=x.dtype)


@composite(samples=[sample((2, 3))])
def ones_like(x):
    """Ones of the shape and dtype of x."""
    return full(shape=x.shape, value=1, dtype=x.dtype)


@composite(samples=[sample(start=2, stop=9, step=3), sample(start=0.5, stop=2.0, step=0.5, label="floats")])
def arange(*, start: number | None = None, stop: number | None = None, step: number = 1, dtype: DType | None = None):
    """Numbers from ``start``, in steps of ``step``, before ``stop``: int32 if all three are integers, else float32.

    A single bound is the stop, as in NumPy: ``arange(5)`` starts at 0.
    """
    if stop is None:
        start, stop = None, start
    if stop is None:
        raise OperationError("arange needs a bound", hint="arange(5), or arange(2, 5)")
    start = 0 if start is None else start
    is_whole = all(isinstance(n, int) for n in (start, stop, step))
    if not step:
        raise ShapeError("arange with step=0 has no end", hint="pass a positive or negative step")
    kind = dtype if dtype is not None else int32 if is_whole else float32
    count = max(0, math.ceil((stop - start) / step))
    steps = operation("cast")(iota(shape=(count,), axis=0, dtype=int32), dtype=kind)
    return (steps * step if step != 1 else steps) + start if start or step != 1 else steps


@composite(samples=[sample(start=-1.0, stop=2.0, num=4), sample(start=0.0, stop=1.0, num=1, label="one")])
def linspace(*, start: number, stop: number, num: int, dtype: DType = float32):
    """``num`` numbers from ``start`` to ``stop``, both included, at equal distances."""
    if num < 1:
        raise ShapeError(f"linspace needs at least one number, got num={num}")
    steps = operation("cast")(iota(shape=(num,), axis=0, dtype=int32), dtype=dtype)
    # From both ends, so that the first and the last number are exact.
    share = steps / float(max(num - 1, 1))
    return (1.0 - share) * float(start) + share * float(stop)


# -- shapes as values ---------------------------------------------------------------------------------------------
@op(shape=lambda *, value: (), dtype=always(int32), samples=[sample(value=3)], axes="->")
def size_value(*, value: Size):
    """A size as an int32 scalar, computed at run time if it is symbolic."""
    return np.asarray(value, np.int32)


size_value.no_vjp("it has no operands")


@composite(samples=[sample((2, 3)), sample((), label="scalar")])
def shape_of(x):
    """The sizes as an int32 vector."""
    if is_static(x.shape):
        return np.asarray(x.shape, np.int32)
    return stack(*[size_value(value=d) for d in x.shape])


@composite(samples=[sample((2, 3), axis=1)])
def size_of(x, *, axis: Axis):
    """The size of one axis as an int32 scalar."""
    return size_value(value=x.shape[axis])


__all__ = [
    "arange",
    "eye",
    "full",
    "iota",
    "linspace",
    "ones",
    "ones_like",
    "shape_of",
    "size_of",
    "size_value",
    "tril",
    "triu",
    "zeros",
    "zeros_like",
]
