"""Shared helpers for factorizations of matrices: symmetric operands, and factors with unique signs."""
# mypy: ignore-errors

from mithril.backend.codegen.shared.dialect import needs, xp
from mithril.backend.codegen.shared.reductions import single


@needs(single)
def symmetric(x):
    """Return (x + x^T) / 2, with 16-bit floats as float32."""
    z = single(x)
    return (z + xp.swapaxes(z, -1, -2)) / 2


def column_signs(vectors):
    """Return for each column the sign of its first large element, as a row."""
    magnitude = xp.abs(vectors)
    large = magnitude >= 0.618 * xp.amax(magnitude, -2)[..., None, :]
    first = xp.argmax(xp.astype(large, vectors.dtype), -2)[..., None, :]
    selected = xp.take_along(vectors, first, vectors.ndim - 2)
    return 1 - 2 * xp.astype(selected < 0, vectors.dtype)


def unique_qr(q, r):
    """Return the factors with a non-negative diagonal of r."""
    signs = 1 - 2 * xp.astype(xp.diagonal(r, 0, -2, -1) < 0, r.dtype)
    return q * signs[..., None, :], r * signs[..., :, None]


@needs(column_signs)
def unique_eigenvectors(values, vectors):
    return values, vectors * column_signs(vectors)


@needs(column_signs)
def unique_svd(u, s, vh):
    signs = column_signs(u)
    return u * signs, s, vh * xp.swapaxes(signs, -1, -2)
