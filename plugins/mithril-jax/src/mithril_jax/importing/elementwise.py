"""JAX's primitives on elements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mithril import ops
from mithril.graph import UnsupportedError, dtype as as_dtype
from mithril_importing import special_functions as special
from mithril_importing.arrays import broadcast
from mithril_jax.importing.table import cast, kind_of, row

UNARY = {
    **{
        name: getattr(ops, name)
        for name in ("neg", "sin", "cos", "tan", "tanh", "exp", "log", "log1p", "expm1", "sqrt")
    },
    **{name: getattr(ops, name) for name in ("rsqrt", "abs", "sign", "floor", "ceil", "erf", "erfc", "square")},
    **{name: getattr(ops, name) for name in ("asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh")},
    "logistic": ops.sigmoid,
    "erf_inv": ops.erfinv,
    "is_finite": ops.isfinite,
}
BINARY = {
    **{name: getattr(ops, name) for name in ("add", "sub", "mul", "pow", "atan2")},
    "add_any": ops.add,
    "max": ops.maximum,
    "min": ops.minimum,
    "eq": ops.equal,
    "ne": ops.not_equal,
    "lt": ops.less,
    "le": ops.less_equal,
    "gt": ops.greater,
    "ge": ops.greater_equal,
}
BITS = {
    "and": (ops.logical_and, ops.bitwise_and),
    "or": (ops.logical_or, ops.bitwise_or),
    "xor": (ops.logical_xor, ops.bitwise_xor),
}

for _name, _op in UNARY.items():
    row(_name)(lambda x, op=_op, **_: op(x))
for _name, _op in BINARY.items():
    row(_name)(lambda x, y, op=_op, **_: op(x, y))
for _name, _pair in BITS.items():
    row(_name)(lambda x, y, pair=_pair, **_: pair[kind_of(x) != "bool"](x, y))


@row("not")
def invert(x: Any) -> Any:
    return (ops.logical_not if kind_of(x) == "bool" else ops.bitwise_not)(x)


@row("shift_left")
def shift_left(x: Any, y: Any) -> Any:
    return ops.shift_left(x, y)


@row("shift_right_arithmetic")
def shift_right(x: Any, y: Any) -> Any:
    return ops.shift_right(x, y)


@row("shift_right_logical")
def shift_right_logical(x: Any, y: Any) -> Any:
    """Shift zeros in, also for signed integers."""
    kind = kind_of(x)
    if kind.startswith("uint"):
        return ops.shift_right(x, y)
    return ops.bitcast(ops.shift_right(ops.bitcast(x, dtype=f"u{kind}"), ops.bitcast(y, dtype=f"u{kind}")), dtype=kind)


@row("div")
def divide(x: Any, y: Any) -> Any:
    """Divide; integers round towards zero."""
    if "int" not in kind_of(x):
        return ops.div(x, y)
    return ops.floordiv(ops.sub(x, remainder(x, y)), y)


@row("rem")
def remainder(x: Any, y: Any) -> Any:
    """Return the remainder with the sign of the dividend."""
    if kind_of(x).startswith("uint"):
        return ops.mod(x, y)
    return ops.mul(ops.sign(x), ops.mod(ops.abs(x), ops.abs(y)))


@row("integer_pow")
def integer_power(x: Any, y: int) -> Any:
    return ops.square(x) if y == 2 else ops.pow(x, float(y) if "float" in kind_of(x) else y)


@row("exp2")
def exp2(x: Any, **_: Any) -> Any:
    return ops.exp(ops.mul(x, float(np.log(2.0))))


@row("cbrt")
def cbrt(x: Any, **_: Any) -> Any:
    return ops.mul(ops.sign(x), ops.pow(ops.abs(x), 1.0 / 3.0))


SPECIAL: dict[str, Callable[..., Any]] = {
    "lgamma": special.lgamma,
    "digamma": special.digamma,
    "bessel_i0e": lambda x: special.scaled_bessel_i(x, 0),
    "bessel_i1e": lambda x: special.scaled_bessel_i(x, 1),
    "igamma": special.igamma,
    "igammac": lambda a, x: special.igamma(a, x, upper=True),
    "zeta": special.zeta,
    "regularized_incomplete_beta": special.betainc,
}
for _name, _function in SPECIAL.items():
    row(_name)(special.in_32_bits(_function))
row("nextafter")(special.nextafter)


@row("population_count")
def population_count(x: Any) -> Any:
    """Count the bits that are set, in groups of twice the width at each step."""
    kind, bits = kind_of(x), 8 * np.dtype(kind_of(x)).itemsize
    y, width = ops.bitcast(x, dtype=f"uint{bits}") if kind.startswith("int") else x, 1
    while width < bits:
        mask = np.asarray(sum(1 << k for k in range(bits) if not (k // width) % 2), f"uint{bits}")
        shift = np.asarray(width, f"uint{bits}")
        y = ops.add(ops.bitwise_and(y, mask), ops.bitwise_and(ops.shift_right(y, shift), mask))
        width *= 2
    return cast(y, kind)


@row("round")
def round_(x: Any, rounding_method: Any) -> Any:
    """Round halves to even, or away from zero."""
    if int(rounding_method) == 1:
        return ops.round(x)
    integers = ops.floor(ops.abs(x))
    upwards = ops.greater_equal(ops.sub(ops.abs(x), integers), 0.5)  # exact, as x + 0.5 is not
    return ops.mul(ops.sign(x), ops.where(upwards, ops.add(integers, 1.0), integers))


@row("select_n")
def select(which: Any, *cases: Any) -> Any:
    """Return the case of each element's number; two cases are selected by a bool."""
    if kind_of(which) == "bool":
        return ops.where(which, cases[1], cases[0])
    result = cases[0]
    for number, case in enumerate(cases[1:], start=1):
        result = ops.where(ops.equal(which, number), case, result)
    return result


@row("clamp")
def clamp(low: Any, x: Any, high: Any) -> Any:
    return ops.minimum(ops.maximum(x, low), high)


@row("convert_element_type")
def convert(x: Any, new_dtype: Any, **_: Any) -> Any:
    return cast(x, new_dtype)


@row("reduce_precision")
def reduce_precision(x: Any, exponent_bits: int, mantissa_bits: int) -> Any:
    """Round to a dtype with these bits, and back."""
    kinds = {(8, 23): "float32", (8, 7): "bfloat16", (5, 10): "float16", (11, 52): "float64"}
    return cast(cast(x, np.dtype(kinds[exponent_bits, mantissa_bits])), np.dtype(kind_of(x)))


@row("bitcast_convert_type")
def bitcast(x: Any, new_dtype: Any) -> Any:
    source, target = as_dtype(kind_of(x)), as_dtype(str(np.dtype(new_dtype)))
    if source.bits != target.bits:
        raise UnsupportedError(f"the bits of {source.name} cannot be read as {target.name}")
    return x if source is target else ops.bitcast(x, dtype=target)


@row("stop_gradient")
def stop_gradient(x: Any, **_: Any) -> Any:
    return ops.stop_gradient(x)


@row("copy", "copy_p", "optimization_barrier", "sharding_constraint", "name", "unbounded_loop")
def unchanged(*xs: Any, **_: Any) -> Any:
    return xs if len(xs) != 1 else xs[0]


@row("platform_index")
def platform_index(platforms: Any) -> Any:
    """Return the branch of ``lax.platform_dependent`` for other platforms, or for CPUs without one."""
    names = [("cpu",) if p is None else tuple(p) for p in platforms]
    return np.int32(max(k for k, p in enumerate(names) if "cpu" in p))  # the default, None, is the last


@row("device_put")
def device_put(*xs: Any, **_: Any) -> Any:
    return xs


# -- random numbers -----------------------------------------------------------------------------------------------
ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


@row("threefry2x32")
def threefry(k0: Any, k1: Any, x0: Any, x1: Any) -> tuple[Any, Any]:
    """Return 20 rounds of the Threefry cipher, as ``jax.random`` draws its bits."""
    shape = np.broadcast_shapes(*(tuple(x.shape) for x in (k0, k1, x0, x1)))
    k0, k1, x0, x1 = (broadcast(x, shape) for x in (k0, k1, x0, x1))
    keys = (k0, k1, ops.bitwise_xor(ops.bitwise_xor(k0, k1), np.uint32(0x1BD11BDA)))
    x0, x1 = ops.add(x0, keys[0]), ops.add(x1, keys[1])
    for group in range(5):
        for distance in ROTATIONS[group % 2]:
            x0 = ops.add(x0, x1)
            left = ops.shift_left(x1, np.uint32(distance))
            x1 = ops.bitwise_xor(ops.bitwise_or(left, ops.shift_right(x1, np.uint32(32 - distance))), x0)
        x0 = ops.add(x0, keys[(group + 1) % 3])
        x1 = ops.add(ops.add(x1, keys[(group + 2) % 3]), np.uint32(group + 1))
    return x0, x1
