"""Shared helpers for float32 upcasts, cumulative sums and products, and general products."""
# mypy: ignore-errors

from mithril.backend.codegen.shared.dialect import needs, xp


def single(x):
    """Upcast 16-bit floats to float32."""
    return xp.astype(x, xp.float32) if xp.is_half(x) else x


@needs(single)
def running(x, accumulate, start, axis, reverse, exclusive):
    """Accumulate a sum or product from either end; ``exclusive`` omits the element itself."""
    z = single(x)
    z = xp.flip(z, axis) if reverse else z
    out = accumulate(z, axis, dtype=z.dtype)
    if exclusive and x.shape[axis]:
        before = (slice(None),) * axis
        first = xp.full_like(out[(*before, slice(0, 1))], start)
        out = xp.concatenate([first, out[(*before, slice(0, -1))]], axis)
    return xp.astype(xp.flip(out, axis) if reverse else out, x.dtype)


def dot(a, b, contract_a, contract_b, batch_a, batch_b, multiply):
    """Contract paired axes: the result is [batch, rest of a, rest of b]."""
    rest_a = [k for k in range(a.ndim) if k not in contract_a and k not in batch_a]
    rest_b = [k for k in range(b.ndim) if k not in contract_b and k not in batch_b]
    left = xp.transpose(a, (*batch_a, *rest_a, *contract_a))
    right = xp.transpose(b, (*batch_b, *contract_b, *rest_b))
    batch, rows, columns = [a.shape[k] for k in batch_a], [a.shape[k] for k in rest_a], [b.shape[k] for k in rest_b]
    inner, m, n = 1, 1, 1
    for k in contract_a:
        inner = inner * a.shape[k]
    for k in rows:
        m = m * k
    for k in columns:
        n = n * k
    result = multiply(left.reshape((*batch, m, inner)), right.reshape((*batch, inner, n)))
    return result.reshape((*batch, *rows, *columns))
