"""Functions whose source goes into generated files: MLX only, each standing alone save for those it ``needs``."""
# mypy: ignore-errors

import ml_dtypes
import numpy

from mithril.backend import Dialect, floordiv_int, needs
from mithril_mlx.mlx_loader import mx


@needs(imports=("import ml_dtypes", "import numpy"))
def on_host(function, types, *arrays):
    """Results of a function of NumPy arrays."""
    given = []
    for x in arrays:
        if x is None:
            given.append(None)
        elif x.dtype == mx.bfloat16:
            given.append(numpy.asarray(x.view(mx.uint16)).view(ml_dtypes.bfloat16))
        else:
            given.append(numpy.asarray(x))
    results = []
    for result, (dtype, shape) in zip(function(*given), types):
        if dtype == mx.bfloat16:
            results.append(
                mx.array(numpy.asarray(result, order="C").view(numpy.uint16)).view(mx.bfloat16).reshape(shape)
            )
        else:
            results.append(mx.array(numpy.asarray(result, order="C")).astype(dtype).reshape(shape))
    return tuple(results)


# -- element-wise -------------------------------------------------------------------------------------------------
def erf(x):
    """Return the error function: near 0, where MLX's is exact in its absolute value only, by its series."""
    z = x if x.dtype == mx.float64 else x.astype(mx.float32)
    total = mx.zeros_like(z)
    for divisor in (-75600, 9360, -1320, 216, -42, 10, -3, 1):
        total = total * z * z + 1 / divisor
    return mx.where(mx.abs(z) < 0.5, z * total * 1.1283791670955126, mx.erf(z)).astype(x.dtype)


def kept_where(x, condition):
    """x where the condition holds, else 0: on the CPU six times faster as a product of its bits than as a choice."""
    if mx.default_device() != mx.cpu:
        return mx.where(condition, x, 0.0)
    bits = mx.int16 if x.dtype.size == 2 else mx.int32
    return (x.view(bits) * condition).view(x.dtype)


# -- reductions ---------------------------------------------------------------------------------------------------
def reduced(x, axes, keepdims, function, start):
    """A reduction over axes; of no elements the start."""
    if not axes:
        return mx.array(x)
    if any(x.shape[k] == 0 for k in axes):
        shape = [1 if k in axes else n for k, n in enumerate(x.shape) if keepdims or k not in axes]
        return mx.full(shape, start, x.dtype)
    return function(x, axis=axes, keepdims=keepdims)


@needs(reduced)
def extreme(x, axes, keepdims, largest, start):
    """The largest or smallest element over axes; nan wins, of no elements it is the start."""
    if x.dtype == mx.bool_:
        if not axes:
            return mx.array(x)
        return (mx.any if largest else mx.all)(x, axis=axes, keepdims=keepdims)
    made = reduced(x, axes, keepdims, mx.max if largest else mx.min, start)
    if not axes or not mx.issubdtype(x.dtype, mx.floating):
        return made
    return mx.where(mx.any(mx.isnan(x), axis=axes, keepdims=keepdims), mx.array(float("nan"), x.dtype), made)


def position(x, axis, keepdims, largest):
    """The first place of the largest or smallest element; nan wins."""
    z = x.astype(mx.uint8) if x.dtype == mx.bool_ else x
    if mx.issubdtype(z.dtype, mx.floating):
        bad = mx.isnan(z)
        best = mx.array(float("inf") if largest else float("-inf"), z.dtype)
        first = mx.argmax(bad, axis=axis, keepdims=keepdims)
        found = (mx.argmax if largest else mx.argmin)(mx.where(bad, best, z), axis=axis, keepdims=keepdims)
        return mx.where(mx.any(bad, axis=axis, keepdims=keepdims), first, found).astype(mx.int32)
    return (mx.argmax if largest else mx.argmin)(z, axis=axis, keepdims=keepdims).astype(mx.int32)


def running(x, accumulate, axis, reverse, exclusive):
    """A running sum or product, from either end, with or without the element itself."""
    if not x.size:
        return x
    z = x.astype(mx.float32) if x.dtype in (mx.float16, mx.bfloat16) else x
    return accumulate(z, axis=axis, reverse=reverse, inclusive=not exclusive).astype(x.dtype)


# -- products -----------------------------------------------------------------------------------------------------
def matmul_int(a, b):
    """The matrix product of integers or bools, which MLX does not have."""
    row, column = a.ndim == 1, b.ndim == 1
    left = a[None] if row else a
    right = b[:, None] if column else b
    kind = mx.int32 if a.dtype == mx.bool_ else a.dtype
    wide = left[..., :, :, None].astype(kind) * right[..., None, :, :].astype(kind)
    made = mx.sum(wide, axis=-2)
    made = made != 0 if a.dtype == mx.bool_ else made.astype(a.dtype)
    if row:
        made = made[..., 0, :]
    return made[..., 0] if column else made


def matmul(a, b):
    """The matrix product; empty ones are zeros, 16-bit floats accumulate in float32."""
    wide = a.dtype in (mx.float16, mx.bfloat16)
    made = mx.matmul(a.astype(mx.float32), b.astype(mx.float32)) if wide else mx.matmul(a, b)
    return made.astype(a.dtype)


# -- shapes -------------------------------------------------------------------------------------------------------
def flip(x, axes):
    """Elements in reverse order along axes."""
    for axis in axes:
        x = mx.take(x, mx.arange(x.shape[axis] - 1, -1, -1), axis) if x.shape[axis] else x
    return x


def triangle(x, function, k):
    """The lower or upper triangle, of matrices without elements too."""
    return function(x, k=k) if x.size else x


# -- places -------------------------------------------------------------------------------------------------------
def argsort(x, axis, descending):
    """Positions in order; equal ones keep theirs, nan last. MLX must be told that they have no gradient."""
    x = mx.stop_gradient(x)
    if not x.ndim or not x.size:
        return mx.zeros(x.shape, mx.int32)
    if mx.issubdtype(x.dtype, mx.floating):
        wide = x if x.dtype == mx.float64 else x.astype(mx.float32)
        key = -wide if descending else wide
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
def inward(x):
    """Channels last."""
    return mx.transpose(x, (0, *range(2, x.ndim), 1))


def outward(x):
    """Channels after the batch."""
    return mx.transpose(x, (0, x.ndim - 1, *range(1, x.ndim - 1)))


@needs(inward, outward)
def conv(x, w, stride, padding, dilation, groups):
    """Convolution of [batch, channels, ...] images, 16-bit floats accumulating in float32."""
    wide = mx.float32 if x.dtype in (mx.float16, mx.bfloat16) else x.dtype
    low, high = [a for a, _ in padding], [b for _, b in padding]
    made = mx.conv_general(
        inward(x.astype(wide)), inward(w.astype(wide)), stride, (low, high), dilation, [1] * len(low), groups
    )
    return outward(made).astype(x.dtype)


def spread(g, shape, stride, kernel, dilation, padding):
    """A cotangent with the stride's gaps filled by zeros, widened to what the transposed product reads."""
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


@needs(conv, spread)
def conv_input_grad(g, w, shape, stride, padding, dilation, groups):
    """The cotangent of a convolution's image: a convolution by the kernel turned around."""
    if all(n == 1 for n in stride):  # else MLX fills the gaps with what is slower to multiply
        x = mx.zeros(shape, g.dtype)
        return mx.vjp(lambda x: [conv(x, w, stride, padding, dilation, groups)], [x], [g])[1][0]
    kernel = w.shape[2:]
    turned = w
    for axis in range(2, w.ndim):
        turned = mx.take(turned, mx.arange(w.shape[axis] - 1, -1, -1), axis)
    turned = turned.reshape(groups, w.shape[0] // groups, *w.shape[1:])
    turned = mx.swapaxes(turned, 1, 2).reshape(groups * w.shape[1], w.shape[0] // groups, *kernel)
    wide = spread(g, shape, stride, kernel, dilation, padding)
    return conv(wide, turned, [1] * len(kernel), [(0, 0)] * len(kernel), dilation, groups)


@needs(conv)
def conv_weight_grad(x, g, shape, stride, padding, dilation, groups):
    """The cotangent of a convolution's kernel."""
    w = mx.zeros(shape, x.dtype)
    return mx.vjp(lambda w: [conv(x, w, stride, padding, dilation, groups)], [w], [g])[1][0]


# -- attention ----------------------------------------------------------------------------------------------------
def causal(n, m):
    """Which of m keys each of n queries may see, the queries being the last positions."""
    return mx.arange(m)[None, :] <= mx.arange(m - n, m)[:, None]


@needs(causal)
def with_causal(mask, n, m):
    """A mask joined with the causal one."""
    if mask.dtype == mx.bool_:
        return mask & causal(n, m)
    return mx.where(causal(n, m), mask, mx.array(float("-inf"), mask.dtype))


@needs(causal)
def nan_where_blind(y, mask, is_causal, n, m):
    """nan for queries that no key is left to: MLX gives them some average."""
    seen = mx.ones((1, 1, 1, 1), mx.bool_) if mask is None else mask
    if seen.dtype != mx.bool_:
        seen = seen != float("-inf")
    if is_causal:
        seen = seen & causal(n, m)
    blind = mx.logical_not(mx.any(seen, -1, keepdims=True))
    return mx.where(blind, mx.array(float("nan"), y.dtype), y)


# -- primitives of shared helpers ------------------------------------------------------------------------------------
def floor_divide(a, b):
    """Divide integers towards minus infinity: MLX rounds towards zero, and dies of the smallest integer over -1."""
    if not mx.issubdtype(a.dtype, mx.signedinteger):
        return a // b
    safe = mx.where(b == -1, 1, b)
    quotient = a // safe
    rest = a - quotient * safe
    return mx.where(b == -1, -a, quotient - ((rest != 0) & ((rest < 0) != (safe < 0))))


@needs(floordiv_int)
def mod_int(a, b):
    """Return the remainder of integer division; by zero gives zero."""
    return mx.where(b == 0, 0, a - floordiv_int(a, b) * b)


def fmod(a, b):
    """Return the remainder of division towards zero."""
    rest = mx.remainder(mx.abs(a), mx.abs(b))
    rest = mx.where(mx.isinf(b) & mx.isfinite(a), mx.abs(a), rest)
    return mx.where(mx.isinf(a) | (b == 0), float("nan"), mx.where(a < 0, -rest, rest))


def signed_zero(x):
    """Return zeros with the signs of x, which 1 / x tells where x is zero."""
    zero = mx.zeros_like(x)
    return mx.where((x < 0) | (1.0 / x < 0), -zero, zero)


def trunc(x):
    """Numbers rounded towards zero."""
    return mx.where(x < 0, mx.ceil(x), mx.floor(x))


def typed(number, like):
    """Return an integer in the dtype of an array, also of 64 bits."""
    return mx.array(number - 2**64 if number >= 2**63 else number, mx.int64).astype(like.dtype)


def take_along(x, indices, axis):
    """Return elements at one position each along an axis."""
    shape = [a if b == 1 else b for a, b in zip(x.shape, indices.shape)]
    left, right = list(shape), list(shape)
    left[axis], right[axis] = x.shape[axis], indices.shape[axis]
    return mx.take_along_axis(mx.broadcast_to(x, left), mx.broadcast_to(indices, right), axis)


def part_at(x, first, sizes):
    """Return a part of known size at computed starts."""
    if 0 in sizes:
        return mx.zeros(sizes, x.dtype)
    for axis, size in enumerate(sizes):
        if size != x.shape[axis]:
            x = mx.take(x, first[axis] + mx.arange(size), axis)
    return x


def nan_max(x):
    """Return the largest along the first axis; nan wins."""
    if not mx.issubdtype(x.dtype, mx.floating):
        return mx.max(x, axis=0)
    return mx.where(mx.any(x != x, axis=0), float("nan"), mx.max(x, axis=0))


def lowest(x):
    """Return the lowest number of a dtype."""
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
    "saturated": "mx.clip",
    "size": "{0}.size",
    "sizes": "mx.array({0}, mx.int64)",
    "to_word": "{0}.astype(mx.uint32)",
    "word": "mx.array({0}, mx.uint32)",
    "words": "mx.arange({0}, dtype=mx.uint32)",
    "wrapped": "{0}",
    "zeros": "mx.zeros({0}, {1}.dtype)",
}
ARITHMETIC = (floor_divide, fmod, lowest, mod_int, nan_max, signed_zero, trunc, typed)
dialect = Dialect("mx", WORDS, (*ARITHMETIC, argsort, part_at, take_along))
