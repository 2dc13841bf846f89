"""Shared helpers for indexing: gathers, scatters, slices, sorting, reflected padding."""
# mypy: ignore-errors

from mithril.backend.codegen.shared.dialect import needs, xp
from mithril.backend.codegen.shared.reductions import single


def positions(indices, size):
    """Return indices as non-negative positions, clamped to the axis."""
    signed = xp.index(indices)
    return xp.clip(xp.where(signed < 0, signed + size, signed), 0, max(size - 1, 0))


@needs(positions)
def take(x, indices, axis):
    """Return elements at positions along an axis."""
    shape = (*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :])
    return xp.take(x, positions(indices, x.shape[axis]), axis) if 0 not in shape else xp.zeros(shape, x)


@needs(positions)
def take_along_axis(x, indices, axis):
    """Return elements at one position each along an axis."""
    if not xp.size(indices):
        shapes = [[1 if k == axis else n for k, n in enumerate(z.shape)] for z in (x, indices)]
        shape = [a if b == 1 else b for a, b in zip(*shapes)]
        shape[axis] = indices.shape[axis]
        return xp.zeros(shape, x)
    return xp.take_along(x, positions(indices, x.shape[axis]), axis)


@needs(positions)
def addressed(x, indices, first):
    """Return a tuple of index arrays, one per indexed axis."""
    return tuple(positions(indices[..., k], x.shape[first + k]) for k in range(indices.shape[-1]))


@needs(addressed)
def gather_nd(x, indices, batch_dims):
    """Return elements at positions in several axes."""
    depth = indices.shape[-1]
    shape = (*indices.shape[:-1], *x.shape[batch_dims + depth :])
    if 0 in shape:
        return xp.zeros(shape, x)
    if not depth and not batch_dims:
        return xp.copy(xp.broadcast_to(x, shape))
    batch = []
    for k in range(batch_dims):
        line = [1] * (indices.ndim - 1)
        line[k] = x.shape[k]
        batch.append(xp.broadcast_to(xp.numbers(x.shape[k], x).reshape(line), indices.shape[:-1]))
    return x[(*batch, *addressed(x, indices, batch_dims))]


def put(x, index, updates):
    """Return x with rows replaced; of several updates of a row the last wins."""
    n, depth = updates.shape[0], len(index)
    offset, count = 0, 1
    for size, one in zip(x.shape, index):
        offset = offset * size + one
        count *= size
    order = xp.latest(count, offset, n, x).reshape(x.shape[:depth])
    last = updates[xp.clip(order, 0, n - 1)]
    return xp.where((order >= 0).reshape(*x.shape[:depth], *[1] * (x.ndim - depth)), last, x)


@needs(addressed, put)
def scatter_nd(x, indices, updates):
    """Return x with elements replaced; of several updates of an element the last wins."""
    depth = indices.shape[-1]
    if not xp.size(updates):
        return xp.copy(x)
    flat = updates.reshape(-1, *x.shape[depth:])
    return put(x, addressed(x, indices.reshape(-1, depth), 0), flat) if depth else xp.copy(flat[-1])


@needs(addressed, single)
def scatter_nd_add(x, indices, updates):
    """Return x with updates added."""
    depth = indices.shape[-1]
    if not xp.size(updates):
        return xp.copy(x)
    signed = single(x)
    flat = xp.astype(updates, signed.dtype).reshape(-1, *x.shape[depth:])
    if not depth:
        return xp.astype(signed + xp.sum(flat, 0), x.dtype)
    return xp.astype(xp.add_at(signed, addressed(x, indices.reshape(-1, depth), 0), flat), x.dtype)


def window_start(x, starts, sizes):
    """Return the start of a slice as a non-negative position, clamped such that the slice is in range."""
    signed = xp.index(starts)
    front = xp.where(signed < 0, signed + xp.sizes(x.shape, signed), signed)
    last = xp.sizes([n - size for n, size in zip(x.shape, sizes)], signed)
    return xp.minimum(xp.nonnegative(front), last)


@needs(window_start)
def dynamic_slice(x, starts, sizes):
    """Return a slice of static size at computed starts."""
    return xp.part_at(x, window_start(x, starts, sizes), sizes) if x.ndim else x


@needs(window_start)
def dynamic_update_slice(x, update, starts):
    """Return x with a slice replaced."""
    if 0 in update.shape:
        return xp.copy(x)
    return xp.put_part(x, window_start(x, starts, update.shape), update) if x.ndim else xp.copy(update)


def row_start(x, starts, axis, size):
    """Return the start of the slice of each row as a non-negative position, such that the slice is in range."""
    signed = xp.index(starts)
    front = xp.where(signed < 0, signed + x.shape[axis], signed)
    return xp.clip(front, 0, x.shape[axis] - size)


@needs(row_start)
def dynamic_update_rows(x, update, starts, axis):
    """Return x with a slice along an axis of each row replaced."""
    if 0 in update.shape:
        return xp.copy(x)
    return xp.put_rows(x, row_start(x, starts, axis, update.shape[axis]), update, axis)


def part(x, axis, start, stop, step):
    """Return a slice along one axis; the step may be negative."""
    index = range(x.shape[axis])[start:stop:step]
    if not index:
        return xp.zeros((*x.shape[:axis], 0, *x.shape[axis + 1 :]), x)
    return xp.take(x, index.start + index.step * xp.numbers(len(index), x), axis)


def pad_inside(x, widths, mode):
    """Pad each axis by its mirrored elements, by those of its other end, or by its edge."""
    for axis, (before, after) in enumerate(widths):
        if before or after:
            n = x.shape[axis]
            index = xp.numbers(n + before + after, x) - before
            clamped = xp.clip(index, 0, n - 1)
            if mode in ("symmetric", "wrap"):
                side = xp.clip(index - clamped, -1, 1)  # -1 before the axis, 1 after it
                index = index - n * side if mode == "wrap" else 2 * clamped - index + side
            else:
                index = clamped if mode == "edge" else 2 * clamped - index
            x = xp.take(x, index, axis)
    return x


def argsort(x, axis, descending):
    """Return the indices of a stable sort, with nan last."""
    if xp.is_float(x):
        key = xp.float_key(-x if descending else x)
    else:
        key = ~x if descending else x
    return xp.stable_argsort(key, axis)
