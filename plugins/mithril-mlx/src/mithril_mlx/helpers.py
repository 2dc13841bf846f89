"""Functions whose source is copied into generated files: they use MLX and the functions in ``needs`` only."""
# mypy: ignore-errors

import ml_dtypes
import numpy

from mithril.backend import Dialect, floordiv_int, needs
from mithril_mlx.mlx_loader import mx


@needs(imports=("import ml_dtypes", "import numpy"))
def on_host(function, types, *arrays):
    """Call a function of NumPy arrays and return its results."""
    host_arrays = []
    for x in arrays:
        if x.dtype == mx.bfloat16:
            host_arrays.append(numpy.asarray(x.view(mx.uint16)).view(ml_dtypes.bfloat16))
        else:
            host_arrays.append(numpy.asarray(x))
    results = []
    for result, (dtype, shape) in zip(function(*host_arrays), types):
        if dtype == mx.bfloat16:
            results.append(
                mx.array(numpy.asarray(result, order="C").view(numpy.uint16)).view(mx.bfloat16).reshape(shape)
            )
        else:
            results.append(mx.array(numpy.asarray(result, order="C")).astype(dtype).reshape(shape))
    return tuple(results)


# -- element-wise -------------------------------------------------------------------------------------------------
def erf(x):
    """Return the error function; near 0 MLX's has a small absolute but a large relative error, so use a series."""
    z = x if x.dtype == mx.float64 else x.astype(mx.float32)
    total = mx.zeros_like(z)
    for divisor in (-75600, 9360, -1320, 216, -42, 10, -3, 1):
        total = total * z * z + 1 / divisor
    # Up to one half the next term, z**17 / 685440 without the factor, is 1e-11 of the sum.
    return mx.where(mx.abs(z) < 0.5, z * total * 1.1283791670955126, mx.erf(z)).astype(x.dtype)


def sine(x, shift):
    """Return sin(x), or cos(x) for a shift of 0.5; MLX 0.32 loses digits far from 0, so reduce x in float64."""
    direct = mx.cos(x) if shift else mx.sin(x)
    if x.dtype != mx.float32 or mx.default_device() != mx.cpu:
        return direct
    z = x.astype(mx.float64)
    k = mx.round(z * 0.3183098861837907 - shift)
    turns = k + shift
    rest = z - turns * 3.141592651605606 - turns * 1.984187159361080883e-9  # pi: the first product is exact
    sign = (1.0 - 2.0 * (k - 2.0 * mx.floor(k * 0.5))) * (1.0 - 4.0 * shift)
    reduced = mx.sin(rest.astype(mx.float32)) * sign.astype(mx.float32)
    # From 2**20 on, the first product is rounded.
    return mx.where(mx.abs(x) < 1048576.0, reduced, direct)


def masked(x, condition):
    """Return x where the condition holds, else 0: on the CPU multiplying the bits is 6x faster than ``mx.where``."""
    if mx.default_device() != mx.cpu:
        return mx.where(condition, x, 0.0)
    bits = mx.int16 if x.dtype.size == 2 else mx.int32
    return (x.view(bits) * condition).view(x.dtype)


# -- reductions ---------------------------------------------------------------------------------------------------
def reduced(x, axes, keepdims, function, start):
    """Return a reduction over ``axes``; ``start`` if there are no elements."""
    if not axes:
        return mx.array(x)
    if any(x.shape[k] == 0 for k in axes):
        shape = [1 if k in axes else n for k, n in enumerate(x.shape) if keepdims or k not in axes]
        return mx.full(shape, start, x.dtype)
    return function(x, axis=axes, keepdims=keepdims)


@needs(reduced)
def extreme(x, axes, keepdims, largest, start):
    """Return the maximum or minimum over ``axes``; nan takes precedence; ``start`` if there are no elements."""
    if x.dtype == mx.bool_:
        if not axes:
            return mx.array(x)
        return (mx.any if largest else mx.all)(x, axis=axes, keepdims=keepdims)
    result = reduced(x, axes, keepdims, mx.max if largest else mx.min, start)
    if not axes or not mx.issubdtype(x.dtype, mx.floating):
        return result
    return mx.where(mx.any(mx.isnan(x), axis=axes, keepdims=keepdims), mx.array(float("nan"), x.dtype), result)


def position(x, axis, keepdims, largest):
    """Return the first index of the maximum or minimum; nan takes precedence."""
    if not x.size:  # MLX refuses it, even if the axis has elements
        return mx.zeros(mx.any(x, axis=axis, keepdims=keepdims).shape, mx.int32)
    z = x.astype(mx.uint8) if x.dtype == mx.bool_ else x
    if mx.issubdtype(z.dtype, mx.floating):
        bad = mx.isnan(z)
        best = mx.array(float("inf") if largest else float("-inf"), z.dtype)
        first = mx.argmax(bad, axis=axis, keepdims=keepdims)
        index = (mx.argmax if largest else mx.argmin)(mx.where(bad, best, z), axis=axis, keepdims=keepdims)
        return mx.where(mx.any(bad, axis=axis, keepdims=keepdims), first, index).astype(mx.int32)
    return (mx.argmax if largest else mx.argmin)(z, axis=axis, keepdims=keepdims).astype(mx.int32)


def running(x, accumulate, axis, reverse, exclusive):
    """Return a cumulative sum or product, from either end, with or without the element itself."""
    if not x.size:
        return x
    z = x.astype(mx.float32) if x.dtype in (mx.float16, mx.bfloat16) else x
    return accumulate(z, axis=axis, reverse=reverse, inclusive=not exclusive).astype(x.dtype)


# -- products -----------------------------------------------------------------------------------------------------
def matmul_int(a, b):
    """Return the matrix product of integers or bools, which MLX does not support."""
    row, column = a.ndim == 1, b.ndim == 1
    left = a[None] if row else a
    right = b[:, None] if column else b
    kind = mx.int32 if a.dtype == mx.bool_ else a.dtype
    products = left[..., :, :, None].astype(kind) * right[..., None, :, :].astype(kind)
    result = mx.sum(products, axis=-2)
    result = result != 0 if a.dtype == mx.bool_ else result.astype(a.dtype)
    if row:
        result = result[..., 0, :]
    return result[..., 0] if column else result


def matmul(a, b):
    """Return the matrix product; 16-bit floats accumulate in float32.

    MLX's product of a bfloat16 matrix and a vector does so in half the time of casts and a float32 product. Its other
    16-bit products are slower than those.
    """
    is_fast = a.dtype == mx.bfloat16 and b.ndim == 1
    is_half = a.dtype in (mx.float16, mx.bfloat16) and not is_fast
    result = mx.matmul(a.astype(mx.float32), b.astype(mx.float32)) if is_half else mx.matmul(a, b)
    return result.astype(a.dtype)


# -- mixtures of experts ------------------------------------------------------------------------------------------
def by_expert(experts, count):
    """Return the expert of each row, its position in the order of the experts, and sizes and starts of their groups."""
    numbers = mx.stop_gradient(experts).reshape(-1).astype(mx.int64)
    numbers = mx.where((numbers >= 0) & (numbers < count), numbers, count).astype(mx.int32)
    order = mx.argsort(numbers)
    sizes = mx.sum(numbers[:, None] == mx.arange(count), axis=0)
    return numbers, order, sizes, mx.cumsum(sizes) - sizes


@needs(by_expert)
def expert_matmul(x, w, experts):
    """Return the product of each row with the weight of its expert, in blocks of rows of one expert.

    The last block of an expert is filled with any rows: their products are not read.
    """
    lead, count = mx.broadcast_shapes(x.shape[:-1], experts.shape), w.shape[0]
    if not (x.size and w.size and experts.size):
        return mx.zeros((*lead, w.shape[2]), x.dtype)
    experts = mx.broadcast_to(experts, lead)
    n = experts.size
    size = max(1, min(64, n // (2 * count)))
    rows = mx.broadcast_to(mx.arange(x[..., 0].size).reshape(x.shape[:-1]), lead).reshape(-1)
    numbers, order, sizes, starts = by_expert(experts, count)
    ends = mx.cumsum((sizes + (size - 1)) // size)
    first = mx.concatenate([mx.zeros(1, mx.int32), ends])  # block of each expert
    blocks = mx.arange((n + count * (size - 1)) // size)
    owners = mx.minimum(mx.sum(ends <= blocks[:, None], axis=1), count - 1)
    positions = (starts[owners] + (blocks - first[owners]) * size)[:, None] + mx.arange(size)
    picked = x.reshape(-1, x.shape[-1])[rows[order[mx.clip(positions, 0, n - 1)]]]
    kind = mx.float32 if x.dtype in (mx.float16, mx.bfloat16) else x.dtype
    y = mx.gather_mm(picked.astype(kind), w.astype(kind), rhs_indices=owners.astype(mx.uint32), sorted_indices=True)
    owner = mx.minimum(numbers, count - 1)
    places = first[owner] * size + mx.argsort(order) - starts[owner]
    zero = mx.zeros((1, w.shape[2]), kind)  # the result of rows without an expert
    y = mx.concatenate([y.reshape(-1, w.shape[2]), zero])[mx.where(numbers < count, places, blocks.size * size)]
    return y.astype(x.dtype).reshape(*lead, w.shape[2])


@needs(by_expert)
def expert_weight_grad(x, g, experts, count):
    """Return for each expert the sum of the outer products of its rows."""
    if not (x.size and g.size):
        return mx.zeros((count, x.shape[-1], g.shape[-1]), x.dtype)
    _, order, sizes, starts = by_expert(experts, count)
    kind = mx.float32 if x.dtype in (mx.float16, mx.bfloat16) else x.dtype
    a, b = (z.reshape(-1, z.shape[-1])[order].astype(kind) for z in (x, g))
    segments = mx.stack([starts, starts + sizes], axis=1).astype(mx.uint32)
    return mx.segmented_mm(a.T, b, segments).astype(x.dtype)


# -- shapes -------------------------------------------------------------------------------------------------------
def flip(x, axes):
    """Return the elements in reverse order along ``axes``."""
    for axis in axes:
        x = mx.take(x, mx.arange(x.shape[axis] - 1, -1, -1), axis) if x.size else x
    return x


def triangle(x, function, k):
    """Return the lower or upper triangle, also of empty matrices."""
    return function(x, k=k) if x.size else x


# -- indexing -----------------------------------------------------------------------------------------------------
def argsort(x, axis, descending):
    """Return the indices of a stable sort with nan last; MLX requires an explicit ``stop_gradient`` for them."""
    x = mx.stop_gradient(x)
    if not x.ndim or not x.size:
        return mx.zeros(x.shape, mx.int32)
    if mx.issubdtype(x.dtype, mx.floating):
        upcast = x if x.dtype == mx.float64 else x.astype(mx.float32)
        key = -upcast if descending else upcast
        key = mx.where(key == 0, mx.zeros_like(key), key)
        bad = mx.isnan(key)
        key = mx.where(bad, mx.array(float("inf"), key.dtype), key)
        order = mx.argsort(key, axis=axis)
        return mx.take_along_axis(
            order, mx.argsort(mx.take_along_axis(bad, order, axis).astype(mx.int32), axis=axis), axis
        )
    key = x.astype(mx.int32) if x.dtype == mx.bool_ else x
    return mx.argsort(~key if descending else key, axis=axis)


# -- windows ------------------------------------------------------------------------------------------------------
def to_channels_last(x):
    """Transpose [batch, channels, ...] to channels last."""
    return mx.transpose(x, (0, *range(2, x.ndim), 1))


def to_channels_first(x):
    """Transpose [batch, ..., channels] to channels first."""
    return mx.transpose(x, (0, x.ndim - 1, *range(1, x.ndim - 1)))


@needs(to_channels_last, to_channels_first)
def conv(x, w, stride, padding, dilation, groups):
    """Return the convolution of [batch, channels, ...] images; 16-bit floats accumulate in float32."""
    accumulator = mx.float32 if x.dtype in (mx.float16, mx.bfloat16) else x.dtype
    if not x.size or not w.size:  # MLX 0.32 cannot differentiate it, and all slopes are zero
        x, w = mx.stop_gradient(x), mx.stop_gradient(w)
    low, high = [a for a, _ in padding], [b for _, b in padding]
    result = mx.conv_general(
        to_channels_last(x.astype(accumulator)),
        to_channels_last(w.astype(accumulator)),
        stride,
        (low, high),
        dilation,
        [1] * len(low),
        groups,
    )
    return to_channels_first(result).astype(x.dtype)


def dilate_and_pad(g, shape, stride, kernel, dilation, padding):
    """Dilate a cotangent by the stride, and pad it for the transposed convolution."""
    for axis, s in enumerate(stride):
        if s > 1:
            n = g.shape[axis + 2]
            gaps = mx.zeros((*g.shape[: axis + 3], s - 1, *g.shape[axis + 3 :]), g.dtype)
            g = mx.concatenate([mx.expand_dims(g, axis + 3), gaps], axis + 3)
            g = g.reshape(*g.shape[: axis + 2], n * s, *g.shape[axis + 4 :])
    widths = [(0, 0), (0, 0)]
    for axis, (k, d, (before, _)) in enumerate(zip(kernel, dilation, padding)):
        reach = (k - 1) * d
        left = reach - before
        if left < 0:
            g = mx.slice(
                g,
                mx.array([-left]),
                (axis + 2,),
                [*g.shape[: axis + 2], g.shape[axis + 2] + left, *g.shape[axis + 3 :]],
            )
            left = 0
        need = shape[axis + 2] + reach
        right = need - left - g.shape[axis + 2]
        if right < 0:
            g = mx.slice(
                g, mx.array([0]), (axis + 2,), [*g.shape[: axis + 2], g.shape[axis + 2] + right, *g.shape[axis + 3 :]]
            )
            right = 0
        widths.append((left, right))
    return mx.pad(g, widths)


@needs(conv, dilate_and_pad)
def conv_input_grad(g, w, shape, stride, padding, dilation, groups):
    """Return the cotangent of a convolution's image: a convolution with the flipped kernel."""
    if all(n == 1 for n in stride):  # with a stride MLX's own gradient is slower
        x = mx.zeros(shape, g.dtype)
        return mx.vjp(lambda x: [conv(x, w, stride, padding, dilation, groups)], [x], [g])[1][0]
    kernel = w.shape[2:]
    flipped = w
    for axis in range(2, w.ndim):
        flipped = mx.take(flipped, mx.arange(w.shape[axis] - 1, -1, -1), axis)
    flipped = flipped.reshape(groups, w.shape[0] // groups, *w.shape[1:])
    flipped = mx.swapaxes(flipped, 1, 2).reshape(groups * w.shape[1], w.shape[0] // groups, *kernel)
    padded = dilate_and_pad(g, shape, stride, kernel, dilation, padding)
    return conv(padded, flipped, [1] * len(kernel), [(0, 0)] * len(kernel), dilation, groups)


@needs(conv)
def conv_weight_grad(x, g, shape, stride, padding, dilation, groups):
    """Return the cotangent of a convolution's kernel."""
    w = mx.zeros(shape, x.dtype)
    return mx.vjp(lambda w: [conv(x, w, stride, padding, dilation, groups)], [w], [g])[1][0]


# -- attention ----------------------------------------------------------------------------------------------------
def causal(n, m):
    """Return the causal mask of m keys for n queries, which are the last positions."""
    return mx.arange(m)[None, :] <= mx.arange(m - n, m)[:, None]


@needs(causal)
def with_causal(mask, n, m):
    """Return a mask combined with the causal mask."""
    if mask.dtype == mx.bool_:
        return mask & causal(n, m)
    return mx.where(causal(n, m), mask, mx.array(float("-inf"), mask.dtype))


@needs(causal)
def nan_where_fully_masked(y, mask, is_causal, n, m):
    """Return ``y`` with nan for fully masked queries, for which MLX returns an average."""
    visible = mx.ones((1, 1, 1, 1), mx.bool_) if mask is None else mask
    if visible.dtype != mx.bool_:
        visible = visible != float("-inf")
    if is_causal:
        visible = visible & causal(n, m)
    fully_masked = mx.logical_not(mx.any(visible, -1, keepdims=True))
    return mx.where(fully_masked, mx.array(float("nan"), y.dtype), y)


@needs(nan_where_fully_masked)
def cached_attention(q, k, v, mask, scale):
    """Return attention to a cache, of which each row of a batch reads the positions that it has written."""
    n = mask.shape[-1]
    rows = mx.any(mx.flatten(mask, 1, -2) if mask.ndim == 4 else mask.reshape(1, -1, n), 1)
    seen = mx.max(mx.where(rows, mx.arange(1, n + 1), 0), 1).tolist()
    if len(set(seen)) > 1:
        parts = [[x[b : b + 1] for x in (q, k, v, mask)] for b in range(len(seen))]
        return mx.concatenate([cached_attention(*part, scale) for part in parts])
    last = max(seen, default=0) or n
    mask = mask[..., :last]
    y = mx.fast.scaled_dot_product_attention(q, k[:, :, :last], v[:, :, :last], scale=scale, mask=mask)
    return nan_where_fully_masked(y, mask, False, 0, 0)


# -- primitives of shared helpers ------------------------------------------------------------------------------------
def floor_divide(a, b):
    """Return the quotient rounded toward minus infinity: MLX rounds toward zero, and crashes for minimum / -1."""
    if not mx.issubdtype(a.dtype, mx.signedinteger):
        return a // b
    safe = mx.where(b == -1, 1, b)
    quotient = a // safe
    rest = a - quotient * safe
    return mx.where(b == -1, -a, quotient - ((rest != 0) & ((rest < 0) != (safe < 0))))


@needs(floordiv_int)
def mod_int(a, b):
    """Return the remainder of integer division; 0 for a divisor of 0."""
    return mx.where(b == 0, 0, a - floordiv_int(a, b) * b)


def fmod(a, b):
    """Return the remainder of division rounded toward zero."""
    rest = mx.remainder(mx.abs(a), mx.abs(b))
    rest = mx.where(mx.isinf(b) & mx.isfinite(a), mx.abs(a), rest)
    return mx.where(mx.isinf(a) | (b == 0), float("nan"), mx.where(a < 0, -rest, rest))


def signed_zero(x):
    """Return zeros with the signs of x; the sign of 1 / x is the sign of a zero."""
    zero = mx.zeros_like(x)
    return mx.where((x < 0) | (1.0 / x < 0), -zero, zero)


def trunc(x):
    """Return the numbers rounded toward zero."""
    return mx.where(x < 0, mx.ceil(x), mx.floor(x))


def typed(number, like):
    """Return an integer in the dtype of an array, including 64-bit dtypes."""
    return mx.array(number - 2**64 if number >= 2**63 else number, mx.int64).astype(like.dtype)


def take_along(x, indices, axis):
    """Return one element per index along an axis."""
    shape = [a if b == 1 else b for a, b in zip(x.shape, indices.shape)]
    left, right = list(shape), list(shape)
    left[axis], right[axis] = x.shape[axis], indices.shape[axis]
    return mx.take_along_axis(mx.broadcast_to(x, left), mx.broadcast_to(indices, right), axis)


def part_at(x, first, sizes):
    """Return a slice of static sizes at dynamic starts."""
    if 0 in sizes:
        return mx.zeros(sizes, x.dtype)
    for axis, size in enumerate(sizes):
        if size != x.shape[axis]:
            x = mx.take(x, first[axis] + mx.arange(size), axis)
    return x


def put_rows(x, first, update, axis):
    """Return ``x`` with the slice of each row that begins at ``first`` replaced by ``update``."""
    for row in range(x.shape[0]):
        start = mx.stack([mx.array(row, first.dtype), first[row]])
        x = mx.slice_update(x, update[row : row + 1], start, (0, axis))
    return x


def nan_max(x):
    """Return the maximum along the first axis; nan takes precedence."""
    if not mx.issubdtype(x.dtype, mx.floating):
        return mx.max(x, axis=0)
    return mx.where(mx.any(x != x, axis=0), float("nan"), mx.max(x, axis=0))


def lowest(x):
    """Return the smallest value of the dtype of ``x``."""
    return float("-inf") if mx.issubdtype(x.dtype, mx.floating) else mx.iinfo(x.dtype).min


WORDS = {
    "add_at": "{0}.at[{1}].add({2})",
    "as_words": "{0}",
    "astype": "{0}.astype({1})",
    "bits": "{0}.dtype.size * 8",
    "bordered": "mx.pad({0}, [(0, 0), (0, 0), *{1}], constant_values=mx.array({2}, {0}.dtype))",
    "copy": "mx.array({0})",
    "index": "mx.stop_gradient({0}).astype(mx.int64)",
    "is_float": "mx.issubdtype({0}.dtype, mx.floating)",
    "is_half": "{0}.dtype in (mx.float16, mx.bfloat16)",
    "is_signed": "mx.issubdtype({0}.dtype, mx.signedinteger)",
    "key_words": "{0}",
    "latest": "mx.full(({0},), -1, mx.int32).at[{1}].maximum(mx.arange({2}, dtype=mx.int32))",
    "nonnegative": "mx.maximum({0}, 0)",
    "numbers": "mx.arange({0})",
    "ones": "mx.ones({0}, {1}.dtype)",
    "put_part": "mx.slice_update({0}, {2}, {1}, tuple(range({0}.ndim)))",
    "raise_part": "{0}.at[{1}].add({2})",
    "raised": "mx.maximum",
    "size": "{0}.size",
    "sizes": "mx.array({0}, mx.int64)",
    # The derivative of mx.take ends the process where the array is empty, with MLX 0.32.
    "take": "mx.take({0} if {0}.size else mx.stop_gradient({0}), {1}, {2})",
    "to_word": "{0}.astype(mx.uint32)",
    "word": "mx.array({0}, mx.uint32)",
    "words": "mx.arange({0}, dtype=mx.uint32)",
    "wrapped": "{0}",
    "zeros": "mx.zeros({0}, {1}.dtype)",
}
ARITHMETIC = (floor_divide, fmod, lowest, mod_int, nan_max, signed_zero, trunc, typed)
dialect = Dialect("mx", WORDS, (*ARITHMETIC, argsort, part_at, put_rows, take_along))
