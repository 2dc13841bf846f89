"""How mithril's dtypes are held in memory and computed with.

Bools are bytes. 16-bit floats are computed as float32 and rounded after every operation, so that fusing operations
changes no result.
"""

from __future__ import annotations

from mithril.base import DType, bfloat16, float16
from mithril_cbackend import tir as t


def stored(dtype: DType) -> str:
    """The element type of a buffer."""
    return {"bool": "uint8", "bfloat16": "uint16"}.get(dtype.name, dtype.name)


def computed(dtype: DType) -> str:
    """The type of an expression."""
    return {"bfloat16": "float32", "float16": "float32"}.get(dtype.name, dtype.name)


def load_as_compute(x: t.Expr, dtype: DType) -> t.Expr:
    """An element as it is computed with, from as it is stored."""
    if dtype.is_bool:
        return t.not_equal(x, t.const(0, "uint8"))
    if dtype is bfloat16:
        bits = t.cast(x, "uint32") << t.const(16, "uint32")
        return t.bits(bits, "float32")
    return t.cast(x, computed(dtype))


def to_storage(code: t.Code, x: t.Expr, dtype: DType) -> t.Expr:
    """An element as it is stored, from as it is computed with."""
    if dtype.is_bool:
        return t.cast(x, "uint8")
    if dtype is bfloat16:
        return t.cast(_to_bfloat16(code, x) >> t.const(16, "uint32"), "uint16")
    return t.cast(x, stored(dtype))


def _to_bfloat16(code: t.Code, x: t.Expr) -> t.Expr:
    """The float32 bits of x rounded to the upper 16, halves to even; nan stays nan."""
    x = code.let(x)
    word = code.let(t.bits(x, "uint32"))
    one = t.const(1, "uint32")
    odd = word >> t.const(16, "uint32") & one
    up = word + t.const(0x7FFF, "uint32") + odd  # only nan would overflow
    quiet = t.const(0x7FC00000, "uint32")
    return t.select(t.isnan(x), quiet, up) & t.const(0xFFFF0000, "uint32")


def rounded(code: t.Code, x: t.Expr, dtype: DType) -> t.Expr:
    """x with no more digits than its dtype has."""
    if dtype is float16:
        return t.cast(t.cast(x, "float16"), "float32")
    if dtype is bfloat16:
        return t.bits(_to_bfloat16(code, x), "float32")
    return x


def load(buffer: t.Buffer, index: object, dtype: DType) -> t.Expr:
    return load_as_compute(t.load(buffer, index), dtype)


def store(code: t.Code, buffer: t.Buffer, index: object, x: t.Expr, dtype: DType) -> None:
    code.store(buffer, index, to_storage(code, x, dtype))
