"""Dtypes and their promotion rules."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from mithril.graph.errors import DTypeError, unknown


class DType:
    """An element type. Each dtype is a singleton, so ``is`` and ``==`` agree."""

    __slots__ = ("__dict__", "bits", "kind", "name", "short")

    def __init__(self, name: str, short: str, kind: str, bits: int) -> None:
        self.name = name
        self.short = short
        self.kind = kind  # "bool", "int", "uint" or "float"
        self.bits = bits

    @cached_property
    def numpy(self) -> np.dtype[Any]:
        """The NumPy dtype; bfloat16 is that of ml_dtypes, imported lazily."""
        if self.name == "bfloat16":
            import ml_dtypes

            result: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
            return result
        return np.dtype(self.name)

    def __fingerprint__(self) -> tuple[Any, ...]:
        return (self.name,)

    @property
    def itemsize(self) -> int:
        return self.bits // 8

    @property
    def is_float(self) -> bool:
        return self.kind == "float"

    @property
    def is_integer(self) -> bool:
        return self.kind in ("int", "uint")

    @property
    def is_bool(self) -> bool:
        return self.kind == "bool"

    @property
    def limits(self) -> tuple[int, int]:
        """The smallest and largest value of an integer dtype."""
        if self.kind == "int":
            return -(1 << (self.bits - 1)), (1 << (self.bits - 1)) - 1
        return 0, (1 << self.bits) - 1 if self.kind == "uint" else 1

    def __repr__(self) -> str:
        return self.name

    def __reduce__(self) -> tuple[Any, ...]:
        return dtype, (self.name,)

    def __copy__(self) -> DType:
        return self

    def __deepcopy__(self, memo: Any) -> DType:
        return self


bool_ = DType("bool", "bool", "bool", 8)
int8 = DType("int8", "i8", "int", 8)
int16 = DType("int16", "i16", "int", 16)
int32 = DType("int32", "i32", "int", 32)
int64 = DType("int64", "i64", "int", 64)
uint8 = DType("uint8", "u8", "uint", 8)
uint16 = DType("uint16", "u16", "uint", 16)
uint32 = DType("uint32", "u32", "uint", 32)
uint64 = DType("uint64", "u64", "uint", 64)
float16 = DType("float16", "f16", "float", 16)
bfloat16 = DType("bfloat16", "bf16", "float", 16)
float32 = DType("float32", "f32", "float", 32)
float64 = DType("float64", "f64", "float", 64)

# All dtypes, by family and width.
ALL = (
    bool_,
    *(int8, int16, int32, int64, uint8, uint16, uint32, uint64),
    *(float16, bfloat16, float32, float64),
)
FLOATS = (float16, bfloat16, float32, float64)
INTEGERS = (int8, int16, int32, int64, uint8, uint16, uint32, uint64)
DEFAULT_FLOAT, DEFAULT_INT = float32, int32

DTYPE_NAMES = {d.name: d for d in ALL} | {d.short: d for d in ALL} | {"bool_": bool_, "half": float16, "float": float32}
_BY_PYTHON: dict[Any, DType] = {bool: bool_, int: DEFAULT_INT, float: DEFAULT_FLOAT}


def dtype(like: Any) -> DType:
    """Return the dtype for a name, a Python type, a NumPy dtype or a dtype object of a framework."""
    if isinstance(like, DType):
        return like
    try:
        return _lookup(like)
    except TypeError:  # unhashable, so it cannot be a dtype
        raise _unknown_dtype(like) from None


def recognize(names: Mapping[Any, DType]) -> None:
    """Let ``dtype`` accept the dtype objects of a framework, whose names are not those of NumPy."""
    _BY_PYTHON.update(names)


@lru_cache(maxsize=256)
def _lookup(like: Any) -> DType:
    if like in _BY_PYTHON:
        return _BY_PYTHON[like]
    if isinstance(like, str):
        name = like
    else:
        name = getattr(like, "name", None) or getattr(like, "__name__", None) or str(like)
    result = DTYPE_NAMES.get(str(name).rsplit(".", 1)[-1])
    if result is None:
        raise _unknown_dtype(like)
    return result


def _unknown_dtype(like: Any) -> DTypeError:
    message, facts, hint = unknown("dtype", str(like), [d.name for d in ALL])
    if "complex" in str(like):
        hint = "complex numbers are two arrays, as ops.fft(re, im) returns them"
    return DTypeError(message, facts=facts, hint=hint)


@lru_cache(maxsize=1024)
def promote(a: DType, b: DType) -> DType:
    """Return the common dtype of two arrays; symmetric and equal on every backend.

    A float wins over an integer of any width; float16 and bfloat16 promote to float32; a signed and an unsigned integer
    promote to the smallest signed integer that represents both.
    """
    if a is b:
        return a
    if a.is_bool:
        return b
    if b.is_bool:
        return a
    if a.is_float and b.is_float:
        return float32 if a.bits == b.bits else max(a, b, key=lambda d: d.bits)
    if a.is_float or b.is_float:
        return a if a.is_float else b
    if a.kind == b.kind:
        return max(a, b, key=lambda d: d.bits)
    signed, unsigned = (a, b) if a.kind == "int" else (b, a)
    bits = max(signed.bits, 2 * unsigned.bits)
    if bits > 64:
        raise DTypeError(
            f"{a} and {b} have no common integer dtype",
            hint=f"cast one of them first, for example cast(x, dtype='{signed}')",
        )
    return DTYPE_NAMES[f"int{bits}"]


def promote_scalar(array: DType, scalar: Any) -> DType:
    """Return the dtype of an array combined with a Python scalar; a scalar never upcasts an array."""
    if isinstance(scalar, bool) or array.is_float:
        return array
    if isinstance(scalar, float):
        return DEFAULT_FLOAT
    return DEFAULT_INT if array.is_bool else array


def scalar_dtype(scalar: Any) -> DType:
    """Return the dtype of a Python scalar that is combined with no array."""
    return _BY_PYTHON[type(scalar)]
