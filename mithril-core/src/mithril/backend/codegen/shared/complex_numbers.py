"""Shared helper for complex numbers, which operations take and return as pairs."""
# mypy: ignore-errors

from mithril.backend.codegen.shared.dialect import xp


def as_pair(z, dtype):
    """Return real and imaginary part."""
    return xp.astype(xp.real(z), dtype), xp.astype(xp.imag(z), dtype)
