"""Functions whose source goes into generated files: PyTorch only, each standing alone save for those it ``needs``."""
# mypy: ignore-errors

import ml_dtypes
import numpy
import torch
import torch.nn.functional as F

from mithril.backend import Dialect, needs, pool_counts, positions, window_parts


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


def gelu(x):
    """x times the normal distribution function; PyTorch's kernel overflows from half the largest number on."""
    inside = torch.clamp(x, max=torch.finfo(x.dtype).max / 2)
    return F.gelu(inside) - (inside - x)  # which keeps the sign of zeros


def fmod(a, b):
    """Return torch.fmod, which is nan where the quotient overflows: computed in float64, there in two steps."""
    if a.dtype != torch.float64 and a.device.type != "mps":  # which has no float64
        return torch.fmod(a.to(torch.float64), b.to(torch.float64)).to(torch.result_type(a, b))
    overflows = torch.isinf(a / b) & torch.isfinite(a) & (b != 0)
    return torch.fmod(torch.where(overflows, torch.fmod(a, b * 2.0**1023), a), b)


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


# -- places -------------------------------------------------------------------------------------------------------
@needs(positions)
def take(x, indices, axis):
    """Elements at positions along an axis."""
    shape = (*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :])
    return x.index_select(axis, positions(indices, x.shape[axis]).reshape(-1)).reshape(shape)


def take_along(x, indices, axis):
    """Return elements at one position each along an axis."""
    z = x.to(torch.int64) if x.dtype == torch.uint32 else x
    return torch.take_along_dim(z, indices, axis).to(x.dtype)


def part_at(x, first, sizes):
    """Return a part of known size at computed starts."""
    for axis, size in enumerate(sizes):
        if size != x.shape[axis]:
            x = x.index_select(axis, first[axis] + torch.arange(size, device=x.device))
    return x


def put_part(x, first, update):
    """x with a part overwritten."""
    at = []
    for axis, size in enumerate(update.shape):
        shape = [1] * x.ndim
        shape[axis] = size
        at.append((first[axis] + torch.arange(size, device=x.device)).reshape(shape))
    return x.index_put(tuple(at), update)


def float_key(x):
    """Floats as PyTorch sorts them: nan of one sign, which is last."""
    return torch.where(torch.isnan(x), torch.full_like(x, float("nan")), x)


def stable_argsort(x, axis):
    """Positions in order; equal elements keep theirs."""
    if not x.ndim:
        return torch.zeros((), dtype=torch.int64, device=x.device)
    return torch.sort(x.to(torch.uint8) if x.dtype == torch.bool else x, dim=axis, stable=True)[1]


# -- windows ------------------------------------------------------------------------------------------------------
def bordered(x, padding, fill):
    """Images with a border."""
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


@needs(bordered, even, onednn_runs, onednn_convolves, few_places, by_columns)
def conv(x, w, stride, padding, dilation, groups, b=None, relu=False):
    """Convolution of [batch, channels, ...] images, a number added to each channel, and what is below 0 left out."""
    own = even(padding)
    if own is None:
        x, own = bordered(x, padding, 0.0), [0] * len(padding)
    if onednn_runs(x):
        after = "relu" if relu else "none"
        made = few_places(x, w, own, stride, dilation) if groups == 1 else None
        if made:
            return by_columns(x, w, b, made, own, stride, dilation, after)
        if onednn_convolves(x, w):
            return torch.ops.mkldnn._convolution_pointwise(x, w, b, own, stride, dilation, groups, after, [], "")
    made = (F.conv1d, F.conv2d, F.conv3d)[w.ndim - 3](x, w, b, stride, own, dilation, groups)
    return torch.relu_(made) if relu else made


@needs(bordered, even)
def conv_gradient(g, x, w, stride, padding, dilation, groups, mask):
    """The cotangents of a convolution's image and kernel, those the mask asks for."""
    own = even(padding)
    inner = x.shape[2:]
    if own is None:
        x, own = bordered(x, padding, 0.0), [0] * len(padding)
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


@needs(window_parts, bordered)
def max_pool(x, kernel, stride, padding, dilation):
    """The largest element of each window; nan wins."""
    if not x.is_floating_point():
        parts = window_parts(x, kernel, stride, padding, dilation, torch.iinfo(x.dtype).min)
        return torch.stack(parts).amax(0)
    function = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[len(kernel) - 1]
    return function(bordered(x, padding, float("-inf")), kernel, stride, 0, dilation)


@needs(even)
def max_found(x, kernel, stride, padding, dilation):
    """The largest element of each window of images, and where it was: of several nan PyTorch takes the last."""
    return F.max_pool2d(x, kernel, stride, even(padding), dilation, return_indices=True)


@needs(even)
def max_spread(g, x, at, kernel, stride, padding, dilation):
    """The cotangent of a max pool's operand, where its maxima are known."""
    return torch.ops.aten.max_pool2d_with_indices_backward(g, x, kernel, stride, even(padding), dilation, False, at)


@needs(bordered, even)
def max_pool_grad(g, x, kernel, stride, padding, dilation):
    """The cotangent of a max pool's operand, of images: each window's goes to its first maximum."""
    inf = float("inf")
    own, inner = even(padding), x.shape[2:]
    x = torch.nan_to_num(x, nan=inf, posinf=inf, neginf=-inf)  # of several nan PyTorch would take the last
    if own is None or any(2 * p > k for p, k in zip(own, kernel)):
        x, own = bordered(x, padding, -inf), [0] * len(padding)
    at = F.max_pool2d(x, kernel, stride, own, dilation, return_indices=True)[1]
    made = torch.ops.aten.max_pool2d_with_indices_backward(g, x, kernel, stride, own, dilation, False, at)
    for axis, ((before, _), n) in enumerate(zip(padding, inner)):
        if made.shape[axis + 2] != n:
            made = made.narrow(axis + 2, before, n)
    return made


@needs(pool_counts, window_parts, even)
def avg_pool(x, kernel, stride, padding, count_include_pad):
    """The mean of each window."""
    z = x.to(torch.float32) if x.dtype in (torch.float16, torch.bfloat16) else x
    own = even(padding)
    if own is not None and all(p <= k // 2 for p, k in zip(own, kernel)):
        function = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[len(kernel) - 1]
        return function(z, kernel, stride, own, False, count_include_pad).to(x.dtype)
    parts = window_parts(z, kernel, stride, padding, [1] * len(kernel), 0.0)
    return (sum(parts) / pool_counts(z, x.shape, kernel, stride, padding, count_include_pad)).to(x.dtype)


def raise_part(x, cut, y):
    """Add y to a part of x, in place."""
    x[cut] += y
    return x


def lowest(x):
    """Return the lowest number of a dtype."""
    return float("-inf") if x.is_floating_point() else torch.iinfo(x.dtype).min


# -- shared helpers in PyTorch's words; random words are int64 there, of which the lower 32 bits count -----------------
def single(x):
    """16-bit floats as float32, and uint32 as int64."""
    return x.to(
        {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.uint32: torch.int64}.get(x.dtype, x.dtype)
    )


WORDS = {
    "add_at": "{0}.index_put({1}, {2}, accumulate=True)",
    "as_words": "{0}.to(torch.uint32)",
    "astype": "{0}.to({1})",
    "bits": "{0}.dtype.itemsize * 8",
    "broadcast_arrays": "torch.broadcast_tensors",
    "clip": "torch.clamp",
    "concatenate": "torch.cat",
    "copy": "{0}.clone()",
    "flip": "torch.flip({0}, ({1},))",
    "index": "{0}.to(torch.int64)",
    "is_float": "{0}.is_floating_point()",
    "is_signed": "{0}.dtype.is_signed",
    "key_words": "{0}.to(torch.int64)",
    "latest": (
        'torch.full(({0},), -1, device={3}.device).scatter_reduce(0, {1}, torch.arange({2}, device={3}.device), "amax")'
    ),
    "left_shift": "torch.bitwise_left_shift",
    "min": "torch.amin",
    "nan_max": "torch.amax({0}, 0)",
    "nonnegative": "torch.clamp({0}, min=0)",
    "numbers": "torch.arange({0}, device={1}.device)",
    "ones": "torch.ones({0}, dtype={1}.dtype, device={1}.device)",
    "raised": "torch.maximum",
    "right_shift": "torch.bitwise_right_shift",
    "saturated": "torch.clamp({0}.to(torch.int64), {1}, {2})",
    "signed_zero": "torch.copysign(torch.zeros_like({0}), {0})",
    "size": "{0}.numel()",
    "sizes": "torch.tensor({0}, device={1}.device)",
    "take": "{0}.index_select({2}, {1})",
    "to_word": "{0}.to(torch.int64) & 0xFFFFFFFF",
    "transpose": "{0}.permute({1})",
    "typed": "torch.full_like({1}, {0})",
    "word": "{0}",
    "words": "torch.arange({0}, dtype=torch.int64, device={1}.device)",
    "wrapped": "({0}) & 0xFFFFFFFF",
    "zeros": "torch.zeros({0}, dtype={1}.dtype, device={1}.device)",
}
FUNCTIONS = (
    avg_pool,
    bordered,
    float_key,
    fmod,
    lowest,
    max_pool,
    part_at,
    put_part,
    raise_part,
    single,
    stable_argsort,
)
dialect = Dialect("torch", WORDS, (*FUNCTIONS, take, take_along))
