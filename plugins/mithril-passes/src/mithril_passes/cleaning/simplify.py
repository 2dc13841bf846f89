"""Algebraic simplification: rules with bitwise identical results, and separately rules that change rounding."""

from __future__ import annotations

import math
from typing import Any

from mithril.graph import DType, Value
from mithril.ops import (
    abs as abs_,
    add,
    broadcast_to,
    cast,
    dequantize,
    div,
    exp,
    log,
    max as max_,
    maximum,
    mean,
    minimum,
    mul,
    neg,
    quantize,
    relu,
    reshape,
    rsqrt,
    slice as slice_,
    sqrt,
    square,
    sub,
    sum as sum_,
    transpose,
    unsqueeze,
    where,
)
from mithril.passes import Rule, RuleSet, rule


def _holds_all(target: DType, narrow: DType) -> bool:
    """Whether the wide dtype represents every value of the narrow dtype."""
    if narrow.is_bool:
        return True
    if target.is_float and narrow.is_float:
        return target.bits > narrow.bits or target is narrow
    if target.is_integer and narrow.is_integer:
        low, high = narrow.limits
        return target.limits[0] <= low and high <= target.limits[1]
    # bfloat16 has 8 digits, which hold integers of 8 bits; float32 has 24, and float64 53.
    return target.is_float and narrow.is_integer and narrow.bits <= {16: 8, 32: 16, 64: 32}[target.bits]


def _round_trips(x: Value, *, first: Any, second: Any) -> bool:
    return second is x.dtype and _holds_all(first, x.dtype)


def _power_of_two(x: Value, *, c: float) -> bool:
    """Whether the divisor is a power of two, whose reciprocal is exact."""
    from math import frexp, isfinite

    # Within 2**10, so that the reciprocal is a normal number of float16, too.
    return isfinite(c) and c != 0 and abs(frexp(c)[0]) == 0.5 and 2.0**-10 <= abs(c) <= 2.0**10 and x.dtype.is_float


def _composed(x: Value, *, inner: Any, outer: Any) -> Any:
    return transpose(x, perm=tuple(inner[k] for k in outer))


def _swaps(x: Value, *, flat: Any, perm: Any, shape: Any) -> bool:
    """Whether the last two axes are swapped, while those in front of them are joined and divided again."""
    product = len(flat) == 3 and tuple(perm) == (0, 2, 1) and tuple(flat[1:]) == tuple(x.shape[-2:])
    return product and tuple(shape) == (*x.shape[:-2], *tuple(x.shape[-2:])[::-1])


def _swapped(x: Value) -> Any:
    n = len(x.shape)
    return transpose(x, perm=(*range(n - 2), n - 1, n - 2))


def _prepends(x: Value, p: Value, *, shape: Any) -> bool:
    """Whether a reshape prepends axes of size 1, as the operation that reads it does itself."""
    return tuple(shape) == ((1,) * (len(shape) - len(p.shape)) + tuple(p.shape)) and len(shape) <= len(x.shape)


def _inserted(x: Any, *, axis: Any) -> Any:
    sizes, rank = iter(x.shape), len(x.shape) + len(axis)
    new = {a % rank for a in axis}
    return reshape(x, shape=tuple(1 if k in new else next(sizes) for k in range(rank)))


def _without_ones(f: Any) -> Rule:
    """Return the rule for an operand of f with axes in front that f prepends itself."""
    return rule(
        lambda x, p, *, shape=(1, 3): f(x, reshape(p, shape=shape)),
        lambda x, p: f(x, p),
        when=_prepends,
        exact=True,
        name="operand with axes of size 1 in front",
    )


def _without_broadcast(f: Any) -> Rule:
    """Return the rule for an operand that is broadcast to the result of f, which does it itself."""
    return rule(
        lambda x, y, *, shape=(2, 3): f(x, broadcast_to(y, shape=shape)),
        lambda x, y: f(x, y),
        exact=True,
        name="operand that is broadcast twice",
    )


def _kept_axes(reduce: Any) -> Rule:
    """Return the rule for a reduction whose axes are inserted again by a reshape."""
    return rule(
        lambda x, *, axes=(1,), shape=(2, 1): reshape(reduce(x, axis=axes, keepdims=False), shape=shape),
        lambda x, *, axes: reduce(x, axis=axes, keepdims=True),
        exact=True,
        name="reduction with its axes inserted again",
    )


# A rule is not applied if the types of its sides differ: x * 1 is removed only if it does not broadcast.
EXACT = RuleSet(
    "simplify",
    [
        rule(lambda x, *, shape=(2, 3): reshape(x, shape=shape), lambda x: x, exact=True, name="reshape to itself"),
        rule(
            lambda x, *, a=(6,), b=(3, 2): reshape(reshape(x, shape=a), shape=b),
            lambda x, *, b: reshape(x, shape=b),
            exact=True,
            name="reshape twice",
        ),
        rule(
            lambda x, *, perm=(0, 1): transpose(x, perm=perm),
            lambda x: x,
            when=lambda x, *, perm: tuple(perm) == tuple(range(len(perm))),
            exact=True,
            name="transpose to itself",
        ),
        rule(
            lambda x, *, inner=(1, 0), outer=(1, 0): transpose(transpose(x, perm=inner), perm=outer),
            _composed,
            exact=True,
            name="transpose twice",
        ),
        rule(
            lambda x, *, flat=(2, 4, 3), perm=(0, 2, 1), shape=(1, 2, 3, 4): reshape(
                transpose(reshape(x, shape=flat), perm=perm), shape=shape
            ),
            _swapped,
            when=_swaps,
            exact=True,
            name="transpose of joined axes",
        ),
        rule(
            lambda x, *, shape=(2, 3): broadcast_to(x, shape=shape), lambda x: x, exact=True, name="broadcast to itself"
        ),
        rule(
            lambda x, *, starts=(0,), stops=(9,), steps=(1,), axes=(0,): slice_(
                x, starts=starts, stops=stops, steps=steps, axes=axes
            ),
            lambda x: x,
            when=lambda x, *, steps, starts, stops, axes: all(s == 1 for s in steps),
            exact=True,
            name="slice of everything",
        ),
        rule(
            lambda x, *, dtype="float32": cast(x, dtype=dtype),
            lambda x: x,
            when=lambda x, *, dtype: x.dtype is dtype,
            exact=True,
            name="cast to itself",
        ),
        rule(
            lambda x, *, first="float64", second="float32": cast(cast(x, dtype=first), dtype=second),
            lambda x: x,
            when=_round_trips,
            exact=True,
            name="cast there and back",
        ),
        *(_kept_axes(reduce) for reduce in (sum_, mean, max_)),
        *(_without_ones(f) for f in (add, mul)),
        *(_without_broadcast(f) for f in (add, mul, sub, div)),
        *(_without_broadcast(lambda x, y, f=f: f(y, x)) for f in (sub, div)),
        rule(lambda x, *, axis=(0,): unsqueeze(x, axis=axis), _inserted, exact=True, name="new axes by a reshape"),
        rule(
            lambda x: maximum(x, -math.inf), lambda x: x, exact=True, name="the larger of a number and minus infinity"
        ),
        rule(lambda x: neg(neg(x)), lambda x: x, exact=True, name="neg twice"),
        rule(lambda x: abs_(neg(x)), lambda x: abs_(x), exact=True, name="abs of neg"),
        rule(lambda x: abs_(abs_(x)), lambda x: abs_(x), exact=True, name="abs twice"),
        rule(lambda x: relu(relu(x)), lambda x: relu(x), exact=True, name="relu twice"),
        rule(lambda x: mul(x, 1.0), lambda x: x, exact=True, name="times one"),
        rule(lambda x: x / 1.0, lambda x: x, exact=True, name="over one"),
        rule(lambda x: x - 0.0, lambda x: x, exact=True, name="minus zero"),
        # -0 + -0 is -0, so that only adding -0 keeps every x; adding +0 turns -0 into +0 (see
        # ``fast-math`` below).
        rule(lambda x: add(x, -0.0), lambda x: x, exact=True, name="plus minus zero"),
        rule(
            lambda x: add(x, 0),
            lambda x: x,
            when=lambda x: x.dtype.is_integer,
            exact=True,
            name="plus zero, of integers",
        ),
        rule(lambda x: mul(x, -1.0), lambda x: neg(x), exact=True, name="times minus one"),
        rule(lambda x: x**1.0, lambda x: x, exact=True, name="to the first"),
        rule(lambda x, y: add(x, neg(y)), lambda x, y: sub(x, y), exact=True, name="plus a negative"),
        rule(lambda x, y: sub(x, neg(y)), lambda x, y: add(x, y), exact=True, name="minus a negative"),
        rule(lambda x: mul(x, x), lambda x: square(x), exact=True, name="times itself"),
        rule(lambda c, x: where(c, x, x), lambda c, x: x, exact=True, name="a choice of one"),
        rule(lambda x: maximum(x, x), lambda x: x, exact=True, name="the larger of one"),
        rule(lambda x: minimum(x, x), lambda x: x, exact=True, name="the smaller of one"),
        rule(
            lambda x, *, c=4.0: x / c,
            lambda x, *, c: x * (1.0 / c),
            when=_power_of_two,
            exact=True,
            name="over a power of two",
        ),
    ],
)

APPROXIMATE = RuleSet(
    "fast-math",
    [
        rule(lambda x: add(x, 0.0), lambda x: x, exact=False, name="plus zero"),
        rule(lambda x: log(exp(x)), lambda x: x, exact=False, name="log of exp"),
        rule(lambda x: 1.0 / sqrt(x), lambda x: rsqrt(x), exact=False, name="reciprocal root"),
        rule(lambda x, y: y / sqrt(x), lambda x, y: y * rsqrt(x), exact=False, name="over a root"),
        rule(
            lambda x, *, c=3.0: x / c,
            lambda x, *, c: x * (1.0 / c),
            # The reciprocal of other constants may be infinite or subnormal in float32.
            when=lambda x, *, c: x.dtype.is_float and 1e-30 < abs(c) < 1e30,
            exact=False,
            name="over a constant",
        ),
        rule(
            lambda x, y, z: add(mul(x, y), mul(x, z)), lambda x, y, z: mul(x, add(y, z)), exact=False, name="factored"
        ),
    ],
)

QUANTIZE_PAIRS = RuleSet(
    "quantize-pairs",
    [
        rule(
            lambda x, scale, *, dtype="int8", axis=None: dequantize(
                quantize(x, scale, None, dtype=dtype, axis=axis), scale, None, axis=axis
            ),
            lambda x, scale: x,
            exact=False,
            name="quantized and back",
        ),
        rule(
            lambda x, scale, zero, *, dtype="int8", axis=None: dequantize(
                quantize(x, scale, zero, dtype=dtype, axis=axis), scale, zero, axis=axis
            ),
            lambda x, scale, zero: x,
            exact=False,
            name="quantized and back, with zero point",
        ),
    ],
)
