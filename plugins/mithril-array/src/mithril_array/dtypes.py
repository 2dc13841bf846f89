"""Dtypes of arrays: those of mithril, and complex ones, which are pairs of real numbers."""

from __future__ import annotations

from typing import Any

import numpy as np

from mithril.graph import (
    ALL,
    DType,
    DTypeError,
    bool_,
    dtype as as_dtype,
    float32,
    float64,
    int32,
    int64,
    promote,
    uint64,
)


class ComplexDType(DType):
    """The dtype of a pair of real numbers of the dtype ``part``."""

    __slots__ = ("part",)

    def __init__(self, name: str, short: str, part: DType) -> None:
        super().__init__(name, short, "complex", 2 * part.bits)
        self.part = part

    def __reduce__(self) -> tuple[Any, ...]:
        return named, (self.name,)


complex64 = ComplexDType("complex64", "c64", float32)
complex128 = ComplexDType("complex128", "c128", float64)
COMPLEX = {float32: complex64, float64: complex128}
DTYPES = {d.name: d for d in (*ALL, complex64, complex128)}
KINDS = {
    "bool": ("bool",),
    "signed integer": ("int",),
    "unsigned integer": ("uint",),
    "integral": ("int", "uint"),
    "real floating": ("float",),
    "complex floating": ("complex",),
    "numeric": ("int", "uint", "float", "complex"),
}
PYTHON_SCALARS = (bool, int, float, complex)


def named(like: Any) -> DType:
    """Return the dtype for a dtype, its name, or a dtype of NumPy."""
    if isinstance(like, DType):
        return like
    name = like if isinstance(like, str) else getattr(like, "name", str(like)).rsplit(".", 1)[-1]
    return DTYPES[name] if name in DTYPES else as_dtype(like)


def part_of(dtype: DType) -> DType:
    """Return the dtype of the parts of a complex number; that of any other is itself."""
    return dtype.part if isinstance(dtype, ComplexDType) else dtype


def complex_of(dtype: DType) -> ComplexDType:
    """Return the complex dtype whose parts represent the numbers of a dtype."""
    if isinstance(dtype, ComplexDType):
        return dtype
    return COMPLEX.get(dtype, complex128 if dtype.is_integer else complex64)


def joined(a: DType, b: DType) -> DType:
    """Return the common dtype of two arrays."""
    if a is b:
        return a
    if a.kind == "complex" or b.kind == "complex":
        return (
            COMPLEX[promote(part_of(complex_of(a)), part_of(complex_of(b)))]
            if _are_floats(a, b)
            else complex_of(a if a.kind == "complex" else b)
        )
    return promote(a, b)


def _are_floats(*dtypes: DType) -> bool:
    return all(d.is_float or d.kind == "complex" for d in dtypes)


def with_scalar(dtype: DType, scalar: complex, default: DType) -> DType:
    """Return the dtype of an array combined with a Python number, which never widens its kind."""
    if isinstance(scalar, bool) and dtype is bool_:
        return dtype
    if isinstance(scalar, complex):
        return complex_of(dtype if dtype.is_float or dtype.kind == "complex" else default)
    if isinstance(scalar, float):
        return dtype if dtype.is_float or dtype.kind == "complex" else default
    if dtype is bool_:
        raise DTypeError(
            f"an array of bools has no common dtype with the number {scalar}", hint="xp.astype(x, xp.int64)"
        )
    if isinstance(scalar, int) and dtype.is_integer:
        low, high = dtype.limits
        if not low <= scalar <= high:
            raise _OutOfRange(
                f"the number {scalar} is outside of {dtype}",
                facts=[f"accepted: {low} to {high}"],
                hint=f"xp.asarray({scalar}, dtype=xp.{'uint64' if scalar > 0 else 'int64'})",
            )
    return dtype


class _OutOfRange(DTypeError, OverflowError):
    """A Python integer has no representation in the dtype of the array that it is combined with."""


def is_kind(dtype: DType, kind: Any) -> bool:
    """Whether a dtype is of a kind: a name of the standard, a dtype, or a tuple of these."""
    if isinstance(kind, tuple):
        return any(is_kind(dtype, k) for k in kind)
    if isinstance(kind, DType):
        return dtype is kind
    if kind not in KINDS:
        raise DTypeError(f"'{kind}' is not a kind of dtypes", facts=[f"accepted: {', '.join(KINDS)}, dtypes, tuples"])
    return dtype.kind in KINDS[kind]


def can_cast(source: DType, target: DType) -> bool:
    """Whether promotion leads from one dtype to the other."""
    try:
        return joined(source, target) is target
    except DTypeError:
        return False


def summed(dtype: DType, available: frozenset[DType]) -> DType:
    """Return the dtype of sums and products: integers get 64 bits, if the engine has them."""
    if dtype is not bool_ and not dtype.is_integer:
        return dtype
    if dtype.kind == "uint" and uint64 in available:
        return uint64
    return int64 if int64 in available else int32 if dtype.bits < 32 else dtype


def limits(dtype: DType) -> np.finfo[Any]:
    """Return NumPy's limits of a floating-point dtype."""
    if dtype.name == "bfloat16":
        import ml_dtypes

        return ml_dtypes.finfo(dtype.numpy)  # type: ignore[no-any-return]
    return np.finfo(dtype.numpy)
