"""Functions whose source is copied into generated files: NumPy only, each independent except for those it ``needs``.

They carry no annotations, because they are read in generated code.
"""
# mypy: allow-untyped-defs, allow-untyped-calls

import numpy as np

from mithril.backend import Dialect, columns_of, consistent_places, needs, single


def on_host(function, types, *arrays):
    """Call a function of NumPy arrays."""
    return function(*arrays)


# -- element-wise -------------------------------------------------------------------------------------------------
def rational(s, numerator, denominator):
    """Return the quotient of two polynomials of s, whose first coefficients belong to the highest powers."""
    p, q = np.full_like(s, numerator[0]), np.full_like(s, denominator[0])
    for values, coefficients in ((p, numerator), (q, denominator)):
        for c in coefficients[1:]:
            values *= s
            values += s.dtype.type(c)
    p /= q
    return p


@needs(rational)
def erf_single(x):
    """Compute erf in single precision, exact to a few ulps."""
    # Past this number erf is nearer to 1 than half a unit in the last place.
    z = np.clip(x.astype(np.float32), -3.832506856900711, 3.832506856900711)
    first = (0.00022905065861350646, 0.0034082910107109506, 0.050955695062380861)
    last = (-1.1791602954361697e-7, 0.000023547966471313185, 0.0010179625278914885, 0.014070470171167667)
    y = rational(
        z * z,
        (*first, 0.18520832239976145, 1.128379143519084),
        (*last, 0.11098505178285362, 0.49746925110067538, 1.0),
    )
    y *= z
    return np.where(np.abs(z) < np.float32(3.8325), y, np.sign(z))


@needs(rational)
def erf_double(x):
    """Compute erf in double precision, exact to two ulps: by a function of fdlibm near 0, and one of Cody elsewhere."""
    z = np.clip(x, -6.0, 6.0)
    first = (-2.37630166566501626084e-05, -5.77027029648944159157e-03, -2.84817495755985104766e-02)
    last = (-3.96022827877536812320e-06, 1.32494738004321644526e-04, 5.08130628187576562776e-03)
    y = rational(
        z * z,
        (*first, -3.25042107247001499370e-01, 1.28379167095512558561e-01),
        (*last, 6.50222499887672944485e-02, 3.97917223959155352819e-01, 1.0),
    )
    y *= z
    y += z
    tail = np.flatnonzero(np.abs(z) >= 0.84375)  # where fdlibm's first function ends
    t = np.abs(z[tail])
    # For 0.46875 to 4; beyond, exp(-t * t) hides its error.
    above = (2.15311535474403846e-8, 5.64188496988670089e-1, 8.88314979438837594, 6.61191906371416295e1)
    below = (1.0, 1.57449261107098347e1, 1.17693950891312499e2, 5.37181101862009858e2, 1.62138957456669019e3)
    middle = (2.98635138197400131e2, 8.81952221241769090e2, 1.71204761263407058e3)
    scaled = rational(
        t,
        (*above, *middle, 2.05107837782607147e3, 1.23033935479799725e3),
        (*below, 3.29079923573345963e3, 4.36261909014324716e3, 3.43936767414372164e3, 1.23033935480374942e3),
    )
    y[tail] = np.copysign(1 - scaled * np.exp(-t * t), z[tail])
    return y


@needs(erf_single, erf_double)
def erf(x):
    """Compute erf by rational functions, a block at a time."""
    y = np.empty(x.shape, x.dtype)
    flat, results = x.reshape(-1), y.reshape(-1)
    function = erf_double if x.dtype == np.float64 else erf_single
    for start in range(0, x.size, 16384):  # a block and its steps fit into the cache of a core
        block = slice(start, start + 16384)
        results[block] = function(flat[block])
    return y


@needs(erf)
def erfinv(x):
    """Compute the inverse of erf: Giles' polynomials, with two Newton steps in double precision."""
    kind = np.float64 if x.dtype == np.float64 else np.float32
    z = np.abs(x.astype(kind))
    with np.errstate(all="ignore"):
        # 1 - z is exact near 1, where 1 - z * z would lose digits.
        w = -np.log((kind(1) - z) * (kind(1) + z))
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
        # Giles fitted one polynomial up to 5, and the other beyond.
        y = np.where(w < 5, inner, outer) * z
        if kind is np.float64:
            import math

            for _ in range(2):
                rest = np.asarray(np.frompyfunc(math.erfc, 1, 1)(y), dtype=np.float64)
                excess = np.where(z < 0.5, erf(y) - z, (1 - z) - rest)  # erf(y) - z
                y = y - np.where(np.isfinite(y), excess / (1.1283791670955126 * np.exp(-y * y)), 0)
        return np.copysign(np.where(z == 1, np.inf, y), x).astype(x.dtype)


def power(a, b):
    """Compute a to the b; if all exponents are 0.5 NumPy computes the square root, which differs at -inf and -0.0."""
    return np.where((b == 0.5) & ((a == 0) | (a == -np.inf)), np.abs(a), np.power(a, b)).astype(a.dtype)


def pow_int(a, b):
    """Compute an integer power; a negative exponent gives 0, except for the bases 1 and -1."""
    result = np.power(a, np.maximum(b, 0))
    unit = np.where(a == 1, 1, np.where(a == -1, 1 - 2 * (b & 1), 0)) if a.dtype.kind == "i" else a == 1
    return np.where(b < 0, unit, result).astype(a.dtype)


def or_nan(function, *operands):
    """Apply a function of numpy.linalg to stacked matrices, with nan for the matrices for which it raises."""
    try:
        return function(*operands)
    except np.linalg.LinAlgError:
        if operands[0].ndim > 2:
            rows = [or_nan(function, *parts) for parts in zip(*operands)]
            return tuple(np.stack(r) for r in zip(*rows)) if isinstance(rows[0], tuple) else np.stack(rows)
        results = function(*[np.eye(*x.shape, dtype=x.dtype) for x in operands])
        return tuple(r * np.nan for r in results) if isinstance(results, tuple) else results * np.nan


def triangular_solve(a, b, lower, transposed, unit_diagonal):
    """Solve a triangular system by rows, from the one with a single unknown on."""
    factor = np.swapaxes(a, -1, -2) if transposed else a
    x, n, forward = np.array(b), a.shape[-1], lower != transposed
    for i in range(n) if forward else reversed(range(n)):
        solved = slice(0, i) if forward else slice(i + 1, n)
        x[..., i, :] -= (factor[..., i : i + 1, solved] @ x[..., solved, :])[..., 0, :]
        if not unit_diagonal:
            x[..., i, :] /= factor[..., i, i, None]
    return x


def masked(condition, x):
    """Return x where the condition holds, else 0, on bits: np.where takes 20 times as long on mixed conditions."""
    word = np.dtype(f"i{x.dtype.itemsize}")
    mask = condition.view(np.int8).astype(word)
    np.negative(mask, out=mask)
    return np.bitwise_and(mask, x.view(word), out=mask).view(x.dtype)


def chosen(condition, a, b):
    """Return a where the condition holds, else b, on bits."""
    word = np.dtype(f"i{a.dtype.itemsize}")
    mask = condition.view(np.int8).astype(word)
    np.negative(mask, out=mask)
    other = b.view(word)
    difference = a.view(word) ^ other
    np.bitwise_and(difference, mask, out=difference)
    return np.bitwise_xor(difference, other, out=difference).view(a.dtype)


# -- reductions ---------------------------------------------------------------------------------------------------
def average(x, axis, keepdims):
    """Compute the mean, nan for empty axes without NumPy's warning."""
    total = np.sum(x, axis=axis, keepdims=keepdims, dtype=np.float32 if x.dtype.itemsize == 2 else None)
    count = 1
    for k in range(x.ndim) if axis is None else np.atleast_1d(axis):
        count *= x.shape[k]
    return (total / total.dtype.type(count)).astype(x.dtype)


# -- places -------------------------------------------------------------------------------------------------------
def index(indices):
    """Return positions as int64."""
    if indices.dtype == np.uint64:
        indices = np.minimum(indices, np.uint64(2**63 - 1))
    return indices.astype(np.int64)


def put(x, index, updates):
    """Return x with rows replaced; the last of several updates of one row wins."""
    out = x.copy()
    out[index] = updates
    return out


def add_at(x, index, updates):
    """Return x with rows added."""
    out = x.copy()
    np.add.at(out, index, updates)
    return out


def window(x, starts, sizes):
    """Return the index of a slice at dynamic starts, clamped to be in bounds."""
    begin = [min(max(int(s) + (n if s < 0 else 0), 0), n - z) for s, n, z in zip(starts, x.shape, sizes)]
    return tuple(slice(b, b + z) for b, z in zip(begin, sizes))


@needs(window)
def dynamic_update_slice(x, update, starts, out=None):
    """Return x with a part overwritten, in place if ``out`` is x."""
    out = x.copy() if out is None else out
    out[window(x, starts, update.shape)] = update
    return out


def dynamic_update_rows(x, update, starts, axis, out=None):
    """Return x with a slice of each row overwritten, in place if ``out`` is x."""
    out = x.copy() if out is None else out
    n, size = x.shape[axis], update.shape[axis]
    for row, new, start in zip(out, update, starts.tolist()):
        begin = min(max(start + (n if start < 0 else 0), 0), n - size)
        row[(slice(None),) * (axis - 1) + (slice(begin, begin + size),)] = new
    return out


def iota(shape, axis, dtype):
    """Return 0, 1, 2, ... along an axis."""
    line = np.arange(shape[axis]).astype(dtype)
    return np.broadcast_to(line.reshape([-1 if k == axis else 1 for k in range(len(shape))]), shape)


def pad(x, widths, value):
    """Add elements of one value before and after along each axis."""
    out = np.full([b + n + a for n, (b, a) in zip(x.shape, widths)], value, x.dtype)
    out[tuple(slice(b, b + n) for n, (b, _) in zip(x.shape, widths))] = x
    return out


# -- windows ------------------------------------------------------------------------------------------------------
@needs(pad)
def windows(x, kernel, stride, padding, dilation):
    """Return [batch, channels, *windows, *kernel], a view of the padded image."""
    if any(a or b for a, b in padding):
        x = pad(x, ((0, 0), (0, 0), *padding), 0)
    counts = tuple((n - (k - 1) * d - 1) // s + 1 for n, k, s, d in zip(x.shape[2:], kernel, stride, dilation))
    steps = x.strides[2:]
    strides = (*x.strides[:2], *(t * s for t, s in zip(steps, stride)), *(t * d for t, d in zip(steps, dilation)))
    return np.lib.stride_tricks.as_strided(x, (*x.shape[:2], *counts, *kernel), strides, writeable=False)


def product(sizes):
    """Return the product of integers; np.prod takes longer than a small convolution's copies."""
    import math

    return math.prod(sizes)


@needs(product, windows)
def columns(x, kernel, stride, padding, dilation, groups):
    """Yield im2col patches [images, groups, channels / groups * kernel, windows], with the slice of their images."""
    view = windows(x, kernel, stride, padding, dilation)
    rank = len(kernel)
    view = view.transpose(0, 1, *range(2 + rank, 2 + 2 * rank), *range(2, 2 + rank))
    rows, count = x.shape[1] // groups * product(kernel), product(view.shape[2 + rank :])
    images = min(len(x), max(1, 2**20 // max(1, groups * rows * count * x.itemsize)))  # a MiB stays in a cache
    patches = np.empty((images, *view.shape[1:]), x.dtype)
    for start in range(0, len(x), max(1, images)):
        part = slice(start, min(start + images, len(x)))
        block = patches[: part.stop - start]
        np.copyto(block, view[part])
        yield part, block.reshape(len(block), groups, rows, count)


@needs(columns, product, single)
def conv(x, w, shape, stride, padding, dilation, groups):
    """Convolve by one matrix product per image: kernels as rows, patches as columns."""
    kernels = single(w).reshape(groups, w.shape[0] // groups, product(w.shape[1:]))
    plain = all(k == 1 for k in w.shape[2:]) and all(s == 1 for s in stride) and not any(a or b for a, b in padding)
    image = single(x)
    if plain:
        y = np.matmul(kernels, image.reshape(len(x), groups, x.shape[1] // groups, product(x.shape[2:])))
    else:
        y = np.empty((len(x), groups, w.shape[0] // groups, product(shape[2:])), image.dtype)
        for part, patches in columns(image, w.shape[2:], stride, padding, dilation, groups):
            np.matmul(kernels, patches, out=y[part])
    return y.reshape(shape).astype(x.dtype, copy=False)


def spread(parts, shape, kernel, stride, padding, dilation):
    """Add the elements of every window to the image: the adjoint of extracting windows."""
    out = np.zeros((*shape[:2], *(n + a + b for n, (a, b) in zip(shape[2:], padding))), parts.dtype)
    counts = parts.shape[2 + len(kernel) :]
    for position in np.ndindex(*kernel):
        region = tuple(
            slice(k * d, k * d + (n - 1) * s + 1, s) for k, n, s, d in zip(position, counts, stride, dilation)
        )
        out[(slice(None), slice(None), *region)] += parts[(slice(None), slice(None), *position)]
    return out[(slice(None), slice(None), *(slice(a, a + n) for n, (a, _) in zip(shape[2:], padding)))]


@needs(product, single, spread)
def conv_input_grad(g, w, shape, stride, padding, dilation, groups):
    """Compute the cotangent of a convolution's image."""
    kernels = single(w).reshape(groups, w.shape[0] // groups, product(w.shape[1:]))
    operand = single(g).reshape(g.shape[0], groups, g.shape[1] // groups, product(g.shape[2:]))
    parts = np.matmul(kernels.transpose(0, 2, 1), operand)
    parts = parts.reshape(shape[0], shape[1], *w.shape[2:], *g.shape[2:])
    return spread(parts, shape, w.shape[2:], stride, padding, dilation).astype(g.dtype, copy=False)


@needs(columns, product, single)
def conv_weight_grad(x, g, shape, stride, padding, dilation, groups):
    """Compute the cotangent of a convolution's kernel."""
    cotangents = single(g).reshape(len(g), groups, g.shape[1] // groups, product(g.shape[2:]))
    gradient = np.zeros((groups, shape[0] // groups, product(shape[1:])), cotangents.dtype)
    for part, patches in columns(single(x), shape[2:], stride, padding, dilation, groups):
        gradient += np.matmul(cotangents[part], patches.transpose(0, 1, 3, 2)).sum(axis=0)
    return gradient.reshape(shape).astype(x.dtype, copy=False)


# -- primitives of shared helpers ------------------------------------------------------------------------------------
@needs(pad)
def bordered(x, padding, fill):
    """Return images with a border."""
    return pad(x, ((0, 0), (0, 0), *padding), fill)


def lowest(x):
    """Return the lowest number of a dtype."""
    return np.iinfo(x.dtype).min if x.dtype.kind in "iu" else -np.inf


def raise_part(x, cut, y):
    """Add y to a part of x, in place."""
    x[cut] += y
    return x


def float_key(x):
    """Return keys that sort floats as NumPy does, nan last."""
    return x.astype(np.float32) if x.dtype.itemsize == 2 else x


def counter(key, count):
    """Return the numbers from 0 on as high and low words."""
    numbers = np.arange(count, dtype=np.uint64)
    return (numbers >> np.uint64(32)).astype(np.uint32), numbers.astype(np.uint32)


def take_along(x, indices, axis):
    """Return elements at one position each along an axis; those of axes that share positions are copied together."""
    shared = [k for k, n in enumerate(x.shape) if k != axis and n != 1 and indices.shape[k] == 1]
    if not shared:
        return np.take_along_axis(x, indices, axis)
    lead = [k for k in range(x.ndim) if k not in shared]
    places = []
    for j, k in enumerate(lead):
        line = np.arange(x.shape[k]).reshape([-1 if i == j else 1 for i in range(len(lead))])
        places.append(indices.reshape([indices.shape[k] for k in lead]) if k == axis else line)
    rows = x.transpose(*lead, *shared)[tuple(places)]
    return rows.transpose(np.argsort([*lead, *shared]))


# -- sparse matrices --------------------------------------------------------------------------------------------------
@needs(columns_of, consistent_places)
def stored_rows(values, positions, starts, columns, few):
    """Return a sparse matrix of SciPy, in blocks for few columns of the other operand."""
    import scipy.sparse

    shape = len(starts) - 1, columns
    width = values.shape[1] if values.ndim == 2 else 1
    positions, starts = consistent_places(positions, starts, columns // width)
    if values.ndim == 2 and few:
        return scipy.sparse.bsr_array((values[:, None], positions, starts), shape=shape)
    # SciPy multiplies blocks with 64 columns 8 times as slowly as their elements.
    elements, columns_read = columns_of(values, positions)
    return scipy.sparse.csr_array((elements, columns_read, starts * width), shape=shape)


@needs(stored_rows)
def sparse_matmul(values, positions, starts, x):
    """Return the product of a sparse matrix with x."""
    return stored_rows(values, positions, starts, len(x), x.shape[1] == 1) @ x


@needs(stored_rows)
def sparse_matmul_transposed(values, positions, starts, x, columns):
    """Return the product of a transposed sparse matrix with x."""
    return stored_rows(values, positions, starts, columns, x.shape[1] == 1).T @ x


SCIPY_PRODUCTS = sparse_matmul, sparse_matmul_transposed


WORDS = {
    "as_words": "{0}",
    "astype": "{0}.astype({1}, copy=False)",
    "bits": "{0}.dtype.itemsize * 8",
    "clip": "np.minimum(np.maximum({0}, {1}), {2})",
    "copy": "np.array({0})",
    "is_float": '({0}.dtype.kind not in "iub")',
    "is_half": '({0}.dtype.itemsize == 2 and {0}.dtype.kind not in "iu")',
    "is_signed": '({0}.dtype.kind == "i")',
    "key_words": "{0}[:, None]",
    "nan_max": "np.max({0}, 0)",
    "numbers": "np.arange({0})",
    "ones": "np.ones({0}, {1}.dtype)",
    "raised": "np.maximum({0}, {1}, out={0})",
    "size": "{0}.size",
    "stable_argsort": 'np.argsort({0}, {1}, kind="stable")',
    "to_word": "np.asarray({0}).astype(np.int64).astype(np.uint32).reshape(1)",
    "typed": "{1}.dtype.type({0})",
    "word": "np.uint32({0})",
    "wrapped": "{0}",
    "zeros": "np.zeros({0}, {1}.dtype)",
}
dialect = Dialect(
    "np",
    WORDS,
    [
        add_at,
        bordered,
        counter,
        dynamic_update_rows,
        dynamic_update_slice,
        float_key,
        index,
        lowest,
        pow_int,
        put,
        raise_part,
        take_along,
    ],
)
