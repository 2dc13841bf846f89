"""ATen operators on windows of images: convolutions, pools, resampling."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from mithril import ops
from mithril.graph import Op, UnsupportedError, is_static
from mithril_importing.arrays import as_value, reshape
from mithril_torch.importing.table import cast, row


def _each(value: Any, n: int) -> tuple[Any, ...]:
    """Return one number per spatial axis."""
    values = [value] if isinstance(value, int) else list(value)
    return tuple(values * n if len(values) == 1 else values)


def _pairs(padding: Any, n: int) -> tuple[tuple[Any, Any], ...]:
    return tuple((p, p) for p in _each(padding, n))


def _batched(x: Any, n: int) -> tuple[Any, bool]:
    """Return an image with a batch axis, and whether it had none."""
    if len(x.shape) == n + 1:
        return reshape(x, (1, *x.shape)), True
    return x, False


def _plain(y: Any, unbatched: bool) -> Any:
    return reshape(y, y.shape[1:]) if unbatched else y


def _with_bias(y: Any, bias: Any) -> Any:
    return y if bias is None else ops.add(y, reshape(bias, (1, bias.shape[0], *[1] * (len(y.shape) - 2))))


@row("conv1d", "conv2d", "conv3d", "conv1d.padding", "conv2d.padding", "conv3d.padding")
def conv(
    x: Any, w: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> Any:
    n = len(w.shape) - 2
    x, unbatched = _batched(x, n)
    stride, dilation = _each(stride, n), _each(dilation, n)
    if padding == "same":
        total = [d * (k - 1) for d, k in zip(dilation, w.shape[2:], strict=True)]
        pairs = tuple((t // 2, t - t // 2) for t in total)
    else:
        pairs = _pairs(0 if padding == "valid" else padding, n)
    y = ops.conv(x, w, stride=stride, padding=pairs, dilation=dilation, groups=groups)
    return _plain(_with_bias(y, bias), unbatched)


@row("conv_transpose1d", "conv_transpose2d.input", "conv_transpose3d.input")
def conv_transpose(
    x: Any,
    w: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Any:
    n = len(w.shape) - 2
    x, unbatched = _batched(x, n)
    settings = {"stride": _each(stride, n), "dilation": _each(dilation, n), "output_padding": _each(output_padding, n)}
    pairs = []
    for p, s, extra in zip(_each(padding, n), settings["stride"], settings["output_padding"], strict=True):
        more = max(extra - s + 1, 0)  # of the additional elements up to a stride are without padding
        if more > p:
            raise UnsupportedError(f"output_padding {extra} of stride {s} requires a padding of at least {more}")
        pairs.append((p, p - more))
    limited = zip(settings["output_padding"], settings["stride"], strict=True)
    settings["output_padding"] = tuple(min(extra, s - 1) for extra, s in limited)
    y = ops.conv_transpose(x, w, padding=tuple(pairs), groups=groups, **settings)
    return _plain(_with_bias(y, bias), unbatched)


@row("convolution")
def convolution(
    x: Any,
    w: Any,
    bias: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
) -> Any:
    if transposed:
        return conv_transpose(x, w, bias, stride, padding, output_padding, groups, dilation)
    return conv(x, w, bias, stride, padding, dilation, groups)


# -- pools --------------------------------------------------------------------------------------------------------
def _overhang(size: Any, kernel: int, stride: int, padding: int, dilation: int) -> int:
    """Return the additional padding at the end for ``ceil_mode``: the last window starts before that padding."""
    if not isinstance(size, int):
        raise UnsupportedError("a pool with ceil_mode=True requires static spatial sizes")
    reach = dilation * (kernel - 1) + 1
    count = math.ceil((size + 2 * padding - reach) / stride) + 1
    if (count - 1) * stride >= size + padding:
        count -= 1
    return max((count - 1) * stride + reach - size - 2 * padding, 0)


@row("max_pool1d", "max_pool2d", "max_pool3d")
def max_pool(x: Any, *window: Any, **settings: Any) -> Any:
    return _max_pool(ops.max_pool, x, *window, **settings)


@row("max_pool2d_with_indices", "max_pool3d_with_indices", "max_pool1d_with_indices")
def max_pool_with_indices(x: Any, *window: Any, **settings: Any) -> Any:
    return max_pool(x, *window, **settings), cast(_max_pool(ops.max_pool_positions, x, *window, **settings), "int64")


def _max_pool(
    pool: Op, x: Any, kernel: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False
) -> Any:
    n = len(x.shape) - 1 if isinstance(kernel, int) else len(list(kernel))
    n = len(_each(kernel, n))
    kernel = _each(kernel, n)
    x, unbatched = _batched(x, n)
    stride = kernel if not isinstance(stride, int) and not len(stride) else _each(stride, n)
    padding, dilation = _each(padding, n), _each(dilation, n)
    pairs = [(p, p) for p in padding]
    if ceil_mode:
        sizes = zip(x.shape[2:], kernel, stride, padding, dilation, strict=True)
        pairs = [(p, p + _overhang(*window)) for p, window in zip(padding, sizes, strict=True)]
    return _plain(pool(x, kernel=kernel, stride=stride, padding=tuple(pairs), dilation=dilation), unbatched)


@row("fractional_max_pool2d", "fractional_max_pool3d")
def fractional_max_pool(x: Any, kernel: Any, output_size: Any, samples: Any) -> tuple[Any, Any]:
    """Return the maxima of windows whose places random numbers select, and their positions."""
    n = len(kernel)
    x, unbatched = _batched(x, n)
    sizes = x.shape[2:]
    if not is_static(sizes):
        raise UnsupportedError("fractional pooling requires static spatial sizes")
    place: Any = np.zeros((), np.int32)
    order = (1, 0) if n == 2 else range(n)  # the first random number of planes is that of their columns
    for axis, (size, window, count, number) in enumerate(zip(sizes, kernel, output_size, order, strict=True)):
        u = samples[:, :, number : number + 1]
        scale = (size - window) / (count - 1) if count > 1 else 0.0
        steps = np.arange(count).astype(str(x.dtype))
        starts = ops.sub(ops.floor(ops.mul(ops.add(u, steps), scale)), ops.floor(ops.mul(u, scale)))
        starts = cast(ops.where(np.arange(count) == count - 1, float(size - window), starts), "int32")
        shape = [*starts.shape[:2], *(count if k == axis else 1 for k in range(n)), *[1] * n]
        offsets = np.arange(window, dtype=np.int32).reshape([window if k == axis else 1 for k in range(n)])
        place = ops.add(ops.mul(place, size), ops.add(reshape(starts, shape), offsets))
    elements, lead = math.prod(kernel), (*x.shape[:2], *output_size)
    place = reshape(place, (*x.shape[:2], -1))
    elements_of_windows = ops.take_along_axis(reshape(x, (*x.shape[:2], -1)), place, axis=2)
    windows, place = (reshape(t, (*lead, elements)) for t in (elements_of_windows, place))
    best = ops.argmax(windows, axis=-1, keepdims=True)
    results = (reshape(ops.take_along_axis(t, best, axis=-1), lead) for t in (windows, cast(place, "int64")))
    y, positions = results
    return _plain(y, unbatched), _plain(positions, unbatched)


@row("avg_pool1d", "avg_pool2d", "avg_pool3d")
def avg_pool(
    x: Any,
    kernel: Any,
    stride: Any = (),
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor: int | None = None,
) -> Any:
    kernel = _each(kernel, len(list(kernel)) if not isinstance(kernel, int) else 1)
    n = len(kernel)
    x, unbatched = _batched(x, n)
    stride = kernel if not isinstance(stride, int) and not len(stride) else _each(stride, n)
    padding = _each(padding, n)
    if not ceil_mode and divisor is None:
        settings: dict[str, Any] = {"padding": _pairs(padding, n), "count_include_pad": count_include_pad}
        return _plain(ops.avg_pool(x, kernel=kernel, stride=stride, **settings), unbatched)
    extra = [
        _overhang(size, k, s, p, 1) if ceil_mode else 0
        for size, k, s, p in zip(x.shape[2:], kernel, stride, padding, strict=True)
    ]
    pairs = tuple((p, p + e) for p, e in zip(padding, extra, strict=True))
    y = ops.mul(ops.avg_pool(x, kernel=kernel, stride=stride, padding=pairs), float(math.prod(kernel)))
    if divisor is not None:
        return _plain(ops.div(y, float(divisor)), unbatched)
    ones = np.ones((1, 1, *x.shape[2:]), np.float32)
    if count_include_pad:
        ones = np.pad(ones, ((0, 0), (0, 0), *((p, p) for p in padding)), constant_values=1.0)
        pairs = tuple((0, e) for e in extra)
    counts = ops.avg_pool(ones, kernel=kernel, stride=stride, padding=pairs) * np.float32(math.prod(kernel))
    return _plain(ops.div(y, cast(np.round(counts), str(x.dtype))), unbatched)


@row(
    "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d"
)
def adaptive_avg_pool(x: Any, size: Any) -> Any:
    x, unbatched = _batched(x, len(size))
    if all(s == 1 for s in size):
        return _plain(ops.mean(x, axis=tuple(range(2, len(x.shape))), keepdims=True), unbatched)
    return _plain(ops.adaptive_avg_pool(x, size=_current(x, size)), unbatched)


@row("adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d")
def adaptive_max_pool(x: Any, size: Any) -> Any:
    x, unbatched = _batched(x, len(size))
    size = _current(x, size)
    return _plain(ops.adaptive_max_pool(x, size=size), unbatched), _plain(_adaptive_positions(x, size), unbatched)


def _adaptive_positions(x: Any, size: Any) -> Any:
    """Return the positions of the maxima in the flattened spatial axes."""
    spatial = x.shape[2:]
    if not is_static(spatial):
        return None  # an error if an operator reads them
    numbers = np.arange(math.prod(spatial)).reshape(spatial)
    windows = [
        numbers[tuple(slice(i * n // m, -(-(i + 1) * n // m)) for i, n, m in zip(place, spatial, size, strict=True))]
        for place in np.ndindex(*size)
    ]
    longest = max(w.size for w in windows)  # shorter windows repeat their first element
    table = np.stack([np.pad(w.ravel(), (0, longest - w.size), constant_values=w.ravel()[0]) for w in windows])
    elements = ops.take(reshape(x, (*x.shape[:2], numbers.size)), table, axis=2)
    first = ops.add(cast(ops.argmax(elements, axis=-1), "int64"), np.arange(len(windows)) * longest)
    return reshape(ops.take(table.ravel(), first), (*x.shape[:2], *size))


def _current(x: Any, size: Any) -> tuple[Any, ...]:
    return tuple(n if s is None else s for n, s in zip(x.shape[2:], size, strict=True))


# -- resampling ---------------------------------------------------------------------------------------------------
@row("upsample_nearest1d.vec", "upsample_nearest2d.vec", "upsample_nearest3d.vec")
def upsample_nearest(x: Any, output_size: Any = None, scale_factors: Any = None) -> Any:
    for axis, (new, scale) in enumerate(_targets(x, output_size, scale_factors), start=2):
        old = x.shape[axis]
        if new % old == 0 and scale * new == old:  # repeating is cheaper than taking positions
            x = ops.repeat(x, repeats=new // old, axis=axis) if new != old else x
        else:
            places = np.floor(np.arange(new) * scale).astype(np.int32)
            x = ops.take(x, np.minimum(places, old - 1), axis=axis)
    return x


@row("_upsample_nearest_exact1d.vec", "_upsample_nearest_exact2d.vec", "_upsample_nearest_exact3d.vec")
def upsample_nearest_exact(x: Any, output_size: Any = None, scale_factors: Any = None) -> Any:
    """Take the elements nearest to the centers of the new ones."""
    for axis, (new, scale) in enumerate(_targets(x, output_size, scale_factors), start=2):
        old = x.shape[axis]
        places = np.floor((np.arange(new) + 0.5) * scale).astype(np.int32)
        x = ops.take(x, np.minimum(places, old - 1), axis=axis)
    return x


@row("upsample_linear1d.vec", "upsample_bilinear2d.vec", "upsample_trilinear3d.vec")
def upsample_linear(x: Any, output_size: Any, align_corners: bool = False, scale_factors: Any = None) -> Any:
    return _resampled(x, _targets(x, output_size, scale_factors), _linear, 1, align_corners)


@row("upsample_bicubic2d.vec")
def upsample_bicubic(x: Any, output_size: Any, align_corners: bool = False, scale_factors: Any = None) -> Any:
    return _resampled(x, _targets(x, output_size, scale_factors), _cubic(-0.75), 2, align_corners)


@row("_upsample_bilinear2d_aa.vec")
def upsample_linear_antialiased(x: Any, output_size: Any, align_corners: bool, scale_factors: Any = None) -> Any:
    return _resampled(x, _targets(x, output_size, scale_factors), _linear, 1, align_corners, antialias=True)


@row("_upsample_bilinear2d_aa")
def upsample_linear_antialiased_by_axis(
    x: Any, output_size: Any, align_corners: bool, scale_rows: Any = None, scale_columns: Any = None
) -> Any:
    return upsample_linear_antialiased(x, output_size, align_corners, (scale_rows, scale_columns))


@row("_upsample_bicubic2d_aa.vec")
def upsample_bicubic_antialiased(x: Any, output_size: Any, align_corners: bool, scale_factors: Any = None) -> Any:
    return _resampled(x, _targets(x, output_size, scale_factors), _cubic(-0.5), 2, align_corners, antialias=True)


_Kernel = Callable[[Any], Any]  # the weights of elements at distances


def _linear(distance: Any) -> Any:
    return np.maximum(1.0 - np.abs(distance), 0.0)


def _cubic(a: float) -> _Kernel:
    """Return the kernel of cubic convolution of this slope."""

    def weights(distance: Any) -> Any:
        d = np.abs(distance)
        inner, outer = ((a + 2) * d - (a + 3)) * d * d + 1, a * (((d - 5) * d + 8) * d - 4)
        return np.where(d <= 1, inner, np.where(d < 2, outer, 0.0))

    return weights


def _resampled(
    x: Any, targets: Any, kernel: _Kernel, reach: int, align_corners: bool, *, antialias: bool = False
) -> Any:
    """Resample by one matrix per axis; positions outside repeat the border, or do not count with ``antialias``."""
    y = x
    for axis, (new, scale) in enumerate(targets, start=2):
        old = x.shape[axis]
        if new == old and scale in (1.0, None):
            continue
        if align_corners:
            scale = (old - 1) / (new - 1) if new > 1 else 0.0
        is_aligned = align_corners and not antialias  # PyTorch aligns only the scale of averages
        positions = np.arange(new) * scale if is_aligned else (np.arange(new) + 0.5) * scale - 0.5
        if antialias:
            matrix = _averaging(positions, old, scale, kernel, reach)
        else:
            positions = np.maximum(positions, 0.0) if reach == 1 else positions
            first, matrix = np.floor(positions).astype(int) - reach + 1, np.zeros((new, old))
            for k in range(2 * reach):
                place = np.clip(first + k, 0, old - 1)
                np.add.at(matrix, (np.arange(new), place), kernel(first + k - positions))
        y = _multiplied(y, axis, matrix.astype(np.dtype(str(x.dtype))))
    return y


def _averaging(positions: Any, old: int, scale: float, kernel: _Kernel, reach: int) -> Any:
    """Return the matrix that averages over all elements that a new one covers."""
    stretch = max(scale, 1.0)
    centers = positions + 0.5
    first = np.maximum((centers - reach * stretch + 0.5).astype(int), 0)
    last = np.minimum((centers + reach * stretch + 0.5).astype(int), old)
    elements = np.arange(old)
    weights = kernel((elements - positions[:, None]) / stretch)
    weights = np.where((elements >= first[:, None]) & (elements < last[:, None]), weights, 0.0)
    return weights / weights.sum(axis=1, keepdims=True)


def _multiplied(x: Any, axis: int, matrix: Any) -> Any:
    """Multiply one axis by a matrix."""
    last = len(x.shape) - 1
    swap = tuple(last if k == axis else axis if k == last else k for k in range(last + 1))
    product = ops.matmul(as_value(x if axis == last else ops.transpose(x, perm=swap)), matrix.T)
    return product if axis == last else ops.transpose(product, perm=swap)


def _targets(x: Any, output_size: Any, scale_factors: Any) -> list[tuple[int, float]]:
    """Return the new size of each axis, and the distance of its elements in old ones, which a factor sets exactly."""
    old = x.shape[2:]
    if not all(isinstance(n, int) for n in old):
        raise UnsupportedError("resampling requires static spatial sizes")
    if output_size is None:
        return [(int(np.floor(n * f)), 1.0 / f) for n, f in zip(old, scale_factors, strict=True)]
    factors = [None] * len(old) if scale_factors is None else list(scale_factors)
    return [(m, n / m if f is None else 1.0 / f) for n, m, f in zip(old, output_size, factors, strict=True)]


@row("grid_sampler", "grid_sampler_2d", "grid_sampler_3d")
def grid_sample(x: Any, grid: Any, interpolation_mode: int, padding_mode: int, align_corners: bool) -> Any:
    mode = ("bilinear", "nearest", "bicubic")[interpolation_mode]
    padding = ("zeros", "border", "reflection")[padding_mode]
    return ops.grid_sample(x, grid, mode=mode, padding_mode=padding, align_corners=bool(align_corners))


@row("torchvision::roi_align")
def roi_align(
    x: Any, boxes: Any, scale: float, height: int, width: int, samples: int = -1, aligned: bool = False
) -> Any:
    """Return regions of fixed size; the first column of the boxes numbers their images."""
    if samples < 1:
        raise UnsupportedError(
            "roi_align with sampling_ratio=-1 reads as many samples as the boxes are large", hint="sampling_ratio=2"
        )
    boxes = as_value(boxes)
    image = ops.cast(boxes[:, 0], dtype="int32")
    size = (height, width)
    return ops.roi_align(x, boxes[:, 1:], image, size=size, scale=float(scale), samples=samples, aligned=aligned)
