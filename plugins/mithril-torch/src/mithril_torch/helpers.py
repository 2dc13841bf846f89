"""Functions whose source is copied into generated files: they use PyTorch and the functions in ``needs`` only."""
# mypy: ignore-errors

import math
import warnings

import ml_dtypes
import numpy
import torch
import torch.nn.functional as F

from mithril.backend import Dialect, needs, pool_counts, positions, window_parts


@needs(imports=("import ml_dtypes", "import numpy"))
def on_host(function, types, *arrays):
    """Call a function of NumPy arrays; return its results on the device of the first operand."""
    host_arrays = []
    for x in arrays:
        if x.dtype == torch.bfloat16:
            host_arrays.append(x.detach().cpu().contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16))
        else:
            host_arrays.append(x.detach().cpu().numpy())
    device = next((x.device for x in arrays), None)
    results = []
    for result, (dtype, shape) in zip(function(*host_arrays), types):
        array = numpy.array(result, order="C")
        if dtype == torch.bfloat16:
            results.append(torch.from_numpy(array.view(numpy.int16)).view(torch.bfloat16).reshape(shape).to(device))
        else:
            results.append(torch.from_numpy(array).reshape(shape).to(device))
    return tuple(results)


def stored(x):
    """Return the operand of a barrier; ``torch.compile`` stores it, and does not compute it again where it is read."""
    return torch.ops.mithril.stored(x) if torch.compiler.is_compiling() else x


# -- element-wise -------------------------------------------------------------------------------------------------
def as_int64(function, *xs):
    """Call ``function`` on uint32 operands cast to int64, since PyTorch lacks most operations on uint32."""
    return function(*[x.to(torch.int64) for x in xs])


def has_values(x):
    """Whether Python can read the values of a tensor: nothing traces or batches it."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return False
    if type(x) is not torch.Tensor or torch._C._len_torch_dispatch_stack():
        return False
    return not torch._C._functorch.is_functorch_wrapped_tensor(x)


@needs(has_values)
def reads_values(x):
    """Whether Python can read the values of a tensor at once: it is on the CPU, too."""
    return x.device.type == "cpu" and has_values(x)


@needs(reads_values, imports=("import math",))
def gelu(x):
    """Return x times the normal distribution function; oneDNN's kernel overflows above half the dtype's maximum.

    A sum of the results shows whether one of them did, in a tenth of the time that avoiding it everywhere takes.
    """
    if reads_values(x):
        y = F.gelu(x)
        if math.isfinite(y.detach().sum().item()):
            return y
    clamped = torch.clamp(x, max=torch.finfo(x.dtype).max / 2)
    return F.gelu(clamped) - (clamped - x)  # preserves the sign of zeros


def fmod(a, b):
    """Return the remainder; torch.fmod is nan where the quotient overflows, so reduce in float64 and in two steps."""
    if a.dtype != torch.float64 and a.device.type != "mps":  # MPS lacks float64
        return torch.fmod(a.to(torch.float64), b.to(torch.float64)).to(torch.result_type(a, b))
    overflows = torch.isinf(a / b) & torch.isfinite(a) & (b != 0)
    return torch.fmod(torch.where(overflows, torch.fmod(a, b * 2.0**1023), a), b)


# -- reductions ---------------------------------------------------------------------------------------------------
def total(x, axes, keepdims, dtype):
    """Return the sum over ``axes``, or a copy if there are none."""
    return torch.sum(x, dim=axes, keepdim=keepdims, dtype=dtype) if axes else x.to(dtype, copy=True)


def product(x, axes, keepdims, dtype):
    """Return the product over ``axes``."""
    x = x.to(dtype, copy=not axes)
    for axis in sorted(axes, reverse=True):
        x = torch.prod(x, dim=axis, keepdim=keepdims, dtype=dtype)
    return x


def average(x, axes, keepdims):
    """Return the mean over ``axes``."""
    return torch.mean(x, dim=axes, keepdim=keepdims) if axes else x.clone()


def extreme(x, axes, keepdims, largest, start):
    """Return the maximum or minimum over ``axes``; ``start`` if there are no elements."""
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
    """Return the first index of the maximum or minimum; nan takes precedence."""
    if x.dtype in (torch.bool, torch.uint32):
        x = x.to(torch.int64)
    best = torch.amax(x, axis, keepdim=True) if largest else torch.amin(x, axis, keepdim=True)
    hits = (x == best) | (x != x)
    return torch.argmax(hits.to(torch.uint8), axis, keepdim=keepdims).to(torch.int32)


# -- products -----------------------------------------------------------------------------------------------------
def matmul_int(a, b):
    """Return the matrix product of integers or bools, which PyTorch supports for some shapes only."""
    product = torch.matmul(a.to(torch.int64), b.to(torch.int64))
    return product != 0 if a.dtype == torch.bool else product.to(a.dtype)


def or_nan(results):
    """Return the result of a function of torch.linalg, with nan for the matrices for which it failed."""
    factor, info = results
    return torch.where((info > 0)[..., None, None], float("nan"), factor)


def exceeds_call_overhead(rows, inner, columns):
    """Whether a product is large enough for oneDNN's call overhead of ten microseconds."""
    return rows >= 8 and rows * inner * columns >= 1 << 20


def mkl_is_fast():
    """Whether MKL runs on a processor of its maker; on others it takes twice the time of oneDNN."""
    if not hasattr(mkl_is_fast, "answer"):
        try:
            with open("/proc/cpuinfo") as info:
                # The rows of the first processor.
                mkl_is_fast.answer = "GenuineIntel" in info.read(4096)
        except OSError:
            mkl_is_fast.answer = False
    return mkl_is_fast.answer


def in_parts(*xs):
    """Whether a tensor is distributed: oneDNN's own operations have no rules of DTensor."""
    return any(hasattr(x, "placements") for x in xs)


@needs(exceeds_call_overhead, in_parts, mkl_is_fast)
def onednn_pays(x, w, rows, inner, columns):
    """Whether to multiply by oneDNN: far faster where MKL is slow on this CPU, hardly slower elsewhere.

    Where MKL is fast, small products and those of a transposed operand, which oneDNN copies, are faster without it.
    Its operation has no gradient, and torch.compile supports it with packed weights only.
    """
    if not exceeds_call_overhead(rows, inner, columns) or x.device.type != "cpu":
        return False
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or in_parts(x, w):
        return False
    return not mkl_is_fast() or (x.is_contiguous() and rows * inner * columns >= 1 << 23)


@needs(onednn_pays)
def matmul(a, b):
    """Return the float32 matrix product, by oneDNN on a CPU: on some, twice as fast as MKL."""
    if b.ndim == 2 and a.ndim >= 2 and onednn_pays(a, b, a.numel() // max(a.shape[-1], 1), *b.shape):
        return torch.ops.mkldnn._linear_pointwise(a, b.t(), None, "none", [], "")
    return torch.matmul(a, b)


@needs(onednn_pays, gelu)
def linear(x, w, b, attribute, algorithm):
    """Return ``activation(x @ w.T + b)`` for float32, as one kernel where oneDNN has one."""
    if x.ndim >= 2 and onednn_pays(x, w, x.numel() // max(x.shape[-1], 1), *w.shape):
        return torch.ops.mkldnn._linear_pointwise(x, w, b, attribute, [], algorithm)
    y = F.linear(x, w, b)
    if attribute == "none":
        return y
    if attribute == "gelu":
        return gelu(y) if algorithm == "none" else F.gelu(y, approximate=algorithm)
    return {"relu": torch.relu, "swish": F.silu, "sigmoid": torch.sigmoid, "tanh": torch.tanh}[attribute](y)


def batch_norm_for_state(x, scale, bias, eps):
    """Return the normalized batch, and its mean and variance, which have no gradient."""
    if x.numel() == 0:  # PyTorch's kernel refuses it (2.13)
        shape, unknown = (1, -1, *[1] * (x.ndim - 2)), torch.full_like(scale, float("nan"), requires_grad=False)
        return x * scale.reshape(shape) + bias.reshape(shape), unknown, unknown
    y, mean, spread = torch.native_batch_norm(x, scale, bias, None, None, True, 0.0, eps)
    return y, mean, (spread.pow(-2) - eps).clamp(min=0)


def batch_norm_saving(x, scale, bias, eps):
    """Return ``batch_norm_for_state`` and the statistics in the shape that its gradient reads."""
    shape = (1, -1, *[1] * (x.ndim - 2))
    if x.numel() == 0:  # PyTorch's kernel refuses it (2.13)
        unknown = torch.full_like(scale, float("nan"))
        return torch.empty_like(x), unknown, unknown, unknown.reshape(shape), unknown.reshape(shape)
    y, mean, spread = torch.native_batch_norm(x, scale, bias, None, None, True, 0.0, eps)
    return y, mean, (spread.pow(-2) - eps).clamp(min=0), mean.reshape(shape), spread.reshape(shape)


def batch_norm_grads(g, x, mean, spread, scale, has_scale, has_bias):
    """Return the cotangents of the operand, scale and bias of a batch norm in training."""
    if x.numel() == 0:  # PyTorch's kernel divides by the number of elements and ends the process (2.13)
        zeros = torch.zeros_like(scale.reshape(-1))
        return torch.empty_like(x), zeros, zeros
    statistics = mean.reshape(-1), spread.reshape(-1)
    mask = [True, has_scale, has_bias]
    return torch.ops.aten.native_batch_norm_backward(g, x, scale.reshape(-1), None, None, *statistics, True, 0.0, mask)


def with_even_rows(*xs):
    """Return arrays whose last axis is contiguous, as kernels of attention require."""
    return [x if x.stride(-1) == 1 else x.contiguous() for x in xs]


def causal_mask(mask, n, m, like):
    """Return ``mask`` combined with the causal mask in which the queries are the last positions of the keys."""
    allowed = torch.ones((n, m), dtype=torch.bool, device=like.device).tril(m - n)
    if mask is None:
        return allowed
    return mask & allowed if mask.dtype == torch.bool else torch.where(allowed, mask.to(like.dtype), float("-inf"))


@needs(causal_mask, reads_values, imports=("import math",))
def without_hidden(y, q, k, v, mask, causal, scale):
    """Return attention of which hidden keys have no part: PyTorch adds -inf to their scores, and nan stays nan."""
    kind = torch.promote_types(y.dtype, torch.float32)
    if not reads_values(y) or math.isfinite(y.sum(dtype=kind).item()):
        return y
    shared, scale = q.shape[1] // k.shape[1], q.shape[-1] ** -0.5 if scale is None else scale
    keys, values = (x.to(kind).repeat_interleave(shared, 1) for x in (k, v))
    scores = torch.matmul(q.to(kind) * scale, keys.mT)
    if mask is not None:
        scores = torch.where(mask, scores, float("-inf")) if mask.dtype == torch.bool else scores + mask
    if causal:
        scores = torch.where(causal_mask(None, *scores.shape[-2:], q), scores, float("-inf"))
    return torch.matmul(torch.softmax(scores, -1), values).to(y.dtype)


@needs(with_even_rows)
def attention_saving(q, k, v, causal, scale):
    """Return the attention on a CPU, and the logarithms of the sums of its weights."""
    q, k, v = with_even_rows(q, k, v)
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)


@needs(with_even_rows)
def attention_grads(g, y, sums, q, k, v, causal, scale):
    """Return the cotangents of the operands of ``attention_saving``."""
    g, q, k, v = with_even_rows(g, q, k, v)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return kernel(g, q, k, v, y, sums, 0.0, causal, scale=scale)


def nan_where_masked(y, mask):
    """Return ``y`` with nan for fully masked queries, for which PyTorch returns 0."""
    dead = ~mask.any(-1, keepdim=True) if mask.dtype == torch.bool else (mask == float("-inf")).all(-1, keepdim=True)
    return torch.where(dead, float("nan"), y)


@needs(positions)
def alignments(logits, labels, steps, counts, blank, dtype):
    """Return log probabilities, integer labels, lengths, and PyTorch's loss of each row with its log alphas."""
    p = torch.log_softmax(logits.to(dtype), -1)
    rows = torch.ones(labels.shape[0], dtype=torch.int64, device=labels.device)
    steps = rows * p.shape[1] if steps is None else steps.to(torch.int64).clamp(0, p.shape[1])
    counts = rows * labels.shape[1] if counts is None else counts.to(torch.int64).clamp(0, labels.shape[1])
    operands = p.transpose(0, 1), positions(labels, p.shape[2]), steps.cpu(), counts.cpu()
    return p, counts, operands, torch._ctc_loss(*operands, blank, True)


@needs(alignments)
def ctc(logits, labels, steps, counts, blank, reduction, zero_infinity, dtype):
    """Return the loss of each row or their mean or sum; rows without an alignment are infinite, without a gradient."""
    _, counts, _, (losses, _) = alignments(logits, labels, steps, counts, blank, dtype)
    losses = torch.where(torch.isinf(losses), 0.0 if zero_infinity else float("inf"), losses)
    if reduction == "mean":
        losses = (losses / counts.clamp(min=1)).mean()
    elif reduction == "sum":
        losses = losses.sum()
    return losses.to(logits.dtype)


@needs(alignments)
def ctc_grad(g, logits, labels, steps, counts, blank, reduction, zero_infinity, dtype):
    """Return the cotangent of the logits of ``ctc``; it is 0 for rows without an alignment."""
    p, counts, operands, (losses, alphas) = alignments(logits, labels, steps, counts, blank, dtype)
    rows = g.to(dtype).expand(losses.shape)
    if reduction == "mean":
        rows = rows / (counts.clamp(min=1) * max(len(losses), 1))
    gp = torch.ops.aten._ctc_loss_backward(rows, *operands, losses, alphas, blank, True)
    return torch.ops.aten._log_softmax_backward_data(gp.transpose(0, 1), p, -1, dtype).to(logits.dtype)


def sampled(x, grid, mode, padding_mode, align_corners, dtype):
    """Return the elements of images at positions from -1 to 1."""
    y = F.grid_sample(x.to(dtype), grid.to(dtype), mode, padding_mode, align_corners)
    return y.to(x.dtype)


def sampled_grads(g, x, grid, mode, padding_mode, align_corners, dtype):
    """Return the cotangents of the images and positions of ``sampled``."""
    kernel = (torch.ops.aten.grid_sampler_2d_backward, torch.ops.aten.grid_sampler_3d_backward)[x.ndim - 4]
    modes = ("bilinear", "nearest", "bicubic").index(mode), ("zeros", "border", "reflection").index(padding_mode)
    gx, ggrid = kernel(g.to(dtype), x.to(dtype), grid.to(dtype), *modes, align_corners, [True, True])
    return gx.to(x.dtype), ggrid.to(grid.dtype)


# -- indexing -----------------------------------------------------------------------------------------------------
def summed_parts(x):
    """Return a DTensor with its pending sums computed: rows of a split table can be read only once before."""
    from torch.distributed.tensor import Replicate

    placements = [Replicate() if p.is_partial() else p for p in getattr(x, "placements", ())]
    return x.redistribute(placements=placements) if placements else x


@needs(positions, in_parts, summed_parts)
def take(x, indices, axis):
    """Return the elements at ``indices`` along an axis."""
    if x.dtype == torch.uint32:  # index_select does not support it
        return take(x.view(torch.int32), indices, axis).view(torch.uint32)
    selected = positions(indices, x.shape[axis])
    embeds = torch.is_grad_enabled() or in_parts(x)
    if axis == 0 and x.ndim == 2 and x.is_floating_point() and embeds:
        rows = F.embedding(selected, x)  # DTensor splits its table; by index_select it would gather it
        return rows if type(rows) is torch.Tensor else summed_parts(rows)
    shape = (*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :])
    return x.index_select(axis, selected.reshape(-1)).reshape(shape)


def take_along(x, indices, axis):
    """Return one element per index along an axis."""
    z = x.to(torch.int64) if x.dtype == torch.uint32 else x
    # take_along_dim, which broadcasts too, makes open sizes constant in torch.export (torch 2.13).
    rests = [(*t.shape[:axis], *t.shape[axis + 1 :]) for t in (z, indices)]
    if rests[0] != rests[1]:
        shape = torch.broadcast_shapes(*rests)
        z, indices = (t.expand(*shape[:axis], t.shape[axis], *shape[axis:]) for t in (z, indices))
    return torch.gather(z, axis, indices).to(x.dtype)


def part_at(x, first, sizes):
    """Return a slice of static sizes at dynamic starts."""
    part = x.view(torch.int32) if x.dtype == torch.uint32 else x  # index_select does not support uint32
    for axis, size in enumerate(sizes):
        if size != x.shape[axis]:
            part = part.index_select(axis, first[axis] + torch.arange(size, device=x.device))
    return part if part.dtype == x.dtype else part.view(x.dtype)  # a view with a dtype has no gradient


def window(x, first, sizes):
    """Return the index of a slice at dynamic starts."""
    indices = []
    for axis, size in enumerate(sizes):
        shape = [1] * x.ndim
        shape[axis] = size
        indices.append((first[axis] + torch.arange(size, device=x.device)).reshape(shape))
    return tuple(indices)


@needs(window)
def put_part(x, first, update):
    """Return ``x`` with the slice at ``first`` replaced by ``update``."""
    return x.index_put(window(x, first, update.shape), update)


@needs(window)
def overwritten(x, first, update):
    """Overwrite the slice of ``x`` at ``first`` and return ``x``."""
    return x.index_put_(window(x, first, update.shape), update)


def overwritten_rows(x, first, update, axis):
    """Overwrite the slice of each row of ``x`` that begins at ``first`` and return ``x``."""
    rows, places = (torch.arange(update.shape[k], device=x.device) for k in (0, axis))
    index = (rows[:, None], *[slice(None)] * (axis - 1), first[:, None] + places)
    x[index] = update.movedim(axis, 1)
    return x


@needs(overwritten_rows)
def put_rows(x, first, update, axis):
    """Return ``x`` with the slice of each row that begins at ``first`` replaced by ``update``."""
    return overwritten_rows(x.clone(), first, update, axis)


def visible(mask):
    """Return the number of keys up to the last one that each row of a batch, or every row, may attend to.

    Rows without such a key see all of them.
    """
    count = mask.shape[-1]
    rows = (mask.flatten(1, -2) if mask.ndim == 4 else mask.reshape(1, -1, count)).any(1)
    last = torch.where(rows, torch.arange(1, count + 1, device=mask.device), 0).amax(1).tolist()
    return [n or count for n in last]


@needs(nan_where_masked, visible, without_hidden)
def cached_attention(q, k, v, mask, scale, **options):
    """Return attention to a cache, of which each row of a batch reads the positions that it has written."""
    seen = visible(mask)
    if len(set(seen)) <= 1:  # 0: an empty batch
        n = max(seen, default=mask.shape[-1])
        k, v, mask = k[:, :, :n], v[:, :, :n], mask[..., :n]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, **options)
        return nan_where_masked(without_hidden(y, q, k, v, mask, False, scale), mask)
    rows = (x.split(1) for x in (q, k, v, mask))
    return torch.cat([cached_attention(*row, scale, **options) for row in zip(*rows)])


# -- mixtures of experts ------------------------------------------------------------------------------------------
def grouped(experts, count):
    """Return the order that groups rows by their expert, and the end of each group; rows of no expert come last."""
    numbers = experts.reshape(-1).to(torch.int64)  # PyTorch cannot compare uint32
    numbers = torch.where((numbers >= 0) & (numbers < count), numbers, count)
    order = torch.argsort(numbers, stable=True)
    return order, torch.bincount(numbers, minlength=count + 1)[:count].cumsum(0)


def sizes_of(ends):
    """Return the sizes of groups as numbers."""
    ends = ends.tolist()
    return [last - first for first, last in zip([0, *ends], ends)]


def by_all_experts(x, w, experts):
    """Return the product of each row with the weight of its expert, computed for all experts: no size is variable."""
    rank = max(x.ndim - 1, experts.ndim)  # of the rows of the result
    y = torch.matmul(x.reshape(1, -1, x.shape[-1]), w)
    y = y.reshape(w.shape[0], *[1] * (rank + 1 - x.ndim), *x.shape[:-1], w.shape[2])
    numbers = torch.arange(w.shape[0], device=x.device).reshape(-1, *[1] * (rank + 1))
    return torch.where(experts[..., None].to(torch.int64) == numbers, y, 0).sum(0)


@needs(by_all_experts, grouped, has_values, sizes_of)
def expert_matmul(x, w, experts):
    """Return the product of each row with the weight of its expert."""
    if not has_values(experts):
        return by_all_experts(x, w, experts)
    shape = torch.broadcast_shapes(x.shape[:-1], experts.shape)
    lead = x.shape[:-1].numel()
    numbers = torch.arange(lead, device=x.device).reshape(x.shape[:-1]).expand(shape).reshape(-1)
    order, ends = grouped(experts.expand(shape), w.shape[0])
    sizes = sizes_of(ends)
    used = order[: sum(sizes)]
    rows = x.reshape(lead, x.shape[-1])[numbers[used]].split(sizes)
    parts = [a @ b for a, b in zip(rows, w.unbind()) if a.shape[0]]
    # No row, but autograd reaches the operands.
    parts = parts or [x.reshape(lead, x.shape[-1])[:0] @ w[:1].sum(0)]
    return x.new_zeros(numbers.shape[0], w.shape[2]).index_copy(0, used, torch.cat(parts)).reshape(*shape, w.shape[2])


@needs(grouped, sizes_of)
def expert_weight_grad(x, g, experts, count):
    """Return for each expert the sum of the outer products of its rows."""
    order, ends = grouped(experts, count)
    sizes = sizes_of(ends)
    used = order[: sum(sizes)]
    rows, cotangents = (z.reshape(experts.numel(), z.shape[-1])[used].split(sizes) for z in (x, g))
    products = [a.mT @ b for a, b in zip(rows, cotangents)]
    return torch.stack(products) if products else x.new_zeros(0, x.shape[-1], g.shape[-1])


def float_key(x):
    """Return sort keys for floats: every nan gets the same sign, so that all sort last."""
    return torch.where(torch.isnan(x), torch.full_like(x, float("nan")), x)


def stable_argsort(x, axis):
    """Return the indices of a stable ascending sort."""
    if not x.ndim:
        return torch.zeros((), dtype=torch.int64, device=x.device)
    return torch.sort(x.to(torch.uint8) if x.dtype == torch.bool else x, dim=axis, stable=True)[1]


# -- windows ------------------------------------------------------------------------------------------------------
def bordered(x, padding, fill):
    """Return images padded with ``fill``."""
    widths = [n for pair in reversed(padding) for n in pair]
    return F.pad(x, widths, value=fill) if any(widths) else x


def even(padding):
    """Return the padding as one number per axis, or None if the two sides differ."""
    return [a for a, b in padding] if all(a == b for a, b in padding) else None


@needs(in_parts)
def onednn_runs(x, w):
    """Whether oneDNN's own operations may be called.

    They have no gradients, autocast does not cast their operands, and torch.compile supports few.
    """
    excluded = torch.is_grad_enabled() or torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu")
    runs = not excluded and x.dtype == torch.float32 and x.is_cpu and torch.backends.mkldnn.is_available()
    return runs and not in_parts(x, w)


def onednn_convolves(x, w):
    """Whether to call oneDNN for a small image, for which PyTorch on one thread selects slower code of its own."""
    # PyTorch itself calls oneDNN for a single image of more than 20,480 elements (ConvParams::use_mkldnn).
    return w.ndim == 4 and w[0, 0].numel() > 1 and x.shape[0] == 1 and x.numel() <= 20480


def im2col_output_size(x, w, padding, stride, dilation):
    """Return the output's height and width if im2col is faster, else None.

    For a large kernel and a small output oneDNN spends most of its time in repacking the kernel.
    """
    # 4 MiB of kernel and 64 places: there repacking, in every call, costs more than the convolution. ResNet-18 on
    # 8 images of 64 x 64 takes 0.88 of the time so, with gradients 0.92.
    if w.ndim != 4 or w.numel() < 1 << 20:
        return None
    sizes = zip(x.shape[2:], w.shape[2:], padding, stride, dilation)
    height, width = ((n + 2 * p - (k - 1) * d - 1) // s + 1 for n, k, p, s, d in sizes)
    return (height, width) if 0 < x.shape[0] * height * width <= 64 else None


def im2col_conv(x, w, b, output_size, padding, stride, dilation, activation):
    """Return a convolution computed as im2col and a matrix product, without repacking the kernel."""
    columns = F.unfold(x, w.shape[2:], dilation, padding, stride).transpose(1, 2)
    y = torch.ops.mkldnn._linear_pointwise(columns.flatten(0, 1), w.flatten(1), b, activation, [], "")
    return y.view(x.shape[0], -1, w.shape[0]).transpose(1, 2).contiguous().view(x.shape[0], w.shape[0], *output_size)


@needs(even)
def packed_kernel(w, stride, padding, dilation, groups, shape):
    """Return a kernel in the layout that oneDNN selects for images of this shape."""
    symmetric = even(padding)
    if symmetric is None:
        shape = [*shape[:2], *(n + a + b for n, (a, b) in zip(shape[2:], padding))]
        symmetric = [0] * len(padding)
    if not torch.backends.mkldnn.is_available():
        return w
    return torch.ops.mkldnn._reorder_convolution_weight(w, symmetric, stride, dilation, groups, shape)


def channels_last(x):
    """Return an image with channels last in memory: a copy, unless it has this order."""
    return x.contiguous(memory_format=torch.channels_last if x.ndim == 4 else torch.channels_last_3d)


@needs(bordered, even, onednn_runs, onednn_convolves, im2col_output_size, im2col_conv)
def conv(x, w, stride, padding, dilation, groups, b=None, relu=False):
    """Return the convolution of [batch, channels, ...] images, with an optional bias per channel and relu."""
    symmetric = even(padding)
    if symmetric is None:
        x, symmetric = bordered(x, padding, 0.0), [0] * len(padding)
    if onednn_runs(x, w):
        activation = "relu" if relu else "none"
        if w.is_mkldnn:
            settings = (symmetric, stride, dilation, groups, activation, [], "")
            return torch.ops.mkldnn._convolution_pointwise(x, w, b, *settings)
        output_size = im2col_output_size(x, w, symmetric, stride, dilation) if groups == 1 else None
        if output_size:
            return im2col_conv(x, w, b, output_size, symmetric, stride, dilation, activation)
        if onednn_convolves(x, w):
            settings = (symmetric, stride, dilation, groups, activation, [], "")
            return torch.ops.mkldnn._convolution_pointwise(x, w, b, *settings)
    w = w.to_dense() if w.is_mkldnn else w
    y = (F.conv1d, F.conv2d, F.conv3d)[w.ndim - 3](x, w, b, stride, symmetric, dilation, groups)
    return torch.relu_(y) if relu else y


@needs(bordered, even)
def conv_gradient(g, x, w, stride, padding, dilation, groups, mask):
    """Return the cotangent of a convolution's image or kernel, whichever ``mask`` selects."""
    symmetric = even(padding)
    inner = x.shape[2:]
    if symmetric is None:
        x, symmetric = bordered(x, padding, 0.0), [0] * len(padding)
    gradients = torch.ops.aten.convolution_backward(
        g, x, w, None, stride, symmetric, dilation, False, [0] * len(symmetric), groups, [*mask, False]
    )
    if mask[0] and x.shape[2:] != inner:
        image = gradients[0]
        for axis, ((low, _), n) in enumerate(zip(padding, inner)):
            image = image.narrow(axis + 2, low, n)
        return image
    return gradients[0] if mask[0] else gradients[1]


@needs(conv_gradient)
def conv_input_grad(g, w, shape, stride, padding, dilation, groups):
    """Return the cotangent of a convolution's image."""
    x = g.new_empty(shape)  # not read
    return conv_gradient(g, x, w, stride, padding, dilation, groups, (True, False))


@needs(conv_gradient)
def conv_weight_grad(x, g, shape, stride, padding, dilation, groups):
    """Return the cotangent of a convolution's kernel."""
    w = g.new_empty(shape)  # not read
    return conv_gradient(g, x, w, stride, padding, dilation, groups, (False, True))


@needs(even)
def conv_grads(g, x, w, stride, padding, dilation, groups):
    """Return the cotangents of a convolution's image and kernel, from one call."""
    symmetric = even(padding)
    return torch.ops.aten.convolution_backward(
        g, x, w, None, stride, symmetric, dilation, False, [0] * len(symmetric), groups, [True, True, False]
    )[:2]


@needs(window_parts, bordered)
def max_pool(x, kernel, stride, padding, dilation):
    """Return the maximum of each window; nan takes precedence."""
    if not x.is_floating_point():
        parts = window_parts(x, kernel, stride, padding, dilation, torch.iinfo(x.dtype).min)
        return torch.stack(parts).amax(0)
    function = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[len(kernel) - 1]
    return function(bordered(x, padding, float("-inf")), kernel, stride, 0, dilation)


@needs(even)
def max_pool_with_indices(x, kernel, stride, padding, dilation):
    """Return the maximum of each image window and its index; of several nan PyTorch selects the last."""
    return F.max_pool2d(x, kernel, stride, even(padding), dilation, return_indices=True)


@needs(even)
def max_unpool(g, x, indices, kernel, stride, padding, dilation):
    """Return the cotangent of a max pool's operand from the indices of the maxima."""
    settings = (kernel, stride, even(padding), dilation, False)
    return torch.ops.aten.max_pool2d_with_indices_backward(g, x, *settings, indices)


@needs(bordered, even)
def max_pool_grad(g, x, kernel, stride, padding, dilation):
    """Return the cotangent of an image max pool's operand: each window's goes to its first maximum."""
    inf = float("inf")
    symmetric, inner = even(padding), x.shape[2:]
    x = torch.nan_to_num(x, nan=inf, posinf=inf, neginf=-inf)  # of several nan PyTorch would select the last
    if symmetric is None or any(2 * p > k for p, k in zip(symmetric, kernel)):
        x, symmetric = bordered(x, padding, -inf), [0] * len(padding)
    indices = F.max_pool2d(x, kernel, stride, symmetric, dilation, return_indices=True)[1]
    settings = (kernel, stride, symmetric, dilation, False)
    gradient = torch.ops.aten.max_pool2d_with_indices_backward(g, x, *settings, indices)
    for axis, ((before, _), n) in enumerate(zip(padding, inner)):
        if gradient.shape[axis + 2] != n:
            gradient = gradient.narrow(axis + 2, before, n)
    return gradient


@needs(pool_counts, window_parts, even)
def avg_pool(x, kernel, stride, padding, count_include_pad):
    """Return the mean of each window."""
    z = x.to(torch.float32) if x.dtype in (torch.float16, torch.bfloat16) else x
    symmetric = even(padding)
    if symmetric is not None and all(p <= k // 2 for p, k in zip(symmetric, kernel)):
        function = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[len(kernel) - 1]
        return function(z, kernel, stride, symmetric, False, count_include_pad).to(x.dtype)
    parts = window_parts(z, kernel, stride, padding, [1] * len(kernel), 0.0)
    return (sum(parts) / pool_counts(z, x.shape, kernel, stride, padding, count_include_pad)).to(x.dtype)


def raise_part(x, cut, y):
    """Add ``y`` to a slice of ``x`` in place."""
    x[cut] += y
    return x


def lowest(x):
    """Return the smallest value of the dtype of ``x``."""
    return float("-inf") if x.is_floating_point() else torch.iinfo(x.dtype).min


# -- shared helpers written for PyTorch; random words are int64, of which only the low 32 bits are significant --------
def single(x):
    """Return 16-bit floats as float32, and uint32 as int64."""
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
    put_rows,
    raise_part,
    single,
    stable_argsort,
)
dialect = Dialect("torch", WORDS, (*FUNCTIONS, take, take_along))


# -- sparse matrices --------------------------------------------------------------------------------------------------
def elements_of_rows(values, positions, starts):
    """Return the stored elements as a vector, with the column of each and the starts of rows; blocks are runs."""
    if values.ndim == 1:
        return values, positions, starts
    width = values.shape[1]
    run = torch.arange(width, dtype=positions.dtype, device=positions.device)
    return values.reshape(-1), (positions[:, None] * width + run).reshape(-1), starts * width


def consistent_places(positions, starts, columns):
    """Return positions within the columns, and starts within the stored elements, from 0 on and in order."""
    ends = torch.sort(starts[1:].clamp(0, len(positions))).values
    positions = torch.where(positions < 0, positions + columns, positions).clamp(0, columns - 1)
    return positions, torch.cat([torch.zeros_like(starts[:1]), ends])


@needs(elements_of_rows, imports=("import warnings",))
def stored_rows(values, positions, starts, columns):
    """Return a sparse matrix of PyTorch, without the padding."""
    elements, places, begins = elements_of_rows(values, positions, starts)
    stored = int(begins[-1])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta", UserWarning)
        shape = len(starts) - 1, columns
        return torch.sparse_csr_tensor(begins, places[:stored], elements[:stored], shape, check_invariants=False)


def row_of_each(positions, starts):
    """Return the row of each stored element of a sparse matrix, and the number of rows for padding."""
    places = torch.arange(len(positions), dtype=starts.dtype, device=starts.device)
    return torch.searchsorted(starts[1:].contiguous(), places, right=True)


@needs(stored_rows, row_of_each, consistent_places)
def sparse_matmul(values, positions, starts, x):
    """Return the product of a sparse matrix with x."""
    width = values.shape[1] if values.ndim == 2 else 1
    positions, starts = consistent_places(positions, starts, len(x) // width)
    # torch.compile traces no sparse tensors (PyTorch 2.13): gathers, and sums of rows.
    if torch.compiler.is_compiling():
        blocks = x.reshape(-1, width, x.shape[1])
        terms = (blocks[positions] * values.reshape(len(positions), width, 1)).sum(1)
        return x.new_zeros(len(starts), x.shape[1]).index_add(0, row_of_each(positions, starts), terms)[:-1]
    return stored_rows(values, positions, starts, len(x)) @ x


@needs(stored_rows, row_of_each, consistent_places)
def sparse_matmul_transposed(values, positions, starts, x, columns):
    """Return the product of a transposed sparse matrix with x."""
    width = values.shape[1] if values.ndim == 2 else 1
    positions, starts = consistent_places(positions, starts, columns // width)
    if torch.compiler.is_compiling():
        rows = torch.cat([x, x.new_zeros(1, x.shape[1])])[row_of_each(positions, starts)]
        terms = rows[:, None] * values.reshape(len(positions), width, 1)
        blocks = x.new_zeros(columns // width, width, x.shape[1])
        return blocks.index_add(0, positions, terms).reshape(columns, -1)
    return stored_rows(values, positions, starts, columns).t() @ x
