"""Functions whose source goes into generated files: JAX only, each standing alone save for those it ``needs``."""
# mypy: ignore-errors

import jax
import jax.numpy as jnp
from jax import lax

from mithril.backend import Dialect, needs, single, taps, window_parts


def on_host(function, types, *arrays):
    """Results of a function of NumPy arrays, called by the compiled program."""
    results = tuple(jax.ShapeDtypeStruct(shape, dtype) for dtype, shape in types)
    return jax.pure_callback(function, results, *arrays, vmap_method="sequential")


# -- element-wise -------------------------------------------------------------------------------------------------
def floordiv_float(a, b):
    """Divide toward minus infinity; a quotient of zero has the sign of a / b, which XLA's floor loses."""
    quotient = jnp.floor_divide(a, b)
    return jnp.where(quotient == 0, 0 * (a / b), quotient)


def mod_float(a, b):
    """Return the remainder with the sign of b, also where it is zero."""
    remainder = jnp.mod(a, b)
    return jnp.where(remainder == 0, jnp.copysign(remainder, b), remainder)


# -- places -------------------------------------------------------------------------------------------------------
def index(indices):
    """Positions as signed integers of 32 bits or more."""
    if jnp.issubdtype(indices.dtype, jnp.signedinteger):
        return indices if indices.dtype.itemsize >= 4 else indices.astype(jnp.int32)
    return (jnp.minimum(indices, 2**31 - 1) if indices.dtype.itemsize >= 4 else indices).astype(jnp.int32)


def float_key(x):
    """Floats as JAX sorts them: one nan, and one zero."""
    return jnp.where(jnp.isnan(x), jnp.nan, jnp.where(x == 0, 0, x))


# -- windows ------------------------------------------------------------------------------------------------------
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
    for k, cut in enumerate(taps(w.shape[2:], g.shape[2:], stride, dilation)):
        edges = [(part.start, n - part.stop, part.step - 1) for part, n in zip(cut[2:], whole)]
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


def lowest(x):
    """Return the lowest number of a dtype."""
    return x.dtype.type(-jnp.inf if jnp.issubdtype(x.dtype, jnp.floating) else jnp.iinfo(x.dtype).min)


@needs(lowest)
def max_pool(x, kernel, stride, padding, dilation):
    """The largest element of each window; nan wins."""
    low = lowest(x)  # a known number: JAX differentiates maxima, not reductions from unknown starts
    return lax.reduce_window(
        x, low, lax.max, (1, 1, *kernel), (1, 1, *stride), ((0, 0), (0, 0), *padding), window_dilation=(1, 1, *dilation)
    )


@needs(lowest)
def max_pool_positions_by_windows(x, kernel, stride, padding, dilation):
    """Return the position of each window's first maximum: one reduction, whatever the size of the kernel."""
    count = 1
    for n in x.shape[2:]:
        count *= n
    numbers = jnp.broadcast_to(jnp.arange(count, dtype=jnp.int32).reshape(1, 1, *x.shape[2:]), x.shape)

    def better(a, b):
        (top, first), (other, number) = a, b
        is_nan = jnp.logical_and(other != other, top == top)
        is_equal = (other == top) | ((other != other) & (top != top))
        wins = is_nan | ((other > top) & (top == top)) | (is_equal & (number < first))
        return jnp.where(wins, other, top), jnp.where(wins, number, first)

    start = (lowest(x), jnp.int32(count))
    borders = ((0, 0), (0, 0), *padding)
    window = ((1, 1, *kernel), (1, 1, *stride), borders)
    first = lax.reduce_window((x, numbers), start, better, *window, window_dilation=(1, 1, *dilation))[1]
    return jnp.where(first < count, first, -1)


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


@needs(pool_counts, single)
def avg_pool(x, kernel, stride, padding, count_include_pad):
    """The mean of each window."""
    z = single(x)
    zero = z.dtype.type(0)
    total = lax.reduce_window(z, zero, lax.add, (1, 1, *kernel), (1, 1, *stride), ((0, 0), (0, 0), *padding))
    return (total / pool_counts(x.shape, kernel, stride, padding, count_include_pad, z.dtype)).astype(x.dtype)


@needs(avg_pool, single)
def avg_pool_grad(g, shape, kernel, stride, padding, count_include_pad):
    """The cotangent of an average pool's operand."""
    z = single(g)
    pull = jax.vjp(lambda x: avg_pool(x, kernel, stride, padding, count_include_pad), jnp.zeros(shape, z.dtype))[1]
    return pull(z)[0].astype(g.dtype)


# -- shared helpers in JAX's words -------------------------------------------------------------------------------------
WORDS = {
    "add_at": "{0}.at[{1}].add({2})",
    "as_words": "{0}",
    "astype": "{0}.astype({1})",
    "bits": "{0}.dtype.itemsize * 8",
    "bordered": "jnp.pad({0}, ((0, 0), (0, 0), *{1}), constant_values={2})",
    "copy": "{0}",
    "is_float": "jnp.issubdtype({0}.dtype, jnp.floating)",
    "is_half": "{0}.dtype in (jnp.float16, jnp.bfloat16)",
    "is_signed": "jnp.issubdtype({0}.dtype, jnp.signedinteger)",
    "key_words": "{0}",
    "latest": "jnp.full(({0},), -1, jnp.int32).at[{1}].max(jnp.arange({2}, dtype=jnp.int32))",
    "nan_max": "jnp.max({0}, axis=0)",
    "nonnegative": "jnp.maximum({0}, 0)",
    "numbers": "jnp.arange({0})",
    "part_at": "lax.dynamic_slice({0}, tuple({1}), {2})",
    "put_part": "lax.dynamic_update_slice({0}, {2}, tuple({1}))",
    "saturated": "jnp.clip",
    "size": "{0}.size",
    "sizes": "jnp.asarray({0}, {1}.dtype)",
    "stable_argsort": "jnp.argsort({0}, axis={1}, stable=True)",
    "take": 'jnp.take({0}, {1}, {2}, mode="clip")',
    "take_along": 'jnp.take_along_axis({0}, {1}, {2}, mode="clip")',
    "to_word": "jnp.asarray({0}).astype(jnp.uint32)",
    "typed": "jnp.array({0}, {1}.dtype)",
    "word": "jnp.uint32({0})",
    "words": "jnp.arange({0}, dtype=jnp.uint32)",
    "wrapped": "{0}",
    "zeros": "jnp.zeros({0}, {1}.dtype)",
}
dialect = Dialect("jnp", WORDS, [avg_pool, avg_pool_grad, float_key, index, lowest, max_pool])
