"""Functions whose source goes into generated files: PyTorch only, each standing alone save for those it ``needs``."""
# mypy: ignore-errors

import ml_dtypes
import numpy
import torch
import torch.nn.functional as F

from mithril.backend.codegen import needs


@needs(imports=("import ml_dtypes", "import numpy"))
def on_host(function, types, *arrays):
    """Results of a function of NumPy arrays, on the device of the first operand."""
    given = []
    for x in arrays:
        if x is None:
            given.append(None)
        elif x.dtype == torch.bfloat16:
            given.append(x.detach().cpu().contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16))
        else:
            given.append(x.detach().cpu().numpy())
    device = next((x.device for x in arrays if x is not None), None)
    results = []
    for result, (dtype, shape) in zip(function(*given), types):
        array = numpy.array(result, order="C")
        if dtype == torch.bfloat16:
            results.append(torch.from_numpy(array.view(numpy.int16)).view(torch.bfloat16).reshape(shape).to(device))
        else:
            results.append(torch.from_numpy(array).reshape(shape).to(device))
    return tuple(results)


# -- element-wise -------------------------------------------------------------------------------------------------
def on_words(function, *xs):
    """PyTorch lacks most operations on uint32: they run on int64."""
    return function(*[x.to(torch.int64) for x in xs])


def sign(x):
    """-1, 0 or 1; nan stays."""
    return torch.where(torch.isnan(x), x, torch.sign(x)) if x.is_floating_point() else torch.sign(x)


def gelu(x):
    """x times the normal distribution function; PyTorch's kernel overflows from half the largest number on."""
    inside = torch.clamp(x, max=torch.finfo(x.dtype).max / 2)
    return F.gelu(inside) - (inside - x)  # which keeps the sign of zeros


def remainder(a, b):
    """Return torch.fmod, which is nan where the quotient overflows: computed in float64, there in two steps."""
    if a.dtype != torch.float64 and a.device.type != "mps":  # which has no float64
        return torch.fmod(a.to(torch.float64), b.to(torch.float64)).to(torch.result_type(a, b))
    overflows = torch.isinf(a / b) & torch.isfinite(a) & (b != 0)
    return torch.fmod(torch.where(overflows, torch.fmod(a, b * 2.0**1023), a), b)


@needs(remainder)
def floordiv_float(a, b):
    """The quotient rounded down, infinities and zeros as in NumPy."""
    rest = remainder(a, b)
    whole = (a - rest) / b
    whole = torch.where((rest != 0) & ((b < 0) != (rest < 0)), whole - 1, whole)
    near = torch.floor(whole)
    near = torch.where(whole - near > 0.5, near + 1, near)
    near = torch.where(whole == 0, torch.copysign(torch.zeros_like(whole), a / b), near)
    return torch.where(b == 0, a / b, near)


@needs(remainder)
def mod_float(a, b):
    """What the quotient rounded down leaves: it has the sign of b."""
    rest = remainder(a, b)
    made = torch.where((rest != 0) & ((b < 0) != (rest < 0)), rest + b, rest)
    return torch.where(rest == 0, torch.copysign(torch.zeros_like(rest), b), made)


def floordiv_int(a, b):
    """Integer division towards minus infinity; by zero gives zero."""
    made = torch.div(a, torch.where(b == 0, torch.ones_like(b), b), rounding_mode="floor")
    return torch.where(b == 0, torch.zeros_like(made), made)


def mod_int(a, b):
    """What integer division leaves; by zero gives zero."""
    made = torch.remainder(a, torch.where(b == 0, torch.ones_like(b), b))
    return torch.where(b == 0, torch.zeros_like(made), made)


def pow_int(a, b):
    """Integer power by squaring, wrapping as it overflows; a negative exponent gives 0, except of 1 and -1."""
    a, b = torch.broadcast_tensors(a, b)
    whole, base, rest = torch.ones_like(a), a, torch.clamp(b, min=0)
    for _ in range(a.dtype.itemsize * 8):
        whole = torch.where((rest & 1) != 0, whole * base, whole)
        base, rest = base * base, rest >> 1
    if a.dtype == torch.uint8:
        return whole
    unit = torch.where(a == 1, torch.ones_like(a), torch.where(a == -1, 1 - 2 * (b & 1), torch.zeros_like(a)))
    return torch.where(b < 0, unit, whole)


def cast_to_int(x, dtype):
    """To an integer dtype: towards zero, saturating, nan as 0."""
    if x.dtype == torch.bool:
        return x.to(dtype)
    low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    if not x.is_floating_point():
        wide = x.to(torch.int64)
        return torch.clamp(wide, low, high).to(dtype)
    wide = torch.trunc(torch.nan_to_num(x.to(torch.float64), nan=0.0))
    inside = torch.where((wide >= float(high)) | (wide <= float(low)), torch.zeros_like(wide), wide).to(dtype)
    inside = torch.where(wide >= float(high), torch.full_like(inside, high), inside)
    return torch.where(wide <= float(low), torch.full_like(inside, low), inside)


def shift_left(a, b):
    """Bits moved up; past the width everything is 0."""
    inside = (b >= 0) & (b < a.dtype.itemsize * 8)
    made = torch.bitwise_left_shift(a, torch.where(inside, b, torch.zeros_like(b)))
    return torch.where(inside, made, torch.zeros_like(made))


def shift_right(a, b):
    """Bits moved down, the sign copied in."""
    last = a.dtype.itemsize * 8 - 1
    inside = (b >= 0) & (b <= last)
    made = torch.bitwise_right_shift(a, torch.where(inside, b, torch.zeros_like(b)))
    past = torch.zeros_like(made) if a.dtype == torch.uint8 else torch.bitwise_right_shift(a, torch.full_like(a, last))
    return torch.where(inside, made, past)


# -- reductions ---------------------------------------------------------------------------------------------------
def total(x, axes, keepdims, dtype):
    """The sum over axes; none of them leaves the elements alone."""
    return torch.sum(x, dim=axes, keepdim=keepdims, dtype=dtype) if axes else x.to(dtype, copy=True)


def product(x, axes, keepdims, dtype):
    """The product over axes."""
    x = x.to(dtype, copy=not axes)
    for axis in sorted(axes, reverse=True):
        x = torch.prod(x, dim=axis, keepdim=keepdims, dtype=dtype)
    return x


def average(x, axes, keepdims):
    """The mean over axes."""
    return torch.mean(x, dim=axes, keepdim=keepdims) if axes else x.clone()


def extreme(x, axes, keepdims, largest, start):
    """The largest or smallest element over axes; of no elements the start."""
    if not axes:
        return x.clone()
    if any(x.shape[k] == 0 for k in axes):
        shape = [1 if k in axes else n for k, n in enumerate(x.shape) if keepdims or k not in axes]
        return torch.full(shape, start, dtype=x.dtype, device=x.device)
    if x.dtype == torch.bool:
        return torch.any(x, dim=axes, keepdim=keepdims) if largest else torch.all(x, dim=axes, keepdim=keepdims)
    z = x.to(torch.int64) if x.dtype == torch.uint32 else x
    return (torch.amax if largest else torch.amin)(z, dim=axes, keepdim=keepdims).to(x.dtype)


def logic(x, axes, keepdims, function):
    """Whether any or all elements over axes are true."""
    return function(x, dim=axes, keepdim=keepdims) if axes else x != 0


def position(x, axis, keepdims, largest):
    """The first place of the largest or smallest element; nan wins."""
    if x.dtype in (torch.bool, torch.uint32):
        x = x.to(torch.int64)
    best = torch.amax(x, axis, keepdim=True) if largest else torch.amin(x, axis, keepdim=True)
    hits = (x == best) | (x != x)
    return torch.argmax(hits.to(torch.uint8), axis, keepdim=keepdims).to(torch.int32)


def running(x, accumulate, start, axis, reverse, exclusive):
    """A running sum or product, from either end, with or without the element itself."""
    wide = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.uint32: torch.int64}
    z = x.to(wide.get(x.dtype, x.dtype))
    z = torch.flip(z, (axis,)) if reverse else z
    out = accumulate(z, dim=axis, dtype=z.dtype)
    if exclusive and out.shape[axis]:
        first = torch.full_like(out.narrow(axis, 0, 1), start)
        out = torch.cat([first, out.narrow(axis, 0, out.shape[axis] - 1)], axis)
    return (torch.flip(out, (axis,)) if reverse else out).to(x.dtype)


# -- products -----------------------------------------------------------------------------------------------------
def matmul_int(a, b):
    """The matrix product of integers or bools, which PyTorch has for some shapes only."""
    wide = torch.matmul(a.to(torch.int64), b.to(torch.int64))
    return wide != 0 if a.dtype == torch.bool else wide.to(a.dtype)


def much_work(rows, inner, columns):
    """Whether a product is worth the ten microseconds that oneDNN takes to begin."""
    return rows >= 8 and rows * inner * columns >= 1 << 20


@needs(much_work)
def onednn_pays(x, rows, inner, columns):
    """Whether oneDNN multiplies these faster: on CPUs where MKL is slow by far, on others hardly less.

    Its operation has no gradient, and torch.compile takes it with packed weights only.
    """
    much = much_work(rows, inner, columns)
    return much and x.device.type == "cpu" and not torch.is_grad_enabled() and not torch.compiler.is_compiling()


@needs(onednn_pays)
def times(a, b):
    """The matrix product of float32: by oneDNN on a CPU, which multiplies twice as fast as MKL on some."""
    if b.ndim == 2 and a.ndim >= 2 and onednn_pays(a, a.numel() // max(a.shape[-1], 1), *b.shape):
        return torch.ops.mkldnn._linear_pointwise(a, b.t(), None, "none", [], "")
    return torch.matmul(a, b)


@needs(onednn_pays, gelu)
def linear(x, w, b, attribute, algorithm):
    """x @ w.T + b of float32 and an activation, in one kernel where there is one."""
    if x.ndim >= 2 and onednn_pays(x, x.numel() // max(x.shape[-1], 1), *w.shape):
        return torch.ops.mkldnn._linear_pointwise(x, w, b, attribute, [], algorithm)
    y = F.linear(x, w, b)
    if attribute == "none":
        return y
    if attribute == "gelu":
        return gelu(y) if algorithm == "none" else F.gelu(y, approximate=algorithm)
    return {"relu": torch.relu, "swish": F.silu, "sigmoid": torch.sigmoid, "tanh": torch.tanh}[attribute](y)


def nan_where_masked(y, mask):
    """Attention of queries that may attend to nothing is nan; PyTorch gives 0."""
    dead = ~mask.any(-1, keepdim=True) if mask.dtype == torch.bool else (mask == float("-inf")).all(-1, keepdim=True)
    return torch.where(dead, float("nan"), y)


def causal_mask(mask, n, m, like):
    """A mask under which the queries are the last positions of the keys, joined with the given one."""
    allowed = torch.ones((n, m), dtype=torch.bool, device=like.device).tril(m - n)
    if mask is None:
        return allowed
    return mask & allowed if mask.dtype == torch.bool else torch.where(allowed, mask.to(like.dtype), float("-inf"))


def dot(a, b, contract_a, contract_b, batch_a, batch_b, multiply):
    """Products summed over paired axes: [batch, rest of a, rest of b]."""
    rest_a = [k for k in range(a.ndim) if k not in contract_a and k not in batch_a]
    rest_b = [k for k in range(b.ndim) if k not in contract_b and k not in batch_b]
    left = a.permute((*batch_a, *rest_a, *contract_a))
    right = b.permute((*batch_b, *contract_b, *rest_b))
    batch, rows, columns = (left.shape[: len(batch_a)], [a.shape[k] for k in rest_a], [b.shape[k] for k in rest_b])
    inner, m, n = 1, 1, 1
    for k in contract_a:
        inner = inner * a.shape[k]
    for k in rows:
        m = m * k
    for k in columns:
        n = n * k
    made = multiply(left.reshape((*batch, m, inner)), right.reshape((*batch, inner, n)))
    return made.reshape((*batch, *rows, *columns))


# -- shapes -------------------------------------------------------------------------------------------------------
def part(x, axis, start, stop, step):
    """Every step-th element along an axis, backwards too."""
    at = range(x.shape[axis])[start:stop:step]
    return x.index_select(axis, torch.arange(at.start, at.stop, at.step, device=x.device))


def pad_inside(x, widths, mode):
    """Elements added before and after along each axis: the mirrored inside, or the edge."""
    for axis, (before, after) in enumerate(widths):
        if before or after:
            n = x.shape[axis]
            at = torch.arange(-before, n + after, device=x.device)
            inside = torch.clamp(at, 0, n - 1)
            x = x.index_select(axis, inside if mode == "edge" else 2 * inside - at)
    return x


# -- places -------------------------------------------------------------------------------------------------------
def positions(indices, size):
    """Positions counted from the front and clamped."""
    wide = indices.to(torch.int64)
    return torch.clamp(torch.where(wide < 0, wide + size, wide), 0, max(size - 1, 0))


@needs(positions)
def take(x, indices, axis):
    """Elements at positions along an axis."""
    shape = (*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :])
    return x.index_select(axis, positions(indices, x.shape[axis]).reshape(-1)).reshape(shape)


@needs(positions)
def take_along_axis(x, indices, axis):
    """Elements at positions of their own along an axis."""
    z = x.to(torch.int64) if x.dtype == torch.uint32 else x
    return torch.take_along_dim(z, positions(indices, x.shape[axis]), axis).to(x.dtype)


@needs(positions)
def addressed(x, indices, first=0):
    """A tuple of position arrays, one per axis addressed."""
    return tuple(positions(indices[..., k], x.shape[first + k]) for k in range(indices.shape[-1]))


@needs(addressed)
def gather_nd(x, indices, batch_dims):
    """Elements at positions in several axes."""
    if not indices.shape[-1] and not batch_dims:
        return x.expand(*indices.shape[:-1], *x.shape)
    inner = indices.ndim - 1
    batch = []
    for k in range(batch_dims):
        shape = [1] * inner
        shape[k] = x.shape[k]
        batch.append(torch.arange(x.shape[k], device=x.device).reshape(shape).expand(indices.shape[:-1]))
    return x[(*batch, *addressed(x, indices, batch_dims))]


@needs(addressed)
def scatter_nd(x, indices, updates):
    """x with elements replaced; of several updates of one place the last wins."""
    depth = indices.shape[-1]
    flat = updates.reshape(-1, *x.shape[depth:]) if updates.numel() else updates.reshape(0, *x.shape[depth:])
    n = flat.shape[0]
    if not n:
        return x
    if not depth:
        return flat[n - 1].reshape(x.shape)
    at = addressed(x, indices.reshape(-1, depth))
    place = torch.zeros(n, dtype=torch.int64, device=x.device)
    for k, one in enumerate(at):
        place = place * x.shape[k] + one
    count = 1
    for size in x.shape[:depth]:
        count *= size
    order = torch.full((count,), -1, dtype=torch.int64, device=x.device)
    order = order.scatter_reduce(0, place, torch.arange(n, device=x.device), "amax")
    last = flat[torch.clamp(order, min=0)].reshape(x.shape)
    touched = (order >= 0).reshape(*x.shape[:depth], *[1] * (x.ndim - depth))
    return torch.where(touched, last, x)


@needs(addressed)
def scatter_nd_add(x, indices, updates):
    """x with updates added."""
    depth = indices.shape[-1]
    wide = x.to(torch.float32) if x.dtype in (torch.float16, torch.bfloat16) else x
    if not updates.numel():
        return x
    flat = updates.to(wide.dtype).reshape(-1, *x.shape[depth:])
    if not depth:
        return (wide + flat.sum(0, dtype=wide.dtype)).to(x.dtype)
    at = addressed(x, indices.reshape(-1, depth))
    return wide.index_put(at, flat, accumulate=True).to(x.dtype)


def window_start(x, starts, sizes):
    """Starts of a part, counted from the front and moved inside."""
    n = torch.tensor(x.shape, device=x.device)
    wide = starts.to(torch.int64)
    front = torch.where(wide < 0, wide + n, wide)
    return torch.minimum(torch.clamp(front, min=0), n - torch.tensor(sizes, device=x.device))


@needs(window_start)
def dynamic_slice(x, starts, sizes):
    """A part of known size at computed starts."""
    first = window_start(x, starts, sizes)
    for axis, size in enumerate(sizes):
        if size != x.shape[axis]:
            x = x.index_select(axis, first[axis] + torch.arange(size, device=x.device))
    return x


@needs(window_start)
def dynamic_update_slice(x, update, starts):
    """x with a part overwritten."""
    first = window_start(x, starts, update.shape)
    at = []
    for axis, size in enumerate(update.shape):
        shape = [1] * x.ndim
        shape[axis] = size
        at.append((first[axis] + torch.arange(size, device=x.device)).reshape(shape))
    return x.index_put(tuple(at), update) if x.ndim else update


def argsort(x, axis, descending):
    """Positions in order; equal ones keep theirs, nan last."""
    if not x.ndim:
        return torch.zeros((), dtype=torch.int64, device=x.device)
    if x.is_floating_point():
        key = torch.where(torch.isnan(x), torch.full_like(x, float("nan")), -x if descending else x)
    elif x.dtype == torch.bool:
        key = (~x if descending else x).to(torch.uint8)
    else:
        z = x.to(torch.int64) if x.dtype == torch.uint32 else x
        key = ~z if descending else z
    return torch.sort(key, dim=axis, stable=True)[1]


# -- windows ------------------------------------------------------------------------------------------------------
def padded(x, padding, fill):
    """Images with a border; and what of the padding is left for the operation itself."""
    flat = [n for pair in reversed(padding) for n in pair]
    return F.pad(x, flat, value=fill) if any(flat) else x


def even(padding):
    """The padding as one number per axis where both sides agree, else None."""
    return [a for a, b in padding] if all(a == b for a, b in padding) else None


def onednn_runs(x):
    """Whether oneDNN's own operations may be called: they have no gradients, and torch.compile knows few of them."""
    recorded = torch.is_grad_enabled() or torch.compiler.is_compiling()
    return not recorded and x.dtype == torch.float32 and x.device.type == "cpu" and torch.backends.mkldnn.is_available()


def onednn_convolves(x, w):
    """Whether to ask oneDNN for a convolution: on one thread PyTorch leaves a small image to slower code of its own."""
    return w.ndim == 4 and w[0, 0].numel() > 1 and x.shape[0] == 1 and x.numel() <= 20480


def few_places(x, w, padding, stride, dilation):
    """Height and width of the result where a large kernel meets few places: laying it out costs oneDNN the most."""
    if w.ndim != 4 or w.numel() < 1 << 20:
        return None
    sizes = zip(x.shape[2:], w.shape[2:], padding, stride, dilation)
    made = [(n + 2 * p - (k - 1) * d - 1) // s + 1 for n, k, p, s, d in sizes]
    return made if 0 < x.shape[0] * made[0] * made[1] <= 64 else None


def by_columns(x, w, b, made, padding, stride, dilation, after):
    """A convolution as the product of a column for each place with the kernel as it lies."""
    columns = F.unfold(x, w.shape[2:], dilation, padding, stride).transpose(1, 2)
    y = torch.ops.mkldnn._linear_pointwise(columns.flatten(0, 1), w.flatten(1), b, after, [], "")
    return y.view(x.shape[0], -1, w.shape[0]).transpose(1, 2).contiguous().view(x.shape[0], w.shape[0], *made)


@needs(padded, even, onednn_runs, onednn_convolves, few_places, by_columns)
def conv(x, w, stride, padding, dilation, groups, b=None, relu=False):
    """Convolution of [batch, channels, ...] images, a number added to each channel, and what is below 0 left out."""
    own = even(padding)
    if own is None:
        x, own = padded(x, padding, 0.0), [0] * len(padding)
    if onednn_runs(x):
        after = "relu" if relu else "none"
        made = few_places(x, w, own, stride, dilation) if groups == 1 else None
        if made:
            return by_columns(x, w, b, made, own, stride, dilation, after)
        if onednn_convolves(x, w):
            return torch.ops.mkldnn._convolution_pointwise(x, w, b, own, stride, dilation, groups, after, [], "")
    made = (F.conv1d, F.conv2d, F.conv3d)[w.ndim - 3](x, w, b, stride, own, dilation, groups)
    return torch.relu_(made) if relu else made


@needs(padded, even)
def conv_gradient(g, x, w, stride, padding, dilation, groups, mask):
    """The cotangents of a convolution's image and kernel, those the mask asks for."""
    own = even(padding)
    inner = x.shape[2:]
    if own is None:
        x, own = padded(x, padding, 0.0), [0] * len(padding)
    made = torch.ops.aten.convolution_backward(
        g, x, w, None, stride, own, dilation, False, [0] * len(own), groups, [*mask, False]
    )
    if mask[0] and x.shape[2:] != inner:
        image = made[0]
        for axis, ((before, _), n) in enumerate(zip(padding, inner)):
            image = image.narrow(axis + 2, before, n)
        return image
    return made[0] if mask[0] else made[1]


@needs(conv_gradient)
def conv_input_grad(g, w, shape, stride, padding, dilation, groups):
    """The cotangent of a convolution's image."""
    x = torch.empty(shape, dtype=g.dtype, device=g.device)  # not read
    return conv_gradient(g, x, w, stride, padding, dilation, groups, (True, False))


@needs(conv_gradient)
def conv_weight_grad(x, g, shape, stride, padding, dilation, groups):
    """The cotangent of a convolution's kernel."""
    w = torch.empty(shape, dtype=g.dtype, device=g.device)  # not read
    return conv_gradient(g, x, w, stride, padding, dilation, groups, (False, True))


@needs(even)
def conv_grads(g, x, w, stride, padding, dilation, groups):
    """The cotangents of a convolution's image and kernel at once."""
    own = even(padding)
    return torch.ops.aten.convolution_backward(
        g, x, w, None, stride, own, dilation, False, [0] * len(own), groups, [True, True, False]
    )[:2]


def window_parts(x, kernel, stride, padding, dilation, fill):
    """For every element of the kernel the elements that meet it: a list of [batch, channels, ...]."""
    flat = [n for pair in reversed(padding) for n in pair]
    x = F.pad(x, flat, value=fill) if any(flat) else x
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


@needs(window_parts, padded)
def max_pool(x, kernel, stride, padding, dilation):
    """The largest element of each window; nan wins."""
    if not x.is_floating_point():
        parts = window_parts(x, kernel, stride, padding, dilation, torch.iinfo(x.dtype).min)
        return torch.stack(parts).amax(0)
    function = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[len(kernel) - 1]
    return function(padded(x, padding, float("-inf")), kernel, stride, 0, dilation)


@needs(even)
def max_found(x, kernel, stride, padding, dilation):
    """The largest element of each window of images, and where it was: of several nan PyTorch takes the last."""
    return F.max_pool2d(x, kernel, stride, even(padding), dilation, return_indices=True)


@needs(even)
def max_spread(g, x, at, kernel, stride, padding, dilation):
    """The cotangent of a max pool's operand, where its maxima are known."""
    return torch.ops.aten.max_pool2d_with_indices_backward(g, x, kernel, stride, even(padding), dilation, False, at)


@needs(padded, even)
def max_pool_grad(g, x, kernel, stride, padding, dilation):
    """The cotangent of a max pool's operand, of images: each window's goes to its first maximum."""
    inf = float("inf")
    own, inner = even(padding), x.shape[2:]
    x = torch.nan_to_num(x, nan=inf, posinf=inf, neginf=-inf)  # of several nan PyTorch would take the last
    if own is None or any(2 * p > k for p, k in zip(own, kernel)):
        x, own = padded(x, padding, -inf), [0] * len(padding)
    at = F.max_pool2d(x, kernel, stride, own, dilation, return_indices=True)[1]
    made = torch.ops.aten.max_pool2d_with_indices_backward(g, x, kernel, stride, own, dilation, False, at)
    for axis, ((before, _), n) in enumerate(zip(padding, inner)):
        if made.shape[axis + 2] != n:
            made = made.narrow(axis + 2, before, n)
    return made


@needs(window_parts)
def max_pool_positions(x, kernel, stride, padding, dilation):
    """The number of each window's first maximum within its channel; -1 where there is only padding."""
    low = float("-inf") if x.is_floating_point() else torch.iinfo(x.dtype).min
    met = torch.stack(window_parts(x, kernel, stride, padding, dilation, low))
    count = 1
    for n in x.shape[2:]:
        count *= n
    numbers = torch.arange(count, dtype=torch.int32, device=x.device).reshape(1, 1, *x.shape[2:])
    numbers = torch.stack(window_parts(numbers, kernel, stride, padding, dilation, -1))
    top = met.amax(0)
    hits = ((met == top) | ((met != met) & (top != top))) & (numbers >= 0)
    first = hits.to(torch.uint8).argmax(0, keepdim=True)
    found = torch.take_along_dim(numbers.expand(met.shape), first, 0)
    return torch.where(torch.take_along_dim(hits, first, 0), found, torch.full_like(found, -1))[0]


@needs(window_parts)
def pool_counts(x, shape, kernel, stride, padding, count_include_pad):
    """How many elements each window averages."""
    size = 1
    for k in kernel:
        size *= k
    if count_include_pad or not any(n for pair in padding for n in pair):
        return size
    ones = torch.ones((1, 1, *shape[2:]), dtype=x.dtype, device=x.device)
    return sum(window_parts(ones, kernel, stride, padding, (1,) * len(kernel), 0.0))


@needs(pool_counts, window_parts, even)
def avg_pool(x, kernel, stride, padding, count_include_pad):
    """The mean of each window."""
    z = x.to(torch.float32) if x.dtype in (torch.float16, torch.bfloat16) else x
    own = even(padding)
    if own is not None and all(p <= k // 2 for p, k in zip(own, kernel)):
        function = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[len(kernel) - 1]
        return function(z, kernel, stride, own, False, count_include_pad).to(x.dtype)
    parts = window_parts(z, kernel, stride, padding, (1,) * len(kernel), 0.0)
    return (sum(parts) / pool_counts(z, x.shape, kernel, stride, padding, count_include_pad)).to(x.dtype)


@needs(pool_counts)
def avg_pool_grad(g, shape, kernel, stride, padding, count_include_pad):
    """The cotangent of an average pool's operand."""
    z = g.to(torch.float32) if g.dtype in (torch.float16, torch.bfloat16) else g
    share = z / pool_counts(z, shape, kernel, stride, padding, count_include_pad)
    sizes = [n + a + b for n, (a, b) in zip(shape[2:], padding)]
    made = torch.zeros((*shape[:2], *sizes), dtype=z.dtype, device=z.device)
    grid = [()]
    for k in kernel:
        grid = [(*at, i) for at in grid for i in range(k)]
    for at in grid:
        cut = [slice(a, a + (n - 1) * s + 1, s) for a, n, s in zip(at, g.shape[2:], stride)]
        made[(slice(None), slice(None), *cut)] += share
    for axis, ((before, _), n) in enumerate(zip(padding, shape[2:])):
        made = made.narrow(axis + 2, before, n)
    return made.to(g.dtype)


# -- random: words are int64 in here, of which the lower 32 bits count ------------------------------------------------
def threefry(key, high, low):
    """Twenty rounds of Threefry-2x32 over pairs of words."""
    mask = 0xFFFFFFFF
    k = key.to(torch.int64)
    keys = (k[0], k[1], k[0] ^ k[1] ^ 0x1BD11BDA)
    x0, x1 = (high + keys[0]) & mask, (low + keys[1]) & mask
    for block in range(5):
        for r in ((13, 15, 26, 6), (17, 29, 16, 24))[block % 2]:
            x0 = (x0 + x1) & mask
            x1 = (((x1 << r) & mask) | (x1 >> (32 - r))) ^ x0
        x0 = (x0 + keys[(block + 1) % 3]) & mask
        x1 = (x1 + keys[(block + 2) % 3] + block + 1) & mask
    return x0, x1


@needs(threefry)
def random_words(key, shape):
    """Uniform 32-bit words as int64."""
    count = 1
    for n in shape:
        count *= n
    low = torch.arange(count, dtype=torch.int64, device=key.device)
    a, b = threefry(key, torch.zeros_like(low), low)
    return (a ^ b).reshape(shape)


@needs(random_words)
def random_bits(key, shape):
    """Uniform 32-bit words."""
    return random_words(key, shape).to(torch.uint32)


@needs(threefry)
def split_key(key, num):
    """Independent keys as rows."""
    low = torch.arange(num, dtype=torch.int64, device=key.device)
    return torch.stack(threefry(key, torch.zeros_like(low), low), dim=1).to(torch.uint32)


@needs(threefry)
def fold_in(key, data):
    """The key mixed with an integer."""
    word = data.to(torch.int64) & 0xFFFFFFFF
    return torch.stack(threefry(key, torch.zeros_like(word), word)).to(torch.uint32)
