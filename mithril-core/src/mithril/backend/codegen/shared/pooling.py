"""Shared helpers for pooling over [batch, channels, ...] images, by one strided slice per kernel element."""
# mypy: ignore-errors

from mithril.backend.codegen.shared.dialect import needs, xp
from mithril.backend.codegen.shared.reductions import single


def offsets(sizes):
    """Return the index of each element of an array of this shape."""
    grid = [()]
    for n in sizes:
        grid = [(*place, k) for place in grid for k in range(n)]
    return grid


@needs(offsets)
def taps(kernel, counts, stride, dilation):
    """Return the slice of an image for each kernel element."""
    cuts = []
    for place in offsets(kernel):
        low = [k * d for k, d in zip(place, dilation)]
        cut = [slice(a, a + (n - 1) * s + 1, s) for a, n, s in zip(low, counts, stride)]
        cuts.append((slice(None), slice(None), *cut))
    return cuts


@needs(taps)
def window_parts(x, kernel, stride, padding, dilation, fill):
    """Return the image elements for each kernel element: a list of [batch, channels, ...]."""
    x = xp.bordered(x, padding, fill) if any(a or b for a, b in padding) else x
    counts = [(n - (k - 1) * d - 1) // s + 1 for n, k, s, d in zip(x.shape[2:], kernel, stride, dilation)]
    return [x[cut] for cut in taps(kernel, counts, stride, dilation)]


@needs(window_parts)
def max_pool(x, kernel, stride, padding, dilation):
    """Return the maximum of each window; nan propagates."""
    parts = window_parts(x, kernel, stride, padding, dilation, xp.lowest(x))
    result = xp.copy(parts[0])
    for one in parts[1:]:
        result = xp.raised(result, one)
    return result


@needs(window_parts)
def max_pool_positions(x, kernel, stride, padding, dilation):
    """Return the position of each window's first maximum in its channel, or -1 if the window has only padding."""
    count = 1
    for n in x.shape[2:]:
        count *= n
    numbers = xp.astype(xp.numbers(count, x), xp.int32).reshape(1, 1, *x.shape[2:])
    numbers = xp.stack(window_parts(numbers, kernel, stride, padding, dilation, -1))
    elements = xp.stack(window_parts(x, kernel, stride, padding, dilation, xp.lowest(x)))
    top = xp.nan_max(elements)
    hits = ((elements == top) | ((elements != elements) & (top != top))) & (numbers >= 0)
    # Elements of a window are ordered by position, so the first maximum has the smallest one: no gather is needed.
    first = xp.min(xp.where(hits, numbers, count), 0)
    return xp.astype(xp.where(first < count, first, -1), xp.int32)


@needs(window_parts)
def pool_counts(x, shape, kernel, stride, padding, count_include_pad):
    """Return the number of elements in each window's average, in the dtype of x."""
    size = 1
    for k in kernel:
        size *= k
    if count_include_pad or not any(a or b for a, b in padding):
        return size
    return sum(window_parts(xp.ones((1, 1, *shape[2:]), x), kernel, stride, padding, [1] * len(kernel), 0))


@needs(pool_counts, window_parts, single)
def avg_pool(x, kernel, stride, padding, count_include_pad):
    """Return the mean of each window."""
    z = single(x)
    total = sum(window_parts(z, kernel, stride, padding, [1] * len(kernel), 0))
    return xp.astype(total / pool_counts(z, x.shape, kernel, stride, padding, count_include_pad), x.dtype)


@needs(pool_counts, taps, single)
def avg_pool_grad(g, shape, kernel, stride, padding, count_include_pad):
    """Return the input gradient of an average pool."""
    z = single(g)
    share = z / pool_counts(z, shape, kernel, stride, padding, count_include_pad)
    result = xp.zeros((*shape[:2], *[n + a + b for n, (a, b) in zip(shape[2:], padding)]), z)
    for cut in taps(kernel, g.shape[2:], stride, [1] * len(kernel)):
        result = xp.raise_part(result, cut, share)
    interior = [slice(before, before + n) for (before, _), n in zip(padding, shape[2:])]
    return xp.astype(result[(slice(None), slice(None), *interior)], g.dtype)
