"""Storage dtypes and compute dtypes.

Bools are stored as bytes. 16-bit floats are computed in float32 and rounded after every operation, so that fusion does
not change results.
"""

from __future__ import annotations

from mithril.graph import DType, bfloat16, float16
from mithril_cbackend import tir as t


def stored(dtype: DType) -> str:
    """Return the storage dtype: the element type of a buffer."""
    return {"bool": "uint8", "bfloat16": "uint16"}.get(dtype.name, dtype.name)


def computed(dtype: DType) -> str:
    """Return the compute dtype: the type of an expression."""
    return {"bfloat16": "float32", "float16": "float32"}.get(dtype.name, dtype.name)


def load_as_compute(x: t.Expr, dtype: DType) -> t.Expr:
    """Convert an element from its storage dtype to its compute dtype."""
    if dtype.is_bool:
        return t.not_equal(x, t.const(0, "uint8"))
    if dtype is bfloat16:
        bits = t.cast(x, "uint32") << t.const(16, "uint32")
        return t.bits(bits, "float32")
    return t.cast(x, computed(dtype))


def to_storage(code: t.Code, x: t.Expr, dtype: DType) -> t.Expr:
    """Convert an element from its compute dtype to its storage dtype."""
    if dtype.is_bool:
        return t.cast(x, "uint8")
    if dtype is bfloat16:
        return t.cast(_to_bfloat16(code, x) >> t.const(16, "uint32"), "uint16")
    return t.cast(x, stored(dtype))


def _to_bfloat16(code: t.Code, x: t.Expr) -> t.Expr:
    """Round a float32 to the upper 16 bits, ties to even, and return its bits; nan stays nan."""
    x = code.let(x)
    word = code.let(t.bits(x, "uint32"))
    one = t.const(1, "uint32")
    odd = word >> t.const(16, "uint32") & one
    up = word + t.const(0x7FFF, "uint32") + odd  # only nan would overflow
    quiet = t.const(0x7FC00000, "uint32")
    return t.select(t.isnan(x), quiet, up) & t.const(0xFFFF0000, "uint32")


def rounded(code: t.Code, x: t.Expr, dtype: DType) -> t.Expr:
    """Round x to the precision of its dtype."""
    if dtype is float16:
        return t.cast(t.cast(x, "float16"), "float32")
    if dtype is bfloat16:
        return t.bits(_to_bfloat16(code, x), "float32")
    return x


def load(buffer: t.Buffer, index: object, dtype: DType) -> t.Expr:
    return load_as_compute(t.load(buffer, index), dtype)


def store(code: t.Code, buffer: t.Buffer, index: object, x: t.Expr, dtype: DType) -> None:
    code.store(buffer, index, to_storage(code, x, dtype))
