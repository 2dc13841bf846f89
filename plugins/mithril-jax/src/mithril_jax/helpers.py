"""Functions whose source goes into generated files: JAX only, each standing alone save for those it ``needs``."""
# mypy: ignore-errors

import jax
import jax.numpy as jnp
from jax import lax

from mithril.backend.codegen import needs


def on_host(function, types, *arrays):
    """Results of a function of NumPy arrays, called by the compiled program."""
    results = tuple(jax.ShapeDtypeStruct(shape, dtype) for dtype, shape in types)
    return jax.pure_callback(function, results, *arrays, vmap_method="sequential")


# -- element-wise -------------------------------------------------------------------------------------------------
def floordiv_int(a, b):
    """Integer division towards minus infinity; by zero gives zero."""
    return jnp.where(b == 0, 0, jnp.floor_divide(a, jnp.where(b == 0, 1, b))).astype(a.dtype)


def floordiv_float(a, b):
    """Divide toward minus infinity; a quotient of zero has the sign of a / b, which XLA's floor loses."""
    quotient = jnp.floor_divide(a, b)
    return jnp.where(quotient == 0, 0 * (a / b), quotient)


def mod_float(a, b):
    """Return the remainder with the sign of b, also where it is zero."""
    remainder = jnp.mod(a, b)
    return jnp.where(remainder == 0, jnp.copysign(remainder, b), remainder)


def mod_int(a, b):
    """What integer division leaves; by zero gives zero."""
    return jnp.where(b == 0, 0, jnp.mod(a, jnp.where(b == 0, 1, b))).astype(a.dtype)


def pow_int(a, b):
    """Integer power by squaring, wrapping as it overflows; a negative exponent gives 0, except of 1 and -1."""
    whole, base, rest = jnp.ones_like(a * b), a, jnp.maximum(b, 0)
    for _ in range(a.dtype.itemsize * 8):
        whole = jnp.where(rest & 1, whole * base, whole)
        base, rest = base * base, rest >> 1
    if not jnp.issubdtype(a.dtype, jnp.signedinteger):
        return whole
    unit = jnp.where(a == 1, 1, jnp.where(a == -1, 1 - 2 * (b & 1), 0)).astype(a.dtype)
    return jnp.where(b < 0, unit, whole)


def cast_to_int(x, dtype):
    """To an integer dtype: towards zero, saturating, nan as 0."""
    low, high = jnp.iinfo(dtype).min, jnp.iinfo(dtype).max
    if x.dtype == jnp.bool_:
        return x.astype(dtype)
    if jnp.issubdtype(x.dtype, jnp.integer):
        own = jnp.iinfo(x.dtype)
        bounds = (jnp.array(n, x.dtype) for n in (max(low, own.min), min(high, own.max)))
        return jnp.clip(x, *bounds).astype(dtype)
    wide = jnp.trunc(jnp.where(jnp.isnan(x), 0, x))
    inside = wide.astype(jnp.float32) if x.dtype.itemsize == 2 else wide
    made = jnp.where((inside >= float(high)) | (inside <= float(low)), 0, inside).astype(dtype)
    highest, lowest = jnp.array(high, dtype), jnp.array(low, dtype)
    return jnp.where(inside >= float(high), highest, jnp.where(inside <= float(low), lowest, made))


def shift_left(a, b):
    """Bits moved up; past the width everything is 0."""
    inside = (b >= 0) & (b < a.dtype.itemsize * 8)
    return jnp.where(inside, jnp.left_shift(a, jnp.where(inside, b, 0).astype(a.dtype)), 0).astype(a.dtype)


def shift_right(a, b):
    """Bits moved down, the sign copied in."""
    bits = a.dtype.itemsize * 8
    inside = (b >= 0) & (b < bits)
    past = (
        jnp.right_shift(a, jnp.asarray(bits - 1, a.dtype))
        if jnp.issubdtype(a.dtype, jnp.signedinteger)
        else jnp.zeros_like(a)
    )
    return jnp.where(inside, jnp.right_shift(a, jnp.where(inside, b, 0).astype(a.dtype)), past).astype(a.dtype)


# -- reductions ---------------------------------------------------------------------------------------------------
def running(x, accumulate, start, axis, reverse, exclusive):
    """A running sum or product, from either end, with or without the element itself."""
    z = x.astype(jnp.float32) if x.dtype in (jnp.float16, jnp.bfloat16) else x
    z = jnp.flip(z, axis) if reverse else z
    out = accumulate(z, axis=axis, dtype=z.dtype)
    if exclusive:
        shape = list(out.shape)
        shape[axis] = 1
        first = jnp.full(shape, start, out.dtype)
        out = (
            jnp.concatenate([first, lax.slice_in_dim(out, 0, out.shape[axis] - 1, axis=axis)], axis)
            if out.shape[axis]
            else out
        )
    return (jnp.flip(out, axis) if reverse else out).astype(x.dtype)


# -- places -------------------------------------------------------------------------------------------------------
def positions(indices, size):
    """Positions counted from the front and clamped."""
    if not jnp.issubdtype(indices.dtype, jnp.signedinteger):
        return jnp.minimum(indices, size - 1).astype(jnp.int32)
    wide = indices if indices.dtype.itemsize >= 4 else indices.astype(jnp.int32)
    return jnp.clip(jnp.where(wide < 0, wide + size, wide), 0, size - 1)


@needs(positions)
def take(x, indices, axis):
    """Elements at positions along an axis."""
    if not indices.size:
        return jnp.zeros((*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]), x.dtype)
    return jnp.take(x, positions(indices, x.shape[axis]), axis, mode="clip")


@needs(positions)
def take_along_axis(x, indices, axis):
    """Elements at positions of their own along an axis."""
    if not indices.size:
        left = tuple(1 if k == axis else n for k, n in enumerate(x.shape))
        right = tuple(1 if k == axis else n for k, n in enumerate(indices.shape))
        shape = list(jnp.broadcast_shapes(left, right))
        shape[axis] = indices.shape[axis]
        return jnp.zeros(shape, x.dtype)
    return jnp.take_along_axis(x, positions(indices, x.shape[axis]), axis, mode="clip")


@needs(positions)
def addressed(x, indices):
    """A tuple of position arrays, one per axis addressed."""
    return tuple(positions(indices[..., k], x.shape[k]) for k in range(indices.shape[-1]))


@needs(addressed)
def gather_nd(x, indices, batch_dims):
    """Elements at positions in several axes."""
    depth = indices.shape[-1]
    if not indices[..., :1].size and depth:
        return jnp.zeros((*indices.shape[:-1], *x.shape[batch_dims + depth :]), x.dtype)
    if batch_dims:
        return jax.vmap(lambda a, b: gather_nd(a, b, batch_dims - 1))(x, indices)
    if not depth:
        return jnp.broadcast_to(x, (*indices.shape[:-1], *x.shape))
    return x[addressed(x, indices)]


@needs(addressed)
def scatter_nd(x, indices, updates):
    """x with elements replaced; of several updates of one place the last wins."""
    depth = indices.shape[-1]
    if not updates.size:
        return x
    at = addressed(x, indices.reshape(-1, depth))
    flat = updates.reshape(-1, *x.shape[depth:])
    n = flat.shape[0]
    if not depth:
        return flat[n - 1].reshape(x.shape) if n else x
    order = jnp.full(x.shape[:depth], -1, jnp.int32).at[at].max(jnp.arange(n, dtype=jnp.int32))
    last = flat[jnp.clip(order, 0, n - 1)]
    touched = (order >= 0).reshape(*order.shape, *[1] * (x.ndim - depth))
    return jnp.where(touched, last, x)


@needs(addressed)
def scatter_nd_add(x, indices, updates):
    """x with updates added."""
    depth = indices.shape[-1]
    if not updates.size:
        return x
    wide = x.astype(jnp.float32) if x.dtype in (jnp.float16, jnp.bfloat16) else x
    if not depth:
        return (wide + updates.astype(wide.dtype).reshape(-1, *x.shape).sum(0, dtype=wide.dtype)).astype(x.dtype)
    at = addressed(x, indices.reshape(-1, depth))
    return wide.at[at].add(updates.reshape(-1, *x.shape[depth:]).astype(wide.dtype)).astype(x.dtype)


def window_start(x, starts, sizes):
    """Starts of a part, counted from the front and moved inside."""
    n = jnp.asarray(x.shape, starts.dtype)
    front = jnp.where(starts < 0, starts + n, starts) if jnp.issubdtype(starts.dtype, jnp.signedinteger) else starts
    inside = jnp.clip(front, 0, n - jnp.asarray(sizes, starts.dtype))
    return tuple(inside[k] for k in range(x.ndim))


@needs(window_start)
def dynamic_slice(x, starts, sizes):
    """A part of known size at computed starts."""
    return lax.dynamic_slice(x, window_start(x, starts, sizes), sizes)


@needs(window_start)
def dynamic_update_slice(x, update, starts):
    """x with a part overwritten."""
    return lax.dynamic_update_slice(x, update, window_start(x, starts, update.shape))


def argsort(x, axis, descending):
    """Positions in order; equal ones keep theirs, nan last."""
    if jnp.issubdtype(x.dtype, jnp.floating):
        key = -x if descending else x
        key = jnp.where(jnp.isnan(key), jnp.nan, key)
        key = jnp.where(key == 0, 0, key)
    else:
        key = ~x if descending else x
    return jnp.argsort(key, axis=axis, stable=True)


def pad_inside(x, widths, mode):
    """Elements added before and after along each axis: the mirrored inside, or the edge."""
    for axis, (before, after) in enumerate(widths):
        if before or after:
            n = x.shape[axis]
            at = jnp.arange(-before, n + after)
            inside = jnp.clip(at, 0, n - 1)
            x = jnp.take(x, inside if mode == "edge" else 2 * inside - at, axis)
    return x


# -- windows ------------------------------------------------------------------------------------------------------
def taps(kernel, counts, stride, dilation):
    """For every element of a kernel, where the pixels that it meets begin and end."""
    grid = [()]
    for k in kernel:
        grid = [(*at, i) for at in grid for i in range(k)]
    low = [[k * d for k, d in zip(at, dilation)] for at in grid]
    return [(begin, [b + (n - 1) * s + 1 for b, n, s in zip(begin, counts, stride)]) for begin in low]


@needs(taps)
def window_parts(x, kernel, stride, padding, dilation, fill):
    """For every element of the kernel the elements that meet it, each [batch, channels, ...]."""
    padded = jnp.pad(x, ((0, 0), (0, 0), *padding), constant_values=fill)
    counts = [(n - (k - 1) * d - 1) // s + 1 for n, k, s, d in zip(padded.shape[2:], kernel, stride, dilation)]
    steps = (1, 1, *stride)
    return [
        lax.slice(padded, (0, 0, *low), (*padded.shape[:2], *high), steps)
        for low, high in taps(kernel, counts, stride, dilation)
    ]


@needs(window_parts)
def columns(x, kernel, stride, padding, dilation, groups):
    """What each result element meets: [batch, groups, channels / groups * kernel, elements].

    Without the barrier XLA may gather them anew for each element of a product.
    """
    parts = window_parts(x, kernel, stride, padding, dilation, 0)
    met = jnp.stack(parts, 2).reshape(x.shape[0], groups, x.shape[1] // groups * len(parts), -1)
    return lax.optimization_barrier(met)


@needs(columns)
def conv_by_columns(x, w, shape, stride, padding, dilation, groups):
    """Convolution as one product."""
    wide = jnp.float32 if x.dtype in (jnp.float16, jnp.bfloat16) else x.dtype
    kernels = w.reshape(groups, w.shape[0] // groups, -1)
    met = columns(x, w.shape[2:], stride, padding, dilation, groups)
    return jnp.matmul(kernels, met, preferred_element_type=wide).reshape(shape).astype(x.dtype)


@needs(taps)
def conv_input_grad_by_columns(g, w, shape, stride, padding, dilation, groups):
    """The cotangent of a convolution's image: one product, each row of which goes where a kernel's element met it."""
    wide = jnp.float32 if g.dtype in (jnp.float16, jnp.bfloat16) else g.dtype
    kernels = jnp.swapaxes(w.reshape(groups, w.shape[0] // groups, -1), 1, 2)
    cotangents = lax.optimization_barrier(g.reshape(g.shape[0], groups, w.shape[0] // groups, -1))
    met = jnp.matmul(kernels, cotangents, preferred_element_type=wide)
    met = lax.optimization_barrier(met).reshape(*shape[:2], -1, *g.shape[2:])
    whole = [n + a + b for n, (a, b) in zip(shape[2:], padding)]
    padded = jnp.zeros((*shape[:2], *whole), wide)
    for k, (low, high) in enumerate(taps(w.shape[2:], g.shape[2:], stride, dilation)):
        edges = [(b, n - e, s - 1) for b, e, n, s in zip(low, high, whole, stride)]
        padded += lax.pad(met[:, :, k], jnp.zeros((), wide), [(0, 0, 0), (0, 0, 0), *edges])
    inside = [slice(a, a + n) for n, (a, _) in zip(shape[2:], padding)]
    return padded[(slice(None), slice(None), *inside)].astype(g.dtype)


@needs(columns)
def conv_weight_grad_by_columns(x, g, shape, stride, padding, dilation, groups):
    """The cotangent of a convolution's kernel as one product."""
    wide = jnp.float32 if g.dtype in (jnp.float16, jnp.bfloat16) else g.dtype
    met = columns(x, shape[2:], stride, padding, dilation, groups)
    cotangents = g.reshape(g.shape[0], groups, shape[0] // groups, -1)
    made = jnp.einsum("ngop,ngkp->gok", cotangents, met, preferred_element_type=wide)
    return made.reshape(shape).astype(g.dtype)


def conv(x, w, stride, padding, dilation, groups):
    """Convolution of [batch, channels, ...] images, 16-bit floats accumulating in float32."""
    rank = w.ndim - 2
    spatial = "DHW"[3 - rank :]
    numbers = ("NC" + spatial, "OI" + spatial, "NC" + spatial)
    wide = jnp.float32 if x.dtype in (jnp.float16, jnp.bfloat16) else None
    made = lax.conv_general_dilated(
        x,
        w,
        stride,
        padding,
        rhs_dilation=dilation,
        dimension_numbers=numbers,
        feature_group_count=groups,
        preferred_element_type=wide,
    )
    return made.astype(x.dtype)


@needs(conv)
def conv_grads(g, x, w, stride, padding, dilation, groups):
    """The cotangents of a convolution's image and kernel."""
    wide = jnp.float32 if g.dtype in (jnp.float16, jnp.bfloat16) else g.dtype
    x, w, g = x.astype(wide), w.astype(wide), g.astype(wide)
    return jax.vjp(lambda a, b: conv(a, b, stride, padding, dilation, groups), x, w)[1](g)


@needs(conv_grads)
def conv_input_grad(g, w, shape, stride, padding, dilation, groups):
    """The cotangent of a convolution's image."""
    return conv_grads(g, jnp.zeros(shape, g.dtype), w, stride, padding, dilation, groups)[0].astype(g.dtype)


@needs(conv_grads)
def conv_weight_grad(x, g, shape, stride, padding, dilation, groups):
    """The cotangent of a convolution's kernel."""
    return conv_grads(g, x, jnp.zeros(shape, g.dtype), stride, padding, dilation, groups)[1].astype(g.dtype)


def max_pool(x, kernel, stride, padding, dilation):
    """The largest element of each window; nan wins."""
    low = -jnp.inf if jnp.issubdtype(x.dtype, jnp.floating) else jnp.iinfo(x.dtype).min
    low = jnp.dtype(x.dtype).type(low)  # a known number: JAX differentiates maxima, not reductions from unknown starts
    return lax.reduce_window(
        x, low, lax.max, (1, 1, *kernel), (1, 1, *stride), ((0, 0), (0, 0), *padding), window_dilation=(1, 1, *dilation)
    )


@needs(window_parts)
def max_pool_positions(x, kernel, stride, padding, dilation):
    """The number of each window's first maximum within its channel; -1 where there is only padding."""
    low = -jnp.inf if jnp.issubdtype(x.dtype, jnp.floating) else jnp.iinfo(x.dtype).min
    met = jnp.stack(window_parts(x, kernel, stride, padding, dilation, low))
    count = 1
    for n in x.shape[2:]:
        count *= n
    numbers = jnp.arange(count, dtype=jnp.int32).reshape(1, 1, *x.shape[2:])
    numbers = jnp.stack(window_parts(numbers, kernel, stride, padding, dilation, -1))
    top = jnp.max(met, axis=0)
    hits = ((met == top) | (jnp.isnan(met) & jnp.isnan(top))) & (numbers >= 0)
    # A window's elements come in the order of their numbers, so the first is the least; looking it up would be a
    # gather, for which XLA writes the numbers of all windows to memory.
    first = jnp.min(jnp.where(hits, numbers, count), axis=0)
    return jnp.where(first < count, first, -1).astype(jnp.int32)


def pool_counts(shape, kernel, stride, padding, count_include_pad, dtype):
    """How many elements each window averages."""
    if count_include_pad:
        size = 1
        for k in kernel:
            size *= k
        return jnp.asarray(size, dtype)
    ones = jnp.ones((1, 1, *shape[2:]), dtype)
    zero = jnp.dtype(dtype).type(0)  # a known number: JAX differentiates sums, not reductions from unknown starts
    return lax.reduce_window(ones, zero, lax.add, (1, 1, *kernel), (1, 1, *stride), ((0, 0), (0, 0), *padding))


@needs(pool_counts)
def avg_pool(x, kernel, stride, padding, count_include_pad):
    """The mean of each window."""
    z = x.astype(jnp.float32) if x.dtype in (jnp.float16, jnp.bfloat16) else x
    zero = z.dtype.type(0)
    total = lax.reduce_window(z, zero, lax.add, (1, 1, *kernel), (1, 1, *stride), ((0, 0), (0, 0), *padding))
    return (total / pool_counts(x.shape, kernel, stride, padding, count_include_pad, z.dtype)).astype(x.dtype)


@needs(avg_pool)
def avg_pool_grad(g, shape, kernel, stride, padding, count_include_pad):
    """The cotangent of an average pool's operand."""
    z = g.astype(jnp.float32) if g.dtype in (jnp.float16, jnp.bfloat16) else g
    pull = jax.vjp(lambda x: avg_pool(x, kernel, stride, padding, count_include_pad), jnp.zeros(shape, z.dtype))[1]
    return pull(z)[0].astype(g.dtype)


# -- random -------------------------------------------------------------------------------------------------------
def threefry(key, high, low):
    """Twenty rounds of Threefry-2x32 over pairs of words."""
    keys = (key[0], key[1], key[0] ^ key[1] ^ jnp.uint32(0x1BD11BDA))
    x0, x1 = high + keys[0], low + keys[1]
    for block in range(5):
        for r in ((13, 15, 26, 6), (17, 29, 16, 24))[block % 2]:
            x0 = x0 + x1
            x1 = ((x1 << jnp.uint32(r)) | (x1 >> jnp.uint32(32 - r))) ^ x0
        x0 = x0 + keys[(block + 1) % 3]
        x1 = x1 + keys[(block + 2) % 3] + jnp.uint32(block + 1)
    return x0, x1


@needs(threefry)
def random_bits(key, shape):
    """Uniform 32-bit words."""
    count = 1
    for n in shape:
        count *= n
    low = jnp.arange(count, dtype=jnp.uint32)
    a, b = threefry(key, jnp.zeros_like(low), low)
    return (a ^ b).reshape(shape)


@needs(threefry)
def split_key(key, num):
    """Independent keys as rows."""
    low = jnp.arange(num, dtype=jnp.uint32)
    return jnp.stack(threefry(key, jnp.zeros_like(low), low), axis=1)


@needs(threefry)
def fold_in(key, data):
    """The key mixed with an integer."""
    return jnp.stack(threefry(key, jnp.uint32(0), jnp.asarray(data).astype(jnp.uint32)))
