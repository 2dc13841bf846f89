"""ATen operators that create, move and arrange elements."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mithril import ops
from mithril.graph import Dim, Op, UnsupportedError, is_static, product
from mithril_importing.arrays import as_value, broadcast, reshape
from mithril_torch.importing.table import ROWS, axis_of, cast, dtype_name, filled, is_tensor, known, line, row, sizes_of

END = 2**62  # ends of slices beyond this mean the end of the axis


# -- creation -----------------------------------------------------------------------------------------------------
@row("full")
def full(size: Any, value: Any, dtype: Any = None, like: Any = None) -> Any:
    return filled(size, value, like.dtype)


@row("full_like", "new_full", "fill.Scalar", "fill.Tensor")
def full_like(x: Any, *arguments: Any, dtype: Any = None, like: Any = None) -> Any:
    """Fill the shape of ``x``, or for ``new_full`` the first argument, with the last argument."""
    size = arguments[0] if len(arguments) > 1 else sizes_of(x)
    return filled(size, arguments[-1], like.dtype)


@row("zeros", "empty.memory_format", "new_zeros", "new_empty", "empty_strided", "empty_permuted", "new_empty_strided")
def zeros(*arguments: Any, dtype: Any = None, like: Any = None) -> Any:
    size = arguments[1] if arguments and is_tensor(arguments[0]) else arguments[0]
    return filled(size, 0, like.dtype)


@row("ones", "new_ones")
def ones(*arguments: Any, dtype: Any = None, like: Any = None) -> Any:
    size = arguments[1] if arguments and is_tensor(arguments[0]) else arguments[0]
    return filled(size, 1, like.dtype)


@row("zeros_like", "empty_like")
def zeros_like(x: Any, dtype: Any = None, like: Any = None) -> Any:
    return filled(sizes_of(x), 0, like.dtype)


@row("ones_like")
def ones_like(x: Any, dtype: Any = None, like: Any = None) -> Any:
    return filled(sizes_of(x), 1, like.dtype)


@row("scalar_tensor")
def scalar_tensor(value: Any, dtype: Any = None, like: Any = None) -> Any:
    return cast(value, like.dtype)


@row("arange.start_step", "arange.start", "arange")
def arange(*bounds: Any, dtype: Any = None, like: Any = None) -> Any:
    start, end, step = (0, bounds[0], 1) if len(bounds) == 1 else (*bounds, 1)[:3]
    if not any(isinstance(b, Dim) for b in bounds):
        return np.arange(start, end, step).astype(np.dtype(dtype_name(like.dtype)))
    if any(isinstance(b, float) for b in (start, end, step)):
        raise UnsupportedError(
            "arange of an open size and a float is not supported", hint="use integers, and scale them"
        )
    length = (end - start) if step == 1 else -((start - end) // step)
    steps = line(length, like.dtype)
    steps = steps if step == 1 else ops.mul(steps, step)
    return steps if isinstance(start, int) and start == 0 else ops.add(steps, cast(start, like.dtype))


@row("eye", "eye.m")
def eye(n: Any, m: Any = None, dtype: Any = None, like: Any = None) -> Any:
    return cast(ops.eye(n=n, m=m), like.dtype)


# -- shapes -------------------------------------------------------------------------------------------------------
@row("view", "reshape", "_unsafe_view", "_reshape_alias")
def view(x: Any, size: Any, *_: Any) -> Any:
    return reshape(x, size)


@row("view.dtype")
def view_dtype(x: Any, dtype: Any) -> Any:
    return cast(x, dtype) if dtype_name(dtype) == str(x.dtype) else ops.bitcast(x, dtype=dtype_name(dtype))


@row("expand")
def expand(x: Any, size: Any, implicit: bool = False) -> Any:
    sizes = (*[1] * (len(size) - len(x.shape)), *x.shape)
    return broadcast(x, [n if type(s) is int and s == -1 else s for n, s in zip(sizes, size, strict=True)])


@row("permute")
def permute(x: Any, dims: Any) -> Any:
    return ops.transpose(x, perm=tuple(axis_of(x, d) for d in dims)) if len(dims) else x


@row("transpose.int")
def transpose(x: Any, a: int, b: int) -> Any:
    perm = list(range(len(x.shape)))
    a, b = axis_of(x, a), axis_of(x, b)
    if perm:
        perm[a], perm[b] = perm[b], perm[a]
    return ops.transpose(x, perm=tuple(perm)) if perm else x


@row("t", "numpy_T")
def matrix_transpose(x: Any) -> Any:
    return ops.transpose(x) if len(x.shape) > 1 else x


@row("unsqueeze")
def unsqueeze(x: Any, dim: int) -> Any:
    axis = dim + len(x.shape) + 1 if dim < 0 else dim
    return reshape(x, (*x.shape[:axis], 1, *x.shape[axis:]))


@row("squeeze.dims", "squeeze.dim", "squeeze")
def squeeze(x: Any, dims: Any = None) -> Any:
    """Remove axes of size 1; a symbolic size counts as larger."""
    listed = range(len(x.shape)) if dims is None else [dims] if isinstance(dims, int) else dims
    removed = {axis_of(x, d) for d in listed if len(x.shape) and x.shape[axis_of(x, d)] == 1}
    return reshape(x, [n for k, n in enumerate(x.shape) if k not in removed])


@row("flatten.using_ints")
def flatten(x: Any, start: int = 0, end: int = -1) -> Any:
    if not len(x.shape):
        return reshape(x, (1,))
    first, last = axis_of(x, start), axis_of(x, end)
    return reshape(x, (*x.shape[:first], product(x.shape[first : last + 1]), *x.shape[last + 1 :]))


@row("unflatten.int")
def unflatten(x: Any, dim: int, sizes: Any) -> Any:
    axis = axis_of(x, dim)
    return reshape(x, (*x.shape[:axis], *sizes, *x.shape[axis + 1 :]))


@row("cat", "concat", "concatenate")
def cat(tensors: Any, dim: int = 0, like: Any = None) -> Any:
    parts = [cast(x, like.dtype) for x in tensors if sizes_of(x) != (0,) or len(like.shape) == 1]
    return ops.concat(*parts, axis=axis_of(parts[0], dim)) if len(parts) > 1 else parts[0]


@row("stack")
def stack(tensors: Any, dim: int = 0, like: Any = None) -> Any:
    return ops.stack(*(cast(x, like.dtype) for x in tensors), axis=dim)


@row("repeat")
def repeat(x: Any, repeats: Any) -> Any:
    x = reshape(x, (*[1] * (len(repeats) - len(x.shape)), *x.shape))
    for axis, count in enumerate(repeats):
        if not (type(count) is int and count == 1):
            if x.shape[axis] == 1:
                x = broadcast(x, (*x.shape[:axis], count, *x.shape[axis + 1 :]))
                continue
            repeated = broadcast(unsqueeze(x, axis), (*x.shape[:axis], count, *x.shape[axis:]))
            x = reshape(repeated, (*x.shape[:axis], count * x.shape[axis], *x.shape[axis + 1 :]))
    return x


@row("repeat_interleave.self_int")
def repeat_interleave(x: Any, repeats: int, dim: int | None = None, output_size: Any = None) -> Any:
    x = reshape(x, (-1,)) if dim is None else x
    return ops.repeat(x, repeats=repeats, axis=axis_of(x, dim or 0))


@row("flip")
def flip(x: Any, dims: Any) -> Any:
    return ops.flip(x, axis=tuple(axis_of(x, d) for d in dims)) if len(dims) else x


@row("roll")
def roll(x: Any, shifts: Any, dims: Any = ()) -> Any:
    shifts = [shifts] if isinstance(shifts, int) else list(shifts)
    if not len(dims if not isinstance(dims, int) else [dims]):
        return reshape(ops.roll(reshape(x, (-1,)), shift=tuple(shifts), axis=(0,)), x.shape)
    dims = [dims] if isinstance(dims, int) else list(dims)
    return ops.roll(x, shift=tuple(shifts), axis=tuple(axis_of(x, d) for d in dims))


@row("tril")
def tril(x: Any, diagonal: int = 0) -> Any:
    return _triangle(ops.tril, x, diagonal)


@row("triu")
def triu(x: Any, diagonal: int = 0) -> Any:
    return _triangle(ops.triu, x, diagonal)


def _triangle(op: Op, x: Any, diagonal: int) -> Any:
    if str(x.dtype) == "bool":
        return cast(op(cast(x, "int32"), k=diagonal), "bool")
    return op(x, k=diagonal)


@row("diagonal")
def diagonal(x: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    a, b = axis_of(x, dim1), axis_of(x, dim2)
    rest = [k for k in range(len(x.shape)) if k not in (a, b)]
    y = ops.transpose(x, perm=(a, b, *rest))
    places = _diagonal(y.shape[0], y.shape[1], offset)
    return ops.transpose(ops.gather_nd(y, places), perm=(*range(1, len(rest) + 1), 0))


def _diagonal(height: int, width: int, offset: int) -> Any:
    """Return the positions of a diagonal."""
    rows, columns = max(-offset, 0), max(offset, 0)
    count = max(min(height - rows, width - columns), 0)
    return np.stack([np.arange(count) + rows, np.arange(count) + columns], -1)


# -- parts --------------------------------------------------------------------------------------------------------
def part(x: Any, axis: int, start: Any, end: Any, step: int) -> Any:
    """Return a slice along one axis, with the ends of Python's slices."""
    start = None if start is None or (type(start) is int and start == 0) else start
    end = None if end is None or (type(end) is int and end >= END) else end
    if start is None and end is None and step == 1:
        return x
    index = [slice(None)] * len(x.shape)
    index[axis] = slice(start, end, step)
    if isinstance(start, Dim) or isinstance(end, Dim):
        x = as_value(x)
    return x[tuple(index)]


@row("slice.Tensor")
def slice_(x: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    return part(x, axis_of(x, dim), start, end, step)


@row("narrow")
def narrow(x: Any, dim: int, start: Any, length: Any) -> Any:
    axis = axis_of(x, dim)
    start = x.shape[axis] + start if isinstance(start, int) and start < 0 else start
    return part(x, axis, start, start + length, 1)


@row("select.int")
def select(x: Any, dim: int, index: Any) -> Any:
    axis = axis_of(x, dim)
    x = as_value(x) if isinstance(index, Dim) else x
    return x[(*[slice(None)] * axis, index)]


@row("unfold")
def unfold(x: Any, dim: int, size: int, step: int) -> Any:
    """Return windows along an axis, whose elements are the last axis."""
    if not len(x.shape):
        return reshape(x, (size,))
    axis = axis_of(x, dim)
    if not isinstance(x.shape[axis], int):
        raise UnsupportedError("windows along an open size are not supported", hint="leave it out of dynamic_shapes")
    starts = np.arange(0, x.shape[axis] - size + 1, step)
    y = ops.take(x, starts[:, None] + np.arange(size), axis=axis)
    rest = range(axis + 2, len(y.shape))
    return ops.transpose(y, perm=(*range(axis + 1), *rest, axis + 1))


@row("split_with_sizes")
def split_with_sizes(x: Any, sizes: Any, dim: int = 0) -> Any:
    return tuple(ops.split(as_value(x) if not is_static(tuple(sizes)) else x, sizes=tuple(sizes), axis=axis_of(x, dim)))


@row("split.Tensor")
def split(x: Any, size: int, dim: int = 0) -> Any:
    axis = axis_of(x, dim)
    count = math.ceil(x.shape[axis] / size)
    return tuple(part(x, axis, k * size, min((k + 1) * size, x.shape[axis]), 1) for k in range(count))


@row("unbind.int")
def unbind(x: Any, dim: int = 0) -> Any:
    axis = axis_of(x, dim)
    return tuple(x[(*[slice(None)] * axis, k)] for k in range(x.shape[axis]))


@row("slice_scatter")
def slice_scatter(x: Any, source: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    """Return ``x`` with a slice replaced."""
    axis, size = axis_of(x, dim), x.shape[axis_of(x, dim)]
    source = cast(source, dtype_of(x))
    if step == 1:
        first = 0 if start is None else start + size if isinstance(start, int) and start < 0 else start
        last = first + source.shape[axis]
        parts = [part(x, axis, 0, first, 1), source, part(x, axis, last, None, 1)]
        empty = [type(p.shape[axis]) is int and p.shape[axis] == 0 for p in parts]
        filled_parts = [p for p, none in zip(parts, empty, strict=True) if not none]
        return ops.concat(*filled_parts, axis=axis) if len(filled_parts) > 1 else filled_parts[0]
    rows = np.arange(size)[slice(start, None if end is None or end >= END else end, step)]
    return ops.scatter(x, rows, source, axis=axis)


@row("select_scatter")
def select_scatter(x: Any, source: Any, dim: int, index: Any) -> Any:
    axis = axis_of(x, dim)
    index = index + x.shape[axis] if isinstance(index, int) and index < 0 else index
    return slice_scatter(x, unsqueeze(source, axis), axis, index, index + 1)


def dtype_of(x: Any) -> str:
    return str(x.dtype)


# -- padding ------------------------------------------------------------------------------------------------------
@row("constant_pad_nd")
def constant_pad(x: Any, pad: Any, value: Any = 0) -> Any:
    return padded(x, pad, "constant", value)


@row("reflection_pad1d", "reflection_pad2d", "reflection_pad3d")
def reflection_pad(x: Any, pad: Any) -> Any:
    return padded(x, pad, "reflect", 0)


@row("replication_pad1d", "replication_pad2d", "replication_pad3d")
def replication_pad(x: Any, pad: Any) -> Any:
    return padded(x, pad, "edge", 0)


def padded(x: Any, pad: Any, mode: str, value: Any) -> Any:
    """Pad the last axes; PyTorch lists the last axis first, and negative widths cut."""
    rank = len(x.shape)
    widths = [(0, 0)] * rank
    for k in range(len(pad) // 2):
        widths[rank - 1 - k] = (pad[2 * k], pad[2 * k + 1])
    for axis, (before, after) in enumerate(widths):
        if (type(before) is int and before < 0) or (type(after) is int and after < 0):
            cut_start, cut_end = max(-before, 0), max(-after, 0)
            x = part(x, axis, cut_start, -cut_end if cut_end else None, 1)
    widths = [(max(a, 0) if type(a) is int else a, max(b, 0) if type(b) is int else b) for a, b in widths]
    if all(w == (0, 0) for w in widths):
        return x
    kind = dtype_of(x)
    if kind == "bool":
        return cast(ops.pad(cast(x, "int32"), widths=tuple(widths), mode=mode, value=int(value)), "bool")
    return ops.pad(x, widths=tuple(widths), mode=mode, value=value)


@row("pixel_shuffle")
def pixel_shuffle(x: Any, factor: int) -> Any:
    return ops.pixel_shuffle(x, factor=factor)


@row("pixel_unshuffle")
def pixel_unshuffle(x: Any, factor: int) -> Any:
    *lead, channels, height, width = x.shape
    rows, columns = height // factor, width // factor
    y = reshape(x, (*lead, channels, rows, factor, columns, factor))
    n = len(lead)
    y = ops.transpose(y, perm=(*range(n), n, n + 2, n + 4, n + 1, n + 3))
    return reshape(y, (*lead, channels * factor * factor, rows, columns))


@row("channel_shuffle", "native_channel_shuffle")
def channel_shuffle(x: Any, groups: int) -> Any:
    batch, channels, *spatial = x.shape
    y = reshape(x, (batch, groups, channels // groups, *spatial))
    return reshape(ops.transpose(y, perm=(0, 2, 1, *range(3, len(spatial) + 3))), x.shape)


# -- memory -------------------------------------------------------------------------------------------------------
def _strided_places(x: Any, operand: Any, size: Any, stride: Any, offset: int | None) -> Any:
    """Return positions in the flattened memory of a contiguous tensor."""
    if not all(isinstance(n, int) for n in (*size, *stride, *x.shape)):
        raise UnsupportedError("as_strided of an open size is not supported", hint="leave it out of dynamic_shapes")
    if not operand.is_contiguous() or operand.storage_offset():
        raise UnsupportedError(
            "as_strided of memory that is not contiguous has no meaning in a graph of values",
            hint="call x.contiguous() before it",
        )
    places = np.full(tuple(size), offset or 0, np.int64)
    for axis, (n, step) in enumerate(zip(size, stride, strict=True)):
        places += (np.arange(n) * step).reshape([-1 if k == axis else 1 for k in range(len(size))])
    return places


@row("as_strided", "as_strided_copy")
def as_strided(x: Any, size: Any, stride: Any, storage_offset: Any = None, operand: Any = None) -> Any:
    """Return elements of the memory of a contiguous tensor."""
    expected: list[Any] = []
    step: Any = 1
    for n in reversed(size):
        expected.insert(0, step)
        step = step * n
    if list(stride) == expected and storage_offset in (None, 0) and product(size) == product(x.shape):
        return reshape(x, size)
    places = _strided_places(x, operand, size, stride, storage_offset)
    return ops.take(reshape(x, (-1,)), places, axis=0) if places.size else filled(size, 0, operand.dtype)


@row("as_strided_scatter")
def as_strided_scatter(
    x: Any, source: Any, size: Any, stride: Any, storage_offset: Any = None, operand: Any = None
) -> Any:
    places = _strided_places(x, operand, size, stride, storage_offset)
    flat = ops.scatter(reshape(x, (-1,)), places.ravel(), reshape(source, (-1,)), axis=0)
    return reshape(flat, x.shape)


@row("resize")
def resize(x: Any, size: Any, memory_format: Any = None, like: Any = None) -> Any:
    """Return the first elements in this shape; new elements are zeros."""
    flat, count = reshape(x, (-1,)), product(size)
    missing = count - product(x.shape)
    if not isinstance(missing, int):
        raise UnsupportedError("resize of an open size is not supported", hint="use view or reshape")
    if missing > 0:
        flat = ops.concat(flat, filled((missing,), 0, like.dtype), axis=0)
    return reshape(flat[:count], size)


@row("triu_indices")
def triu_indices(rows: int, columns: int, offset: int = 0, dtype: Any = None, like: Any = None) -> Any:
    return np.stack(np.triu_indices(rows, offset, columns)).astype(dtype_name(like.dtype))


@row("tril_indices")
def tril_indices(rows: int, columns: int, offset: int = 0, dtype: Any = None, like: Any = None) -> Any:
    return np.stack(np.tril_indices(rows, offset, columns)).astype(dtype_name(like.dtype))


@row("diagonal_scatter")
def diagonal_scatter(x: Any, source: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    a, b = axis_of(x, dim1), axis_of(x, dim2)
    rest = [k for k in range(len(x.shape)) if k not in (a, b)]
    order = (a, b, *rest)
    y, places = ops.transpose(x, perm=order), _diagonal(x.shape[a], x.shape[b], offset)
    source = ops.transpose(source, perm=(len(rest), *range(len(rest))))
    y = ops.scatter_nd(y, places, source)
    return ops.transpose(y, perm=tuple(order.index(k) for k in range(len(order))))


@row("repeat_interleave.self_Tensor")
def repeat_by_counts(x: Any, repeats: Any, dim: int | None = None, output_size: Any = None) -> Any:
    x = reshape(x, (-1,)) if dim is None else x
    axis = axis_of(x, dim or 0)
    return ops.take(x, np.repeat(np.arange(x.shape[axis]), known(repeats, "repeat_interleave")), axis=axis)


@row("repeat_interleave.Tensor")
def interleaved_positions(repeats: Any, *, output_size: Any = None) -> Any:
    counts = known(repeats, "repeat_interleave")
    return np.repeat(np.arange(len(counts)), counts)


VIEWS = (
    *("alias", "detach", "diagonal", "expand", "narrow", "permute", "select.int", "slice.Tensor", "split.Tensor"),
    *("split_with_sizes", "squeeze", "squeeze.dim", "squeeze.dims", "t", "transpose.int", "unbind.int", "unfold"),
    *("unsqueeze", "view", "view.dtype"),
)


def enter_copies() -> None:
    """Enter the rows of views for the operators that copy them."""
    for name in VIEWS:
        packet, dot, overload = name.partition(".")
        ROWS[f"{packet}_copy{dot}{overload}"] = ROWS[name]
