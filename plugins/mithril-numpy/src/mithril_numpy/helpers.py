"""Functions whose source goes into generated files: NumPy only, each standing alone save for those it ``needs``.

They carry no annotations, because they are read in generated code.
"""
# mypy: allow-untyped-defs, allow-untyped-calls

import numpy as np

from mithril.backend.codegen import needs


def on_host(function, types, *arrays):
    """Results of a function of NumPy arrays: a plain call."""
    return function(*arrays)


# -- element-wise -------------------------------------------------------------------------------------------------
def erf(x):
    """The error function: a rational approximation in single precision, exact to the last place or two."""
    if x.dtype == np.float64:
        import math

        return np.asarray(np.frompyfunc(math.erf, 1, 1)(x), dtype=np.float64)
    z = np.clip(x.astype(np.float32), -3.832506856900711, 3.832506856900711)
    s = z * z
    p = np.float32(0.00022905065861350646)
    for c in (0.0034082910107109506, 0.050955695062380861, 0.18520832239976145, 1.128379143519084):
        p = p * s
        p += np.float32(c)
    q = np.float32(-1.1791602954361697e-7)
    for c in (
        0.000023547966471313185,
        0.0010179625278914885,
        0.014070470171167667,
        0.11098505178285362,
        0.49746925110067538,
        1.0,
    ):
        q = q * s
        q += np.float32(c)
    y = np.where(np.abs(z) < np.float32(3.8325), z * p / q, np.sign(z))
    return y.astype(x.dtype)


@needs(erf)
def erfinv(x):
    """The inverse error function: Giles' polynomials; in double precision two Newton steps more."""
    kind = np.float64 if x.dtype == np.float64 else np.float32
    z = x.astype(kind)
    with np.errstate(all="ignore"):
        w = -np.log1p(-z * z)
        a, b = w - kind(2.5), np.sqrt(np.maximum(w, 0)) - kind(3)
        inner, outer = kind(2.81022636e-08), kind(-2.00214257e-04)
        for c in (
            3.43273939e-07,
            -3.5233877e-06,
            -4.39150654e-06,
            2.1858087e-04,
            -1.25372503e-03,
            -4.17768164e-03,
            2.46640727e-01,
            1.50140941,
        ):
            inner = kind(c) + inner * a
        for c in (
            1.00950558e-04,
            1.34934322e-03,
            -3.67342844e-03,
            5.73950773e-03,
            -7.6224613e-03,
            9.43887047e-03,
            1.00167406,
            2.83297682,
        ):
            outer = kind(c) + outer * b
        y = np.where(w < 5, inner, outer) * z
        if kind is np.float64:
            for _ in range(2):
                y = y - np.where(np.isfinite(y), (erf(y) - z) / (1.1283791670955126 * np.exp(-y * y)), 0)
        return np.where(np.abs(z) == 1, z * np.inf, y).astype(x.dtype)


def floordiv_int(a, b):
    """Integer division towards minus infinity; by zero gives zero."""
    return np.where(b == 0, 0, np.floor_divide(a, np.where(b == 0, 1, b))).astype(a.dtype)


def mod_int(a, b):
    """What integer division leaves; by zero gives zero."""
    return np.where(b == 0, 0, np.mod(a, np.where(b == 0, 1, b))).astype(a.dtype)


def power(a, b):
    """a to the b: where all exponents are 0.5 NumPy takes the square root, which differs at -inf and -0.0."""
    return np.where((b == 0.5) & ((a == 0) | (a == -np.inf)), np.abs(a), np.power(a, b)).astype(a.dtype)


def pow_int(a, b):
    """Integer power; a negative exponent gives 0, except of 1 and -1."""
    whole = np.power(a, np.maximum(b, 0))
    unit = np.where(a == 1, 1, np.where(a == -1, 1 - 2 * (b & 1), 0)) if a.dtype.kind == "i" else a == 1
    return np.where(b < 0, unit, whole).astype(a.dtype)


def shift_left(a, b):
    """Bits moved up; past the width everything is 0."""
    inside = (b >= 0) & (b < a.dtype.itemsize * 8)
    return np.where(inside, np.left_shift(a, np.where(inside, b, 0).astype(a.dtype)), 0).astype(a.dtype)


def shift_right(a, b):
    """Bits moved down, the sign copied in."""
    inside = (b >= 0) & (b < a.dtype.itemsize * 8)
    past = np.right_shift(a, a.dtype.type(a.dtype.itemsize * 8 - 1)) if a.dtype.kind == "i" else np.zeros_like(a)
    return np.where(inside, np.right_shift(a, np.where(inside, b, 0).astype(a.dtype)), past).astype(a.dtype)


def cast_to_int(x, dtype):
    """To an integer dtype: towards zero, saturating, nan as 0."""
    info = np.iinfo(dtype)
    if x.dtype.kind == "b":
        return x.astype(dtype)
    if x.dtype.kind in "iu":
        own = np.iinfo(x.dtype)
        return np.clip(x, max(info.min, own.min), min(info.max, own.max)).astype(dtype)
    wide = np.trunc(np.nan_to_num(x.astype(np.float64), nan=0.0, posinf=np.inf, neginf=-np.inf))
    inside = np.clip(wide, info.min, info.max)
    with np.errstate(invalid="ignore"):
        made = np.where(inside >= float(info.max), 0, inside).astype(dtype)
    return np.where(wide >= float(info.max), dtype(info.max), made)


def masked(condition, x):
    """x where the condition holds, else 0: on bits, because np.where takes twenty times as long on mixed conditions."""
    word = np.dtype(f"i{x.dtype.itemsize}")
    mask = condition.view(np.int8).astype(word)
    np.negative(mask, out=mask)
    return np.bitwise_and(mask, x.view(word), out=mask).view(x.dtype)


def chosen(condition, a, b):
    """a where the condition holds, else b, on bits."""
    word = np.dtype(f"i{a.dtype.itemsize}")
    mask = condition.view(np.int8).astype(word)
    np.negative(mask, out=mask)
    other = b.view(word)
    difference = a.view(word) ^ other
    np.bitwise_and(difference, mask, out=difference)
    return np.bitwise_xor(difference, other, out=difference).view(a.dtype)


# -- reductions ---------------------------------------------------------------------------------------------------
def average(x, axis, keepdims):
    """The mean, which is nan where there is nothing; NumPy's own warns of that."""
    total = np.sum(x, axis=axis, keepdims=keepdims, dtype=np.float32 if x.dtype.itemsize == 2 else None)
    count = 1
    for k in range(x.ndim) if axis is None else np.atleast_1d(axis):
        count *= x.shape[k]
    return (total / total.dtype.type(count)).astype(x.dtype)


def running(x, accumulate, start, axis, reverse, exclusive):
    """A running sum or product, from either end, with or without the element itself."""
    narrow = x.dtype.itemsize == 2 and x.dtype.kind not in "iu"
    z = x.astype(np.float32) if narrow else x
    z = np.flip(z, axis) if reverse else z
    out = accumulate(z, axis=axis, dtype=z.dtype)
    if exclusive:
        out = np.roll(out, 1, axis)
        out[(slice(None),) * axis + (slice(0, 1),)] = start
    out = np.flip(out, axis) if reverse else out
    return out.astype(x.dtype) if narrow else out


def dot(a, b, contract_a, contract_b, batch_a, batch_b):
    """A general product as one batched matrix product."""
    free_a = tuple(k for k in range(a.ndim) if k not in contract_a + batch_a)
    free_b = tuple(k for k in range(b.ndim) if k not in contract_b + batch_b)
    batch = tuple(a.shape[k] for k in batch_a)
    rows, columns = tuple(a.shape[k] for k in free_a), tuple(b.shape[k] for k in free_b)
    m, n = int(np.prod(rows, dtype=np.int64)), int(np.prod(columns, dtype=np.int64))
    inner = int(np.prod([a.shape[k] for k in contract_a], dtype=np.int64))
    left = np.transpose(a, batch_a + free_a + contract_a).reshape((*batch, m, inner))
    right = np.transpose(b, batch_b + contract_b + free_b).reshape((*batch, inner, n))
    return np.matmul(left, right).reshape((*batch, *rows, *columns))


# -- places -------------------------------------------------------------------------------------------------------
def positions(indices, size):
    """Positions counted from the front and clamped."""
    if indices.dtype.kind == "u":
        indices = np.minimum(indices, indices.dtype.type(min(size - 1, np.iinfo(indices.dtype).max)))
    wide = indices.astype(np.int64)
    return np.minimum(np.maximum(np.where(wide < 0, wide + size, wide), 0), size - 1)


@needs(positions)
def take(x, indices, axis):
    """Elements at positions along an axis."""
    if not indices.size:
        return np.empty((*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]), x.dtype)
    return np.take(x, positions(indices, x.shape[axis]), axis)


@needs(positions)
def take_along_axis(x, indices, axis):
    """Elements at positions of their own along an axis."""
    if not indices.size:
        shape = list(
            np.broadcast_shapes(
                tuple(1 if k == axis else n for k, n in enumerate(x.shape)),
                tuple(1 if k == axis else n for k, n in enumerate(indices.shape)),
            )
        )
        shape[axis] = indices.shape[axis]
        return np.empty(shape, x.dtype)
    return np.take_along_axis(x, positions(indices, x.shape[axis]), axis)


@needs(positions)
def rows_at(x, indices):
    """x as rows, and the number of the row that each position means."""
    depth = indices.shape[-1]
    row = np.zeros(indices.shape[:-1], np.int64)
    for k in range(depth):
        row = row * x.shape[k] + positions(indices[..., k], x.shape[k])
    lead = int(np.prod(x.shape[:depth], dtype=np.int64))
    return x.reshape(lead, int(np.prod(x.shape[depth:], dtype=np.int64))), np.asarray(row, order="C").reshape(-1)


@needs(rows_at)
def gather_nd(x, indices, batch_dims):
    """Elements at positions in several axes."""
    if indices[..., :1].size == 0 and indices.shape[-1]:
        return np.empty((*indices.shape[:-1], *x.shape[batch_dims + indices.shape[-1] :]), x.dtype)
    if batch_dims:
        grid = np.indices(indices.shape[:-1])[:batch_dims]
        indices = np.concatenate([*(axis[..., None] for axis in grid), indices.astype(np.int64)], -1)
    rows, at = rows_at(x, indices)
    return rows[at].reshape((*indices.shape[:-1], *x.shape[indices.shape[-1] :]))


@needs(rows_at)
def scatter_nd(x, indices, updates):
    """x with elements replaced; of several updates of one place the last wins."""
    if indices.size == 0 and indices.shape[-1]:
        return x.copy()
    rows, at = rows_at(x.copy(), indices)
    rows[at] = updates.reshape(at.size, rows.shape[1])
    return rows.reshape(x.shape)


@needs(rows_at)
def scatter_nd_add(x, indices, updates):
    """x with updates added."""
    if indices.size == 0 and indices.shape[-1]:
        return x.copy()
    narrow = x.dtype.itemsize == 2 and x.dtype.kind not in "iu"
    rows, at = rows_at(x.astype(np.float32) if narrow else x.copy(), indices)
    np.add.at(rows, at, updates.reshape(at.size, rows.shape[1]).astype(rows.dtype))
    return rows.reshape(x.shape).astype(x.dtype)


def window(x, starts, sizes):
    """The index of a part at computed starts, moved inside."""
    begin = [min(max(int(s) + (n if s < 0 else 0), 0), n - z) for s, n, z in zip(starts, x.shape, sizes)]
    return tuple(slice(b, b + z) for b, z in zip(begin, sizes))


@needs(window)
def dynamic_update_slice(x, update, starts):
    """x with a part overwritten."""
    out = x.copy()
    out[window(x, starts, update.shape)] = update
    return out


def argsort(x, axis, descending):
    """Positions in order; equal ones keep theirs, nan last."""
    if x.dtype.kind in "iub":
        key = ~x if descending else x
    else:
        key = x.astype(np.float32) if x.dtype.itemsize == 2 else x
        key = -key if descending else key
    return np.argsort(key, axis=axis, kind="stable")


def iota(shape, axis, dtype):
    """0, 1, 2, ... along an axis."""
    line = np.arange(shape[axis]).astype(dtype)
    return np.broadcast_to(line.reshape([-1 if k == axis else 1 for k in range(len(shape))]), shape)


def pad(x, widths, mode, value):
    """Elements added before and after along each axis."""
    if mode == "constant":
        out = np.full([b + n + a for n, (b, a) in zip(x.shape, widths)], value, x.dtype)
        out[tuple(slice(b, b + n) for n, (b, _) in zip(x.shape, widths))] = x
        return out
    for axis, (before, after) in enumerate(widths):
        if before or after:
            n = x.shape[axis]
            at = np.arange(-before, n + after)
            inside = np.clip(at, 0, n - 1)
            x = np.take(x, inside if mode == "edge" else 2 * inside - at, axis)
    return x if any(map(any, widths)) else x.copy()


# -- windows ------------------------------------------------------------------------------------------------------
def windows(x, kernel, stride, padding, dilation, fill=0):
    """[batch, channels, *windows, *kernel], a view of the padded image."""
    if any(a or b for a, b in padding):
        padded = np.full((*x.shape[:2], *(n + a + b for n, (a, b) in zip(x.shape[2:], padding))), fill, x.dtype)
        padded[(slice(None), slice(None), *(slice(a, a + n) for n, (a, _) in zip(x.shape[2:], padding)))] = x
        x = padded
    counts = tuple((n - (k - 1) * d - 1) // s + 1 for n, k, s, d in zip(x.shape[2:], kernel, stride, dilation))
    steps = x.strides[2:]
    strides = (*x.strides[:2], *(t * s for t, s in zip(steps, stride)), *(t * d for t, d in zip(steps, dilation)))
    return np.lib.stride_tricks.as_strided(x, (*x.shape[:2], *counts, *kernel), strides, writeable=False)


def single(x):
    """16-bit floats as float32."""
    return x.astype(np.float32) if x.dtype.itemsize == 2 and x.dtype.kind not in "iu" else x


@needs(windows)
def columns(x, kernel, stride, padding, dilation, groups):
    """[batch, groups, channels / groups * kernel, windows]: what a kernel meets, as columns."""
    view = windows(x, kernel, stride, padding, dilation)
    n, channels, rank = view.shape[0], view.shape[1], len(kernel)
    order = (0, 1, *range(2 + rank, 2 + 2 * rank), *range(2, 2 + rank))
    per_group = channels // groups * int(np.prod(kernel))
    return view.transpose(order).reshape(n, groups, per_group, int(np.prod(view.shape[2 : 2 + rank])))


@needs(columns, single)
def conv(x, w, shape, stride, padding, dilation, groups):
    """Convolution as one matrix product per image: the kernels as rows, what they meet as columns."""
    kernels = single(w).reshape(groups, w.shape[0] // groups, int(np.prod(w.shape[1:])))
    plain = all(k == 1 for k in w.shape[2:]) and all(s == 1 for s in stride) and not any(a or b for a, b in padding)
    if plain:
        met = single(x).reshape(x.shape[0], groups, x.shape[1] // groups, int(np.prod(x.shape[2:])))
    else:
        met = columns(single(x), w.shape[2:], stride, padding, dilation, groups)
    if groups == 1:
        return np.matmul(kernels[0], met[:, 0]).reshape(shape).astype(x.dtype, copy=False)
    return np.matmul(kernels, met).reshape(shape).astype(x.dtype, copy=False)


def spread(parts, shape, kernel, stride, padding, dilation):
    """Adds every window's elements to the image they lie in: the reverse of taking windows."""
    out = np.zeros((*shape[:2], *(n + a + b for n, (a, b) in zip(shape[2:], padding))), parts.dtype)
    counts = parts.shape[2 + len(kernel) :]
    for at in np.ndindex(*kernel):
        where = tuple(slice(k * d, k * d + (n - 1) * s + 1, s) for k, n, s, d in zip(at, counts, stride, dilation))
        out[(slice(None), slice(None), *where)] += parts[(slice(None), slice(None), *at)]
    return out[(slice(None), slice(None), *(slice(a, a + n) for n, (a, _) in zip(shape[2:], padding)))]


@needs(single, spread)
def conv_input_grad(g, w, shape, stride, padding, dilation, groups):
    """The cotangent of a convolution's image."""
    kernels = single(w).reshape(groups, w.shape[0] // groups, int(np.prod(w.shape[1:])))
    met = single(g).reshape(g.shape[0], groups, g.shape[1] // groups, int(np.prod(g.shape[2:])))
    parts = np.matmul(kernels.transpose(0, 2, 1), met)
    parts = parts.reshape(shape[0], shape[1], *w.shape[2:], *g.shape[2:])
    return spread(parts, shape, w.shape[2:], stride, padding, dilation).astype(g.dtype, copy=False)


@needs(columns, single)
def conv_weight_grad(x, g, shape, stride, padding, dilation, groups):
    """The cotangent of a convolution's kernel."""
    met = columns(single(x), shape[2:], stride, padding, dilation, groups)
    cotangents = single(g).reshape(g.shape[0], groups, g.shape[1] // groups, int(np.prod(g.shape[2:])))
    made = np.matmul(cotangents, met.transpose(0, 1, 3, 2)).sum(axis=0)
    return made.reshape(shape).astype(x.dtype, copy=False)


@needs(windows)
def max_pool(x, kernel, stride, padding, dilation):
    """The largest element of each window: the kernel's elements one after the other."""
    low = -np.inf if x.dtype.kind not in "iu" else np.iinfo(x.dtype).min
    view = windows(x, kernel, stride, padding, dilation, low)
    out = None
    for at in np.ndindex(*kernel):
        part = view[(..., *at)]
        out = part.copy() if out is None else np.maximum(out, part, out=out)
    return out


@needs(windows)
def max_pool_positions(x, kernel, stride, padding, dilation):
    """The number of each window's first maximum within its channel; -1 where there is only padding."""
    low = -np.inf if x.dtype.kind not in "iu" else np.iinfo(x.dtype).min
    view = windows(x, kernel, stride, padding, dilation, low)
    count = int(np.prod(x.shape[2:]))
    numbers = windows(np.arange(count).reshape(1, 1, *x.shape[2:]), kernel, stride, padding, dilation, -1)
    size = int(np.prod(kernel))
    flat, numbers = view.reshape(*view.shape[: x.ndim], size), numbers.reshape(*numbers.shape[: x.ndim], size)
    top = np.max(flat, axis=-1, keepdims=True)
    hits = ((flat == top) | ((flat != flat) & (top != top))) & (numbers >= 0)
    first = np.argmax(hits, axis=-1)[..., None]
    numbers = np.broadcast_to(numbers, flat.shape)
    found = np.where(np.take_along_axis(hits, first, -1), np.take_along_axis(numbers, first, -1), -1)
    return found[..., 0].astype(np.int32)


@needs(windows)
def pool_counts(shape, kernel, stride, padding, count_include_pad, dtype):
    """How many elements each window averages."""
    if count_include_pad or not any(a or b for a, b in padding):
        return dtype.type(np.prod(kernel))
    ones = windows(np.ones((1, 1, *shape[2:]), dtype), kernel, stride, padding, (1,) * len(kernel))
    return ones.sum(axis=tuple(range(len(shape), ones.ndim)))


@needs(windows, pool_counts, single)
def avg_pool(x, kernel, stride, padding, count_include_pad):
    """The mean of each window."""
    view = windows(single(x), kernel, stride, padding, (1,) * len(kernel))
    total = 0
    for at in np.ndindex(*kernel):
        total = total + view[(..., *at)]
    return (total / pool_counts(x.shape, kernel, stride, padding, count_include_pad, view.dtype)).astype(x.dtype)


@needs(spread, pool_counts, single)
def avg_pool_grad(g, shape, kernel, stride, padding, count_include_pad):
    """The cotangent of an average pool's operand."""
    share = single(g)
    share = share / pool_counts(shape, kernel, stride, padding, count_include_pad, share.dtype)
    parts = np.broadcast_to(
        share[(slice(None), slice(None), *[None] * len(kernel))], (*g.shape[:2], *kernel, *g.shape[2:])
    )
    return spread(parts, shape, kernel, stride, padding, (1,) * len(kernel)).astype(g.dtype, copy=False)


# -- random -------------------------------------------------------------------------------------------------------
def threefry(key, high, low):
    """Twenty rounds of Threefry-2x32 over pairs of words."""
    k0, k1 = np.uint32(key[0]), np.uint32(key[1])
    keys = (k0, k1, k0 ^ k1 ^ np.uint32(0x1BD11BDA))
    with np.errstate(over="ignore"):
        x0, x1 = high + k0, low + k1
        for block in range(5):
            for r in ((13, 15, 26, 6), (17, 29, 16, 24))[block % 2]:
                x0 = x0 + x1
                x1 = ((x1 << np.uint32(r)) | (x1 >> np.uint32(32 - r))) ^ x0
            x0 = x0 + keys[(block + 1) % 3]
            x1 = x1 + (keys[(block + 2) % 3] + np.uint32(block + 1))
    return x0, x1


@needs(threefry)
def random_bits(key, shape):
    """Uniform 32-bit words."""
    count = np.arange(int(np.prod(shape, dtype=np.int64)), dtype=np.uint64)
    a, b = threefry(key, (count >> np.uint64(32)).astype(np.uint32), count.astype(np.uint32))
    return (a ^ b).reshape(shape)


@needs(threefry)
def split_key(key, num):
    """Independent keys as rows."""
    return np.stack(threefry(key, np.zeros(num, np.uint32), np.arange(num, dtype=np.uint32)), axis=1)


@needs(threefry)
def fold_in(key, data):
    """The key mixed with an integer."""
    word = np.asarray(data).astype(np.int64).astype(np.uint32).reshape(1)
    return np.concatenate(threefry(key, np.zeros(1, np.uint32), word))
