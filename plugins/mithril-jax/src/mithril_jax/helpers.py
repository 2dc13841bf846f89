"""Functions whose source is copied into generated files: they use JAX and the functions in ``needs`` only."""
# mypy: ignore-errors

import jax
import jax.numpy as jnp
from jax import lax

from mithril.backend import Dialect, max_pool_positions, needs, offsets, single, taps, window_parts


def on_host(function, types, *arrays):
    """Call a function of NumPy arrays from the compiled program and return its results."""
    results = tuple(jax.ShapeDtypeStruct(shape, dtype) for dtype, shape in types)
    return jax.pure_callback(function, results, *arrays, vmap_method="sequential")


# -- element-wise -------------------------------------------------------------------------------------------------
def floordiv_float(a, b):
    """Return the quotient rounded toward minus infinity; a zero has the sign of a / b, which XLA's floor loses."""
    # jax < 0.10 returns nan for a divisor of 0.
    quotient = jnp.where(b == 0, a / b, jnp.floor_divide(a, b))
    return jnp.where(quotient == 0, 0 * (a / b), quotient)


def saturated_erf(x):
    """Return the error function, exactly 1 or -1 for large numbers: that of XLA before jax 0.10 is less in fusions."""
    # From 6 on the function rounds to 1, even in float64.
    return jnp.where(jnp.abs(x) < 6, lax.erf(x), jnp.sign(x))


def mod_float(a, b):
    """Return the remainder with the sign of b, also where it is zero."""
    remainder = jnp.mod(a, b)
    return jnp.where(remainder == 0, jnp.copysign(remainder, b), remainder)


# -- indexing -----------------------------------------------------------------------------------------------------
def index(indices):
    """Return indices as signed integers of 32 bits or more."""
    if jnp.issubdtype(indices.dtype, jnp.signedinteger):
        return indices if indices.dtype.itemsize >= 4 else indices.astype(jnp.int32)
    return (jnp.minimum(indices, 2**31 - 1) if indices.dtype.itemsize >= 4 else indices).astype(jnp.int32)


def float_key(x):
    """Return sort keys for floats: every nan is the same, and so is every zero."""
    return jnp.where(jnp.isnan(x), jnp.nan, jnp.where(x == 0, 0, x))


# -- windows ------------------------------------------------------------------------------------------------------
@needs(window_parts)
def im2col(x, kernel, stride, padding, dilation, groups):
    """Return the im2col patches of each result element: [batch, groups, channels / groups * kernel, elements].

    Without the barrier XLA may gather them again for each element of a product.
    """
    parts = window_parts(x, kernel, stride, padding, dilation, 0)
    patches = jnp.stack(parts, 2).reshape(x.shape[0], groups, x.shape[1] // groups * len(parts), -1)
    return lax.optimization_barrier(patches)


@needs(im2col)
def conv_im2col(x, w, shape, stride, padding, dilation, groups):
    """Return a convolution computed as im2col and one matrix product."""
    accumulator = jnp.float32 if x.dtype in (jnp.float16, jnp.bfloat16) else x.dtype
    kernels = w.reshape(groups, w.shape[0] // groups, -1)
    patches = im2col(x, w.shape[2:], stride, padding, dilation, groups)
    return jnp.matmul(kernels, patches, preferred_element_type=accumulator).reshape(shape).astype(x.dtype)


@needs(taps)
def conv_input_grad_im2col(g, w, shape, stride, padding, dilation, groups):
    """Return the cotangent of a convolution's image: one matrix product, scattered by kernel element (col2im)."""
    accumulator = jnp.float32 if g.dtype in (jnp.float16, jnp.bfloat16) else g.dtype
    kernels = jnp.swapaxes(w.reshape(groups, w.shape[0] // groups, -1), 1, 2)
    cotangents = lax.optimization_barrier(g.reshape(g.shape[0], groups, w.shape[0] // groups, -1))
    patches = jnp.matmul(kernels, cotangents, preferred_element_type=accumulator)
    patches = lax.optimization_barrier(patches).reshape(*shape[:2], -1, *g.shape[2:])
    padded_shape = [n + a + b for n, (a, b) in zip(shape[2:], padding)]
    padded = jnp.zeros((*shape[:2], *padded_shape), accumulator)
    for k, cut in enumerate(taps(w.shape[2:], g.shape[2:], stride, dilation)):
        edges = [(part.start, n - part.stop, part.step - 1) for part, n in zip(cut[2:], padded_shape)]
        padded += lax.pad(patches[:, :, k], jnp.zeros((), accumulator), [(0, 0, 0), (0, 0, 0), *edges])
    image = [slice(a, a + n) for n, (a, _) in zip(shape[2:], padding)]
    return padded[(slice(None), slice(None), *image)].astype(g.dtype)


@needs(im2col)
def conv_weight_grad_im2col(x, g, shape, stride, padding, dilation, groups):
    """Return the cotangent of a convolution's kernel, computed as im2col and one matrix product."""
    accumulator = jnp.float32 if g.dtype in (jnp.float16, jnp.bfloat16) else g.dtype
    patches = im2col(x, shape[2:], stride, padding, dilation, groups)
    cotangents = g.reshape(g.shape[0], groups, shape[0] // groups, -1)
    gradient = jnp.einsum("ngop,ngkp->gok", cotangents, patches, preferred_element_type=accumulator)
    return gradient.reshape(shape).astype(g.dtype)


def conv(x, w, stride, padding, dilation, groups):
    """Return the convolution of [batch, channels, ...] images; 16-bit floats accumulate in float32."""
    rank = w.ndim - 2
    spatial = "DHW"[3 - rank :]
    numbers = ("NC" + spatial, "OI" + spatial, "NC" + spatial)
    accumulator = jnp.float32 if x.dtype in (jnp.float16, jnp.bfloat16) else None
    result = lax.conv_general_dilated(
        x,
        w,
        stride,
        padding,
        rhs_dilation=dilation,
        dimension_numbers=numbers,
        feature_group_count=groups,
        preferred_element_type=accumulator,
    )
    return result.astype(x.dtype)


@needs(conv)
def conv_grads(g, x, w, stride, padding, dilation, groups):
    """Return the cotangents of a convolution's image and kernel."""
    accumulator = jnp.float32 if g.dtype in (jnp.float16, jnp.bfloat16) else g.dtype
    x, w, g = x.astype(accumulator), w.astype(accumulator), g.astype(accumulator)
    return jax.vjp(lambda a, b: conv(a, b, stride, padding, dilation, groups), x, w)[1](g)


@needs(conv_grads)
def conv_input_grad(g, w, shape, stride, padding, dilation, groups):
    """Return the cotangent of a convolution's image."""
    return conv_grads(g, jnp.zeros(shape, g.dtype), w, stride, padding, dilation, groups)[0].astype(g.dtype)


@needs(conv_grads)
def conv_weight_grad(x, g, shape, stride, padding, dilation, groups):
    """Return the cotangent of a convolution's kernel."""
    return conv_grads(g, x, jnp.zeros(shape, g.dtype), stride, padding, dilation, groups)[1].astype(g.dtype)


def lowest(x):
    """Return the smallest value of the dtype of ``x``."""
    return x.dtype.type(-jnp.inf if jnp.issubdtype(x.dtype, jnp.floating) else jnp.iinfo(x.dtype).min)


@needs(lowest)
def max_pool(x, kernel, stride, padding, dilation):
    """Return the maximum of each window; nan takes precedence."""
    low = lowest(x)  # a constant: JAX differentiates no reduction from a traced value
    return lax.reduce_window(
        x, low, lax.max, (1, 1, *kernel), (1, 1, *stride), ((0, 0), (0, 0), *padding), window_dilation=(1, 1, *dilation)
    )


@needs(lowest)
def max_pool_positions_reduce_window(x, kernel, stride, padding, dilation):
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


@needs(offsets)
def cotangents_of_maxima(g, positions, x, kernel, stride, padding, dilation):
    """Return the cotangent of a maximum pool's operand: each element takes it from the windows whose maximum it is.

    Cotangents are repeated over the elements, not scattered, so that devices split every step along the batch.
    """
    count = 1
    for n in x.shape[2:]:
        count *= n
    numbers = jnp.arange(count, dtype=jnp.int32).reshape(1, 1, *x.shape[2:])
    # Element i is in the windows floor((i + padding) / stride) - k, for as many k as windows overlap.
    extents = [(k - 1) * d + 1 for k, d in zip(kernel, dilation)]
    result = 0
    for back in offsets([-(-e // s) for e, s in zip(extents, stride)]):
        low = [k * s - a for k, s, (a, _) in zip(back, stride, padding)]
        repeated = []
        for v, fill in ((positions, -1), (g, 0)):
            spread = v
            for axis, s in enumerate(stride, 2):
                spread = jnp.repeat(spread, s, axis)
            high = [n - a - m for n, a, m in zip(x.shape[2:], low, spread.shape[2:])]
            borders = [(0, 0, 0), (0, 0, 0), *((a, b, 0) for a, b in zip(low, high))]
            repeated.append(lax.pad(spread, v.dtype.type(fill), borders))
        result = result + jnp.where(repeated[0] == numbers, repeated[1], 0)
    return result.astype(g.dtype)


@needs(max_pool_positions, cotangents_of_maxima)
def max_pool_grad(g, x, kernel, stride, padding, dilation):
    """Return the cotangent of a maximum pool's operand; on a CPU stacked windows are the fastest way to compare."""
    positions = max_pool_positions(x, kernel, stride, padding, dilation)
    return cotangents_of_maxima(g, positions, x, kernel, stride, padding, dilation)


@needs(window_parts, lowest, cotangents_of_maxima)
def max_pool_grad_by_element(g, x, kernel, stride, padding, dilation):
    """Return the cotangent of a maximum pool's operand; a TPU compares elements one by one and stores no windows."""
    count = 1
    for n in x.shape[2:]:
        count *= n
    numbers = jnp.arange(count, dtype=jnp.int32).reshape(1, 1, *x.shape[2:])
    numbers = window_parts(numbers, kernel, stride, padding, dilation, -1)
    parts = window_parts(x, kernel, stride, padding, dilation, lowest(x))
    top, first = parts[0], jnp.broadcast_to(numbers[0], g.shape)  # -1: only padding until now
    for number, part in zip(numbers[1:], parts[1:]):
        wins = (number >= 0) & ((first < 0) | (part > top) | ((part != part) & (top == top)))
        top, first = jnp.where(wins, part, top), jnp.where(wins, number, first)
    return cotangents_of_maxima(g, first, x, kernel, stride, padding, dilation)


def pool_counts(shape, kernel, stride, padding, count_include_pad, dtype):
    """Return the number of elements that each window averages."""
    if count_include_pad:
        size = 1
        for k in kernel:
            size *= k
        return jnp.asarray(size, dtype)
    ones = jnp.ones((1, 1, *shape[2:]), dtype)
    zero = jnp.dtype(dtype).type(0)  # a constant: JAX differentiates no reduction from a traced value
    return lax.reduce_window(ones, zero, lax.add, (1, 1, *kernel), (1, 1, *stride), ((0, 0), (0, 0), *padding))


@needs(pool_counts, single)
def avg_pool(x, kernel, stride, padding, count_include_pad):
    """Return the mean of each window."""
    z = single(x)
    zero = z.dtype.type(0)
    total = lax.reduce_window(z, zero, lax.add, (1, 1, *kernel), (1, 1, *stride), ((0, 0), (0, 0), *padding))
    return (total / pool_counts(x.shape, kernel, stride, padding, count_include_pad, z.dtype)).astype(x.dtype)


@needs(avg_pool, single)
def avg_pool_grad(g, shape, kernel, stride, padding, count_include_pad):
    """Return the cotangent of an average pool's operand."""
    z = single(g)
    pull = jax.vjp(lambda x: avg_pool(x, kernel, stride, padding, count_include_pad), jnp.zeros(shape, z.dtype))[1]
    return pull(z)[0].astype(g.dtype)


def put_rows(x, first, update, axis):
    """Return ``x`` with the slice of each row that begins at ``first`` replaced by ``update``."""
    return jax.vmap(lambda row, new, start: lax.dynamic_update_slice_in_dim(row, new, start, axis - 1))(
        x, update, first
    )


# -- mixtures of experts ------------------------------------------------------------------------------------------
def blocks_of_experts(experts, count):
    """Return the rows of each block, the expert of each block, and the place of each row in the blocks.

    A block has rows of one expert; the last one of an expert is filled with the number after the last row.
    """
    n = experts.size
    numbers = experts.reshape(-1)
    numbers = jnp.where((numbers >= 0) & (numbers < count), numbers, count).astype(jnp.int32)
    size = 1 << min(6, max(0, (n // (2 * count)).bit_length() - 1))
    total = (n + count * (size - 1)) // size
    order = jnp.argsort(numbers, stable=True)
    rows = jnp.bincount(numbers, length=count + 1)
    ends = jnp.cumsum(-(-rows[:count] // size))
    first = jnp.concatenate([jnp.zeros(1, ends.dtype), ends]) * size  # of each expert; rows without one come last
    first = first.at[count].set(total * size)
    sorted_numbers = numbers[order]
    places = first[sorted_numbers] + jnp.arange(n) - (jnp.cumsum(rows) - rows)[sorted_numbers]
    blocks = jnp.full(total * size, n).at[places].set(order, mode="drop").reshape(total, size)
    owners = jnp.searchsorted(ends, jnp.arange(total), side="right").clip(0, count - 1)
    return blocks, owners, jnp.zeros(n, places.dtype).at[order].set(places)


def row_of_each(positions, starts):
    """Return the row of each stored element of a sparse matrix, and the number of rows for padding."""
    return jnp.searchsorted(starts[1:], jnp.arange(len(positions)), side="right")


def consistent_places(positions, starts, columns):
    """Return positions within the columns, and starts within the stored elements, from 0 on and in order."""
    ends = jnp.sort(starts[1:].clip(0, len(positions)))
    positions = jnp.where(positions < 0, positions + columns, positions).clip(0, columns - 1)
    return positions, jnp.concatenate([jnp.zeros_like(starts[:1]), ends])


@needs(row_of_each, consistent_places)
def sparse_matmul(values, positions, starts, x):
    """Return the product of a sparse matrix with x: rows of x are gathered, scaled and added."""
    width = values.shape[1] if values.ndim == 2 else 1
    positions, starts = consistent_places(positions, starts, len(x) // width)
    blocks = x.reshape(-1, width, x.shape[1])
    terms = (blocks[positions] * values.reshape(len(positions), width, 1)).sum(axis=1)
    rows = row_of_each(positions, starts)
    return jax.ops.segment_sum(terms, rows, len(starts) - 1, indices_are_sorted=True)


@needs(row_of_each, consistent_places)
def sparse_matmul_transposed(values, positions, starts, x, columns):
    """Return the product of a transposed sparse matrix with x."""
    width = values.shape[1] if values.ndim == 2 else 1
    positions, starts = consistent_places(positions, starts, columns // width)
    rows = x.at[row_of_each(positions, starts)].get(mode="fill", fill_value=0)
    terms = rows[:, None] * values.reshape(len(positions), width, 1)
    return jnp.zeros((columns // width, width, x.shape[1]), x.dtype).at[positions].add(terms).reshape(columns, -1)


def multiply_rows(a, b):
    """Return a matrix product, with 16-bit floats summed in float32."""
    accumulator = jnp.float32 if a.dtype in (jnp.float16, jnp.bfloat16) else a.dtype
    return jnp.matmul(a, b, preferred_element_type=accumulator).astype(a.dtype)


def product_of_row(x, w):
    """Return the product of one row with the rows of w; XLA for CPUs passes two rows to oneDNN, but not one."""
    rows = jnp.pad(x.reshape(1, -1), ((0, 1), (0, 0)))
    product = lax.dot_general(rows, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    return product[:1].reshape(*x.shape[:-1], -1).astype(x.dtype)


@needs(blocks_of_experts, multiply_rows)
def expert_matmul(x, w, experts):
    """Return the product of each row with the weight of its expert, in blocks of rows of one expert."""
    shape = jnp.broadcast_shapes(x.shape[:-1], experts.shape)
    y = jnp.zeros((*shape, w.shape[2]), x.dtype)
    if not y.size or not w.size:
        return y
    rows = x.reshape(-1, x.shape[-1])
    numbers = jnp.broadcast_to(jnp.arange(len(rows)).reshape(x.shape[:-1]), shape).reshape(-1)
    blocks, owners, places = blocks_of_experts(jnp.broadcast_to(experts, shape), w.shape[0])

    def multiply(block):
        picked = rows.at[numbers.at[block[0]].get(mode="fill", fill_value=len(rows))].get(mode="fill", fill_value=0)
        return multiply_rows(picked, w[block[1]])

    def multiply_used(block):
        return lax.cond(
            block[0][0] < len(numbers), multiply, lambda _: jnp.zeros((len(block[0]), w.shape[2]), x.dtype), block
        )

    products = lax.map(multiply_used, (blocks, owners)).reshape(-1, w.shape[2])
    return products.at[places].get(mode="fill", fill_value=0).reshape(y.shape)


@needs(blocks_of_experts)
def expert_weight_grad(x, g, experts, count):
    """Return for each expert the sum of the outer products of its rows."""
    accumulator = jnp.float32 if x.dtype in (jnp.float16, jnp.bfloat16) else x.dtype
    y = jnp.zeros((count, x.shape[-1], g.shape[-1]), accumulator)
    if not x.size or not g.size or not count:
        return y.astype(x.dtype)
    blocks, owners, _ = blocks_of_experts(experts, count)
    rows, cotangents = (z.reshape(-1, z.shape[-1]) for z in (x, g))

    def multiply(block):
        a, b = (z.at[block[0]].get(mode="fill", fill_value=0) for z in (rows, cotangents))
        return jnp.matmul(a.T, b, preferred_element_type=accumulator)

    def add(y, block):
        product = lax.cond(block[0][0] < len(rows), multiply, lambda _: jnp.zeros(y.shape[1:], y.dtype), block)
        return y.at[block[1]].add(product), None

    return lax.scan(add, y, (blocks, owners))[0].astype(x.dtype)


def data_specs(*shapes):
    """Return how the axis ``data`` of the mesh divides rows of these shapes, or None if it does not."""
    mesh, shape = jax.sharding.get_abstract_mesh(), jnp.broadcast_shapes(*shapes)
    parts = mesh.shape["data"] if "data" in mesh.auto_axes else 1
    if parts == 1 or not shape or shape[0] % parts:
        return None
    split, replicated = jax.sharding.PartitionSpec("data"), jax.sharding.PartitionSpec()
    return [split if len(s) == len(shape) and s[0] == shape[0] else replicated for s in shapes]


@needs(data_specs, expert_matmul)
def expert_matmul_by_device(x, w, experts):
    """Return the product of each row with the weight of its expert; devices group their own rows."""
    specs = data_specs(x.shape[:-1], experts.shape)
    if specs is None:
        return expert_matmul(x, w, experts)
    split, replicated = jax.sharding.PartitionSpec("data"), jax.sharding.PartitionSpec()
    splits = {"in_specs": (specs[0], replicated, specs[1]), "out_specs": split, "axis_names": {"data"}}
    return jax.shard_map(expert_matmul, **splits, check_vma=False)(x, w, experts)


@needs(data_specs, expert_weight_grad)
def expert_weight_grad_by_device(x, g, experts, count):
    """Return for each expert the sum of the outer products of its rows; devices group their own rows."""
    specs = data_specs(x.shape[:-1], g.shape[:-1], experts.shape)
    if specs is None:
        return expert_weight_grad(x, g, experts, count)

    def summed(x, g, experts):
        return lax.psum(expert_weight_grad(x, g, experts, count), "data")

    splits = {"in_specs": tuple(specs), "out_specs": jax.sharding.PartitionSpec(), "axis_names": {"data"}}
    return jax.shard_map(summed, **splits, check_vma=False)(x, g, experts)


# -- shared helpers written for JAX -----------------------------------------------------------------------------------
def cached_attention(q, k, v, mask, scale):
    """Return attention to a cache; the branch with the smallest part that holds all visible keys is selected.

    If the rows of a batch see other positions, each selects its own branch.
    """
    batch, heads, count = k.shape[:3]
    sizes = [n for n in (128, 512, 2048, 8192, 32768) if n < count] + [count]
    mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
    mask = (
        mask.reshape(mask.shape[0], heads, mask.shape[1] // heads, *mask.shape[2:])
        if mask.shape[1] > 1
        else mask[:, :, None]
    )
    rows = (q * scale).reshape(batch, heads, q.shape[1] // heads, *q.shape[2:])

    def attend(size):
        def run(rows, k, v, mask, first):
            if first is None:
                k, v = k[:, :, :size], v[:, :, :size]
            else:
                k, v = (lax.dynamic_slice(x, (first, 0, 0, 0), (1, heads, size, x.shape[3])) for x in (k, v))
            scores = jnp.matmul(rows, jnp.swapaxes(k[:, :, None], -1, -2))
            weights = jax.nn.softmax(jnp.where(mask[..., :size], scores, -jnp.inf), -1)
            return jnp.matmul(weights, v[:, :, None])

        return run

    def select(rows, mask, first=None):
        seen = jnp.any(mask.reshape(-1, count), 0)
        last = jnp.where(jnp.any(seen), count - jnp.argmax(seen[::-1]), count)
        index = sum((last > size).astype(jnp.int32) for size in sizes[:-1])
        return lax.switch(index, [attend(size) for size in sizes], rows, k, v, mask, first)

    if not sizes[1:] or not batch:
        y = attend(count)(rows, k, v, mask, None)
    elif mask.shape[0] == 1:
        y = select(rows, mask)
    else:
        y = lax.map(lambda x: select(x[0][None], x[1][None], x[2])[0], (rows, mask, jnp.arange(batch)))
    return y.reshape(*q.shape[:3], v.shape[3])


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
dialect = Dialect("jnp", WORDS, [avg_pool, avg_pool_grad, float_key, index, lowest, max_pool, put_rows])
