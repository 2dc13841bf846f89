"""Functions whose source goes into generated files: MLX only, each standing alone save for those it ``needs``."""
# mypy: ignore-errors

import ml_dtypes
import numpy

from mithril.backend.codegen import needs
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
def floordiv_int(a, b):
    """Integer division towards minus infinity; by zero gives zero. MLX dies of the smallest integer over -1."""
    a, b = mx.broadcast_arrays(a, b)
    one = mx.ones_like(b)
    safe = mx.where(b == 0, one, b)
    if not mx.issubdtype(a.dtype, mx.signedinteger):
        return mx.where(b == 0, mx.zeros_like(a), a // safe)
    safe = mx.where(b == -1, one, safe)
    whole = a // safe
    rest = a - whole * safe
    down = mx.where((rest != 0) & ((rest < 0) != (safe < 0)), one, mx.zeros_like(b))
    return mx.where(b == 0, mx.zeros_like(a), mx.where(b == -1, -a, whole - down))


@needs(floordiv_int)
def mod_int(a, b):
    """What integer division leaves; by zero gives zero."""
    return mx.where(b == 0, mx.zeros_like(a), a - floordiv_int(a, b) * b)


def c_remainder(a, b):
    """What division towards zero leaves."""
    rest = mx.remainder(mx.abs(a), mx.abs(b))
    rest = mx.where(mx.isinf(b) & mx.isfinite(a), mx.abs(a), rest)
    return mx.where(a < 0, -rest, rest)


@needs(c_remainder)
def mod_float(a, b):
    """What the quotient rounded down leaves: it has the sign of b."""
    rest = c_remainder(a, b)
    made = mx.where((rest != 0) & ((b < 0) != (rest < 0)), rest + b, rest)
    zero = mx.zeros_like(made)
    made = mx.where(made == 0, mx.where((b < 0) | (1.0 / b < 0), -zero, zero), made)
    return mx.where(mx.isinf(a) | (b == 0), mx.full(made.shape, float("nan"), made.dtype), made)


@needs(c_remainder)
def floordiv_float(a, b):
    """The quotient rounded down, infinities and zeros as in NumPy."""
    rest = c_remainder(a, b)
    whole = (a - rest) / b
    whole = mx.where((rest != 0) & ((b < 0) != (rest < 0)), whole - 1, whole)
    near = mx.floor(whole)
    near = mx.where(whole - near > 0.5, near + 1, near)
    zero = mx.zeros_like(near)
    exact = a / b
    near = mx.where(whole == 0, mx.where((exact < 0) | (1.0 / exact < 0), -zero, zero), near)
    near = mx.where(mx.isinf(a), mx.full(near.shape, float("nan"), near.dtype), near)
    return mx.where(b == 0, exact, near)


def pow_int(a, b):
    """Integer power by squaring, wrapping as it overflows; a negative exponent gives 0, except of 1 and -1."""
    a, b = mx.broadcast_arrays(a, b)
    signed = mx.issubdtype(a.dtype, mx.signedinteger)
    whole, base, rest = mx.ones_like(a), a, mx.maximum(b, mx.zeros_like(b)) if signed else b
    for _ in range(a.dtype.size * 8):
        whole = mx.where((rest & 1) != 0, whole * base, whole)
        base, rest = base * base, rest >> 1
    if not signed:
        return whole
    minus = mx.where((b & 1) != 0, -mx.ones_like(a), mx.ones_like(a))
    unit = mx.where(a == 1, mx.ones_like(a), mx.where(a == -1, minus, mx.zeros_like(a)))
    return mx.where(b < 0, unit, whole)


def cast_to_int(x, dtype, low, high):
    """To an integer dtype: towards zero, saturating, nan as 0."""
    bits = mx.array(high - 2**64 if high >= 2**63 else high, mx.int64).astype(dtype)
    if mx.issubdtype(x.dtype, mx.integer):
        if mx.issubdtype(x.dtype, mx.unsignedinteger):
            if high >= 2**63:
                return x.astype(dtype)
            return mx.minimum(x.astype(mx.uint64), mx.array(high, mx.uint64)).astype(dtype)
        if high > 2**63 - 1:
            return mx.maximum(x.astype(mx.int64), mx.array(0, mx.int64)).astype(dtype)
        return mx.clip(x.astype(mx.int64), mx.array(low, mx.int64), mx.array(high, mx.int64)).astype(dtype)
    wide = x if x.dtype == mx.float64 else x.astype(mx.float32)
    wide = mx.where(mx.isnan(wide), mx.zeros_like(wide), wide)
    inside = mx.where((wide >= float(high)) | (wide <= float(low)), mx.zeros_like(wide), wide)
    inside = mx.where(inside < 0, mx.ceil(inside), mx.floor(inside)).astype(dtype)
    inside = mx.where(wide >= float(high), bits, inside)
    return mx.where(wide <= float(low), mx.array(low, dtype), inside)


def erf(x):
    """Return the error function: near 0, where MLX's is exact in its absolute value only, by its series."""
    z = x if x.dtype == mx.float64 else x.astype(mx.float32)
    total = mx.zeros_like(z)
    for divisor in (-75600, 9360, -1320, 216, -42, 10, -3, 1):
        total = total * z * z + 1 / divisor
    return mx.where(mx.abs(z) < 0.5, z * total * 1.1283791670955126, mx.erf(z)).astype(x.dtype)


def shift_left(a, b):
    """Bits moved up; past the width everything is 0."""
    inside = (b >= 0) & (b < a.dtype.size * 8)
    made = mx.left_shift(a, mx.where(inside, b, mx.zeros_like(b)))
    return mx.where(inside, made, mx.zeros_like(made))


def shift_right(a, b):
    """Bits moved down, the sign copied in."""
    last = a.dtype.size * 8 - 1
    inside = (b >= 0) & (b <= last)
    made = mx.right_shift(a, mx.where(inside, b, mx.zeros_like(b)))
    signed = mx.issubdtype(a.dtype, mx.signedinteger)
    past = mx.right_shift(a, mx.array(last, a.dtype)) if signed else mx.zeros_like(made)
    return mx.where(inside, made, past)


def sign(x):
    """-1, 0 or 1; nan stays."""
    return mx.where(mx.isnan(x), x, mx.sign(x)) if mx.issubdtype(x.dtype, mx.floating) else mx.sign(x)


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


extreme = needs(reduced)(extreme)


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


def dot(a, b, contract_a, contract_b, batch_a, batch_b, product):
    """Products summed over paired axes: [batch, rest of a, rest of b]."""
    rest_a = [k for k in range(a.ndim) if k not in contract_a and k not in batch_a]
    rest_b = [k for k in range(b.ndim) if k not in contract_b and k not in batch_b]
    left = mx.transpose(a, (*batch_a, *rest_a, *contract_a))
    right = mx.transpose(b, (*batch_b, *contract_b, *rest_b))
    batch, rows, columns = ([a.shape[k] for k in batch_a], [a.shape[k] for k in rest_a], [b.shape[k] for k in rest_b])
    inner, m, n = 1, 1, 1
    for k in contract_a:
        inner = inner * a.shape[k]
    for k in rows:
        m = m * k
    for k in columns:
        n = n * k
    made = product(left.reshape((*batch, m, inner)), right.reshape((*batch, inner, n)))
    return made.reshape((*batch, *rows, *columns))


# -- shapes -------------------------------------------------------------------------------------------------------
def flip(x, axes):
    """Elements in reverse order along axes."""
    for axis in axes:
        x = mx.take(x, mx.arange(x.shape[axis] - 1, -1, -1), axis) if x.shape[axis] else x
    return x


def part(x, axis, start, stop, step):
    """Every step-th element along an axis, backwards too."""
    at = range(x.shape[axis])[start:stop:step]
    if not len(at):
        return mx.zeros((*x.shape[:axis], 0, *x.shape[axis + 1 :]), x.dtype)
    return mx.take(x, mx.arange(at.start, at.stop, at.step), axis)


def pad_inside(x, widths, mode):
    """Elements added before and after along each axis: the mirrored inside, or the edge."""
    for axis, (before, after) in enumerate(widths):
        if before or after:
            n = x.shape[axis]
            at = mx.arange(-before, n + after)
            inside = mx.clip(at, 0, n - 1)
            x = mx.take(x, inside if mode == "edge" else 2 * inside - at, axis)
    return x


def triangle(x, function, k):
    """The lower or upper triangle, of matrices without elements too."""
    return function(x, k=k) if x.size else x


# -- places -------------------------------------------------------------------------------------------------------
def positions(indices, size):
    """Positions counted from the front and clamped; MLX must be told that they have no gradient."""
    wide = mx.stop_gradient(indices).astype(mx.int64)
    return mx.clip(mx.where(wide < 0, wide + size, wide), 0, max(size - 1, 0))


@needs(positions)
def take(x, indices, axis):
    """Elements at positions along an axis."""
    if not indices.size or not x.size:
        return mx.zeros((*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]), x.dtype)
    return mx.take(x, positions(indices, x.shape[axis]), axis)


@needs(positions)
def take_along_axis(x, indices, axis):
    """Elements at positions of their own along an axis."""
    shape = []
    for k, (a, b) in enumerate(zip(x.shape, indices.shape)):
        shape.append(a if b == 1 else b) if k != axis else shape.append(0)
    left, right = list(shape), list(shape)
    left[axis], right[axis] = x.shape[axis], indices.shape[axis]
    x, indices = mx.broadcast_to(x, left), mx.broadcast_to(indices, right)
    if not indices.size:
        return mx.zeros(right, x.dtype)
    return mx.take_along_axis(x, positions(indices, x.shape[axis]), axis)


@needs(positions)
def addressed(x, indices, first=0):
    """A tuple of position arrays, one per axis addressed."""
    return tuple(positions(indices[..., k], x.shape[first + k]) for k in range(indices.shape[-1]))


@needs(addressed)
def gather_nd(x, indices, batch_dims):
    """Elements at positions in several axes."""
    depth = indices.shape[-1]
    shape = (*indices.shape[:-1], *x.shape[batch_dims + depth :])
    if 0 in shape:
        return mx.zeros(shape, x.dtype)
    if not depth and not batch_dims:
        return mx.broadcast_to(x, shape)
    batch = []
    for k in range(batch_dims):
        own = [1] * (indices.ndim - 1)
        own[k] = x.shape[k]
        batch.append(mx.broadcast_to(mx.arange(x.shape[k]).reshape(own), indices.shape[:-1]))
    return x[(*batch, *addressed(x, indices, batch_dims))]


@needs(addressed)
def scatter_nd(x, indices, updates):
    """x with elements replaced; of several updates of one place the last wins."""
    depth = indices.shape[-1]
    if not updates.size:
        return x
    flat = updates.reshape(-1, *x.shape[depth:])
    n = flat.shape[0]
    if not depth:
        return flat[n - 1].reshape(x.shape)
    at = addressed(x, indices.reshape(-1, depth))
    place = mx.zeros((n,), mx.int64)
    count = 1
    for size, one in zip(x.shape[:depth], at):
        place = place * size + one
        count *= size
    order = mx.full((count,), -1, mx.int32).at[place].maximum(mx.arange(n, dtype=mx.int32))
    last = mx.take(flat, mx.maximum(order, 0), 0).reshape(x.shape)
    touched = (order >= 0).reshape(*x.shape[:depth], *[1] * (x.ndim - depth))
    return mx.where(touched, last, x)


@needs(addressed)
def scatter_nd_add(x, indices, updates):
    """x with updates added."""
    depth = indices.shape[-1]
    wide = x.astype(mx.float32) if x.dtype in (mx.float16, mx.bfloat16) else x
    if not updates.size:
        return x
    flat = updates.astype(wide.dtype).reshape(-1, *x.shape[depth:])
    if not depth:
        return (wide + mx.sum(flat, axis=0)).astype(x.dtype)
    return wide.at[addressed(x, indices.reshape(-1, depth))].add(flat).astype(x.dtype)


def window_start(x, starts, sizes):
    """Starts of a part, counted from the front and moved inside."""
    n = mx.array(x.shape, mx.int64)
    wide = starts.astype(mx.int64)
    front = mx.where(wide < 0, wide + n, wide)
    return mx.minimum(mx.maximum(front, 0), n - mx.array(sizes, mx.int64))


@needs(window_start)
def dynamic_slice(x, starts, sizes):
    """A part of known size at computed starts."""
    if not x.ndim:
        return x
    first = window_start(x, starts, sizes)
    for axis, size in enumerate(sizes):
        if size != x.shape[axis]:
            if not size:
                return mx.zeros(sizes, x.dtype)
            x = mx.take(x, first[axis] + mx.arange(size), axis)
    return x


@needs(window_start)
def dynamic_update_slice(x, update, starts):
    """x with a part overwritten."""
    if not update.size:
        return x
    if not x.ndim:
        return update
    first = window_start(x, starts, update.shape)
    return mx.slice_update(x, update, first, tuple(range(x.ndim)))


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


def window_parts(x, kernel, stride, padding, dilation, fill):
    """For every element of the kernel the elements that meet it: a list of [batch, channels, ...]."""
    x = mx.pad(x, [(0, 0), (0, 0), *padding], constant_values=mx.array(fill, x.dtype))
    counts = [(n - (k - 1) * d - 1) // s + 1 for n, k, s, d in zip(x.shape[2:], kernel, stride, dilation)]
    grid = [()]
    for k in kernel:
        grid = [(*at, i) for at in grid for i in range(k)]
    parts = []
    for at in grid:
        low = [k * d for k, d in zip(at, dilation)]
        cut = [slice(a, a + (n - 1) * s + 1, s) for a, n, s in zip(low, counts, stride)]
        parts.append(x[(slice(None), slice(None), *cut)])
    return parts


@needs(conv)
def conv_weight_grad(x, g, shape, stride, padding, dilation, groups):
    """The cotangent of a convolution's kernel."""
    w = mx.zeros(shape, x.dtype)
    return mx.vjp(lambda w: [conv(x, w, stride, padding, dilation, groups)], [w], [g])[1][0]


@needs(window_parts)
def max_pool(x, kernel, stride, padding, dilation, lowest):
    """The largest element of each window; nan wins."""
    parts = window_parts(x, kernel, stride, padding, dilation, lowest)
    made = parts[0]
    for one in parts[1:]:
        made = mx.maximum(made, one)
    return made


@needs(window_parts)
def max_pool_positions(x, kernel, stride, padding, dilation, lowest):
    """The number of each window's first maximum within its channel; -1 where there is only padding."""
    met = mx.stack(window_parts(x, kernel, stride, padding, dilation, lowest))
    count = 1
    for n in x.shape[2:]:
        count *= n
    numbers = mx.arange(count, dtype=mx.int32).reshape(1, 1, *x.shape[2:])
    numbers = mx.stack(window_parts(numbers, kernel, stride, padding, dilation, -1))
    bad = met != met
    top = mx.max(met, axis=0)
    hits = mx.where(mx.any(bad, axis=0), bad, met == top) & (numbers >= 0)
    first = mx.argmax(hits.astype(mx.int32), axis=0, keepdims=True)
    found = mx.take_along_axis(mx.broadcast_to(numbers, met.shape), first, 0)
    return mx.where(mx.take_along_axis(hits, first, 0), found, mx.array(-1, mx.int32))[0]


@needs(window_parts)
def pool_counts(dtype, shape, kernel, stride, padding, count_include_pad):
    """How many elements each window averages."""
    size = 1
    for k in kernel:
        size *= k
    if count_include_pad or not any(n for pair in padding for n in pair):
        return size
    return sum(window_parts(mx.ones((1, 1, *shape[2:]), dtype), kernel, stride, padding, (1,) * len(kernel), 0))


@needs(pool_counts, window_parts)
def avg_pool(x, kernel, stride, padding, count_include_pad):
    """The mean of each window."""
    z = x.astype(mx.float32) if x.dtype in (mx.float16, mx.bfloat16) else x
    parts = window_parts(z, kernel, stride, padding, (1,) * len(kernel), 0)
    return (sum(parts) / pool_counts(z.dtype, x.shape, kernel, stride, padding, count_include_pad)).astype(x.dtype)


@needs(pool_counts)
def avg_pool_grad(g, shape, kernel, stride, padding, count_include_pad):
    """The cotangent of an average pool's operand."""
    z = g.astype(mx.float32) if g.dtype in (mx.float16, mx.bfloat16) else g
    share = z / pool_counts(z.dtype, shape, kernel, stride, padding, count_include_pad)
    made = mx.zeros((*shape[:2], *[n + a + b for n, (a, b) in zip(shape[2:], padding)]), z.dtype)
    grid = [()]
    for k in kernel:
        grid = [(*at, i) for at in grid for i in range(k)]
    for at in grid:
        cut = [slice(a, a + (n - 1) * s + 1, s) for a, n, s in zip(at, g.shape[2:], stride)]
        made = made.at[(slice(None), slice(None), *cut)].add(share)
    inside = [slice(before, before + n) for (before, _), n in zip(padding, shape[2:])]
    return made[(slice(None), slice(None), *inside)].astype(g.dtype)


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


# -- random -------------------------------------------------------------------------------------------------------
def threefry(key, high, low):
    """Twenty rounds of Threefry-2x32 over pairs of words."""
    keys = (key[0], key[1], key[0] ^ key[1] ^ mx.array(0x1BD11BDA, mx.uint32))
    x0, x1 = high + keys[0], low + keys[1]
    for block in range(5):
        for r in ((13, 15, 26, 6), (17, 29, 16, 24))[block % 2]:
            x0 = x0 + x1
            x1 = ((x1 << mx.array(r, mx.uint32)) | (x1 >> mx.array(32 - r, mx.uint32))) ^ x0
        x0 = x0 + keys[(block + 1) % 3]
        x1 = x1 + keys[(block + 2) % 3] + mx.array(block + 1, mx.uint32)
    return x0, x1


@needs(threefry)
def random_bits(key, shape):
    """Uniform 32-bit words."""
    count = 1
    for n in shape:
        count *= n
    low = mx.arange(count, dtype=mx.uint32)
    a, b = threefry(key, mx.zeros_like(low), low)
    return (a ^ b).reshape(shape)


@needs(threefry)
def split_key(key, num):
    """Independent keys as rows."""
    low = mx.arange(num, dtype=mx.uint32)
    return mx.stack(threefry(key, mx.zeros_like(low), low), axis=1)


@needs(threefry)
def fold_in(key, data):
    """The key mixed with an integer."""
    word = data.astype(mx.uint32)
    return mx.stack(threefry(key, mx.zeros_like(word), word))
