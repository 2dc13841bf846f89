"""Element-wise functions: tables of a name, its function of values, and the dtypes that it accepts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from mithril import ops
from mithril.graph import DType, DTypeError, ShapeError, bool_, shape_text
from mithril_array import complex_numbers as pairs, real_functions as reals
from mithril_array.array import Array, as_array, call_open, number, with_numbers
from mithril_array.complex_numbers import Pair, as_pair
from mithril_array.dtypes import PYTHON_SCALARS, joined, part_of

Function = Callable[..., Any]
BOOLS, INTEGERS = ("bool",), ("bool", "int", "uint")
REALS, NUMBERS = ("int", "uint", "float"), ("int", "uint", "float", "complex")
FLOATS, ANY = ("float", "complex"), ("bool", "int", "uint", "float", "complex")


def cast(x: Any, dtype: DType) -> Any:
    """Return a value with the dtype of a result: a pair if it is complex."""
    if dtype.kind == "complex":
        return as_pair(x, part_of(dtype))
    return x if x.dtype is dtype else ops.cast(x, dtype=dtype)


# -- one operand -----------------------------------------------------------------------------------------------------
def _both(real: Function, pair: Function) -> Function:
    def function(x: Any) -> Any:
        return pair(x) if isinstance(x, Pair) else real(x)

    function.__name__ = real.__name__ if hasattr(real, "__name__") else str(getattr(real, "name", "function"))
    return function


def _for_floats(function: Function) -> Function:
    """Return a rounding function: integers are results already."""

    def rounded(x: Any) -> Any:
        if isinstance(x, Pair):
            return Pair(function(x.re), function(x.im))
        return function(x) if x.dtype.is_float else x + 0

    return rounded


def _always(value: bool, function: Function, combine: Function) -> Function:
    """Return a test of floats, which is ``value`` for all other dtypes."""

    def test(x: Any) -> Any:
        if isinstance(x, Pair):
            return combine(function(x.re), function(x.im))
        return function(x) if x.dtype.is_float else ops.full(shape=x.shape, value=value, dtype=bool_)

    return test


def _square(z: Pair) -> Pair:
    return pairs.mul(z, z)


def _reciprocal(z: Pair) -> Pair:
    return pairs.div(as_pair(ops.ones_like(z.re), z.re.dtype), z)


def _negative(z: Pair) -> Pair:
    return Pair(-z.re, -z.im)


def _invert(x: Any) -> Any:
    return ops.logical_not(x) if x.dtype is bool_ else ops.bitwise_not(x)


def _real(x: Any) -> Any:
    return x.re if isinstance(x, Pair) else x


def _imag(x: Any) -> Any:
    return x.im if isinstance(x, Pair) else ops.zeros_like(x)


def _conj(x: Any) -> Any:
    return pairs.conj(x) if isinstance(x, Pair) else x


def _log2(z: Pair) -> Pair:
    return pairs.scaled(pairs.log(z), 1.0 / math.log(2.0))


def _log10(z: Pair) -> Pair:
    return pairs.scaled(pairs.log(z), 1.0 / math.log(10.0))


_MATH = {
    "acos": ops.acos, "acosh": ops.acosh, "asin": ops.asin, "asinh": ops.asinh, "atan": ops.atan, "atanh": ops.atanh,
    "cos": ops.cos, "cosh": ops.cosh, "exp": ops.exp, "expm1": ops.expm1, "log": ops.log, "log1p": ops.log1p,
    "sin": ops.sin, "sinh": ops.sinh, "sqrt": ops.sqrt, "tan": ops.tan, "tanh": ops.tanh,
}  # fmt: skip
UNARY: dict[str, tuple[Function, tuple[str, ...]]] = {
    "abs": (_both(ops.abs, pairs.magnitude), NUMBERS),
    "bitwise_invert": (_invert, INTEGERS),
    "ceil": (_for_floats(ops.ceil), REALS),
    "conj": (_conj, NUMBERS),
    "floor": (_for_floats(ops.floor), REALS),
    "imag": (_imag, NUMBERS),
    "isfinite": (_always(True, ops.isfinite, ops.logical_and), NUMBERS),
    "isinf": (_always(False, ops.isinf, ops.logical_or), NUMBERS),
    "isnan": (_always(False, ops.isnan, ops.logical_or), NUMBERS),
    "logical_not": (ops.logical_not, BOOLS),
    "negative": (_both(ops.neg, _negative), NUMBERS),
    "real": (_real, NUMBERS),
    "round": (_for_floats(ops.round), NUMBERS),
    "sign": (_both(ops.sign, pairs.sign), NUMBERS),
    "signbit": (reals.signbit, ("float",)),
    "square": (_both(ops.square, _square), NUMBERS),
    "trunc": (_for_floats(ops.trunc), REALS),
    "log2": (_both(reals.log2, _log2), FLOATS),
    "log10": (_both(reals.log10, _log10), FLOATS),
    "reciprocal": (_both(ops.reciprocal, _reciprocal), FLOATS),
    **{name: (_both(real, getattr(pairs, name)), FLOATS) for name, real in _MATH.items()},
}  # fmt: skip


def _refuse(name: str, dtype: DType, kinds: tuple[str, ...]) -> DTypeError:
    return DTypeError(
        f"{name} is not defined for {dtype}",
        facts=[f"accepted: dtypes of kind {', '.join(kinds)}"],
        hint="convert the operand: xp.astype(x, ...)",
    )


def _accepted(name: str, x: Array, kinds: tuple[str, ...]) -> Array:
    """Return an operand of an accepted dtype; functions of floats convert integers to the default float."""
    if x.dtype.kind in kinds:
        return x
    if "float" in kinds and "int" not in kinds and x.dtype.is_integer:
        return astype(x, x._xp.default_float)
    raise _refuse(name, x.dtype, kinds)


def _unary(name: str, kernel: Function, kinds: tuple[str, ...]) -> Function:
    def function(x: Array, /) -> Array:
        return call_open(kernel, _accepted(name, as_array(x), kinds))  # type: ignore[no-any-return]

    function.__name__ = function.__qualname__ = name
    return function


# -- two operands ----------------------------------------------------------------------------------------------------
def _joined(real: Function, pair: Function | None = None) -> Function:
    """Return a function of two operands, which are converted to their common dtype first."""

    def function(x: Any, y: Any) -> Any:
        dtype = joined(x.dtype, y.dtype)
        x, y = cast(x, dtype), cast(y, dtype)
        return real(x, y) if pair is None or not isinstance(x, Pair) else pair(x, y)

    return function


def _equal(a: Pair, b: Pair) -> Any:
    return ops.logical_and(ops.equal(a.re, b.re), ops.equal(a.im, b.im))


def _not_equal(a: Pair, b: Pair) -> Any:
    return ops.logical_or(ops.not_equal(a.re, b.re), ops.not_equal(a.im, b.im))


def _logical(function: Function, bits: Function) -> Function:
    return _joined(lambda x, y: function(x, y) if x.dtype is bool_ else bits(x, y))


BINARY: dict[str, tuple[Function, tuple[str, ...]]] = {
    "add": (_joined(ops.add, pairs.add), NUMBERS),
    "atan2": (_joined(ops.atan2), ("float",)),
    "bitwise_and": (_logical(ops.logical_and, ops.bitwise_and), INTEGERS),
    "bitwise_left_shift": (_joined(ops.shift_left), ("int", "uint")),
    "bitwise_or": (_logical(ops.logical_or, ops.bitwise_or), INTEGERS),
    "bitwise_right_shift": (_joined(ops.shift_right), ("int", "uint")),
    "bitwise_xor": (_logical(ops.logical_xor, ops.bitwise_xor), INTEGERS),
    "copysign": (_joined(reals.copysign), ("float",)),
    "divide": (_joined(ops.div, pairs.div), FLOATS),
    "equal": (_joined(ops.equal, _equal), ANY),
    "floor_divide": (_joined(reals.floor_divide), REALS),
    "greater": (_joined(ops.greater), REALS),
    "greater_equal": (_joined(ops.greater_equal), REALS),
    "hypot": (_joined(reals.hypot), ("float",)),
    "less": (_joined(ops.less), REALS),
    "less_equal": (_joined(ops.less_equal), REALS),
    "logaddexp": (_joined(reals.logaddexp), ("float",)),
    "logical_and": (_joined(ops.logical_and), BOOLS),
    "logical_or": (_joined(ops.logical_or), BOOLS),
    "logical_xor": (_joined(ops.logical_xor), BOOLS),
    "maximum": (_joined(ops.maximum), REALS),
    "minimum": (_joined(ops.minimum), REALS),
    "multiply": (_joined(ops.mul, pairs.mul), NUMBERS),
    "nextafter": (_joined(reals.nextafter), ("float",)),
    "not_equal": (_joined(ops.not_equal, _not_equal), ANY),
    "pow": (_joined(ops.pow, pairs.power), NUMBERS),
    "remainder": (_joined(ops.mod), REALS),
    "subtract": (_joined(ops.sub, pairs.sub), NUMBERS),
}


def broadcast(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the common shape of arrays that broadcast."""
    rank = max(map(len, shapes), default=0)
    out = [1] * rank
    for shape in shapes:
        for k, size in enumerate(shape, rank - len(shape)):
            if size != 1 and out[k] not in (1, size):
                text = ", ".join(map(shape_text, shapes))
                raise _Mismatch(f"shapes do not broadcast: {text}", facts=[f"axis {k - rank}: {out[k]} and {size}"])
            if size != 1:
                out[k] = size
    return tuple(out)


class _Mismatch(ShapeError, ValueError):
    """The shapes of operands have no common shape."""


def _binary(name: str, kernel: Function, kinds: tuple[str, ...]) -> Function:
    def function(x1: Any, x2: Any, /) -> Array:
        a, b = with_numbers(x1, x2)
        if a.dtype.kind not in kinds or b.dtype.kind not in kinds:
            a, b = _accepted(name, a, kinds), _accepted(name, b, kinds)
        if a.shape != b.shape:
            broadcast(a.shape, b.shape)
        return call_open(kernel, a, b)  # type: ignore[no-any-return]

    function.__name__ = function.__qualname__ = name
    return function


# -- the others ------------------------------------------------------------------------------------------------------
def _cast(x: Any, *, dtype: DType) -> Any:
    return cast(x, dtype)


def astype(x: Array, dtype: Any, /, *, copy: bool = True, device: Any = None) -> Array:
    """Convert elements as ``ops.cast``: floats to integers round towards zero and saturate."""
    x = as_array(x)
    x._xp.require_device(device)
    kind = x._xp.dtype(dtype)
    if kind is x.dtype:
        return Array(x._xp, x.parts, x.dtype) if copy else x
    if x.dtype.kind == "complex" and kind.kind not in ("complex", "bool"):
        raise DTypeError(f"cannot convert {x.dtype} to {kind}", hint="xp.real(x), xp.imag(x) or xp.abs(x)")
    if x.dtype.kind == "complex" and kind is bool_:
        return BINARY_FUNCTIONS["not_equal"](x, 0)  # type: ignore[no-any-return]
    return call_open(_cast, x, dtype=kind)  # type: ignore[no-any-return]


def positive(x: Array, /) -> Array:
    x = as_array(x)
    if x.dtype is bool_:
        raise _refuse("positive", x.dtype, NUMBERS)
    return Array(x._xp, x.parts, x.dtype)


def clip(x: Array, /, min: Any = None, max: Any = None) -> Array:
    """Limit elements; nan propagates."""
    x = as_array(x)
    if x.dtype.kind not in REALS:
        raise _refuse("clip", x.dtype, REALS)
    for function, bound in ((BINARY_FUNCTIONS["maximum"], min), (BINARY_FUNCTIONS["minimum"], max)):
        if bound is None:
            continue
        limit = number(_within(bound, x.dtype), x) if isinstance(bound, PYTHON_SCALARS) else as_array(bound)
        x = function(x, limit if limit.dtype is x.dtype else astype(limit, x.dtype))
    return positive(x) if min is None and max is None else x


def _within(bound: Any, dtype: DType) -> Any:
    if not dtype.is_integer:
        return bound
    low, high = dtype.limits
    return sorted((low, math.floor(bound), high))[1]


def _where(condition: Any, x: Any, y: Any) -> Any:
    dtype = joined(x.dtype, y.dtype)
    x, y = cast(x, dtype), cast(y, dtype)
    if isinstance(x, Pair):
        return Pair(ops.where(condition, x.re, y.re), ops.where(condition, x.im, y.im))
    return ops.where(condition, x, y)


def where(condition: Array, x1: Any, x2: Any, /) -> Array:
    condition = as_array(condition, "condition")
    if condition.dtype is not bool_:
        raise _refuse("the condition of where", condition.dtype, BOOLS)
    if not isinstance(x1, Array) and not isinstance(x2, Array):
        x1 = condition._xp.asarray(x1)
    a, b = with_numbers(x1, x2)
    broadcast(condition.shape, a.shape, b.shape)
    return call_open(_where, condition, a, b)  # type: ignore[no-any-return]


BINARY_FUNCTIONS = {name: _binary(name, *row) for name, row in BINARY.items()}
FUNCTIONS: dict[str, Function] = {
    **{name: _unary(name, *row) for name, row in UNARY.items()},
    **BINARY_FUNCTIONS,
    "astype": astype,
    "clip": clip,
    "positive": positive,
    "where": where,
}
