"""Shared helpers for arithmetic that libraries lack or define differently: division, powers, shifts, casts."""
# mypy: ignore-errors

from mithril.backend.codegen.shared.dialect import needs, xp
from mithril.backend.codegen.shared.reductions import single


def floordiv_int(a, b):
    """Divide integers, rounding down; division by zero returns 0."""
    return xp.where(b == 0, 0, xp.floor_divide(a, xp.where(b == 0, 1, b)))


def mod_int(a, b):
    """Return the remainder of integer division, rounded down; division by zero returns 0."""
    return xp.where(b == 0, 0, xp.remainder(a, xp.where(b == 0, 1, b)))


def pow_int(a, b):
    """Compute integer powers by squaring, wrapping on overflow; negative exponents return 0, except of 1 and -1."""
    a, b = xp.broadcast_arrays(a, b)
    result, base, rest = xp.ones_like(a), a, xp.nonnegative(b)
    for _ in range(xp.bits(a)):
        result = xp.where((rest & 1) != 0, result * base, result)
        base, rest = base * base, rest >> 1
    if not xp.is_signed(a):
        return result
    power_of_one = xp.where(a == 1, 1, xp.where(a == -1, 1 - 2 * (b & 1), 0))
    return xp.where(b < 0, power_of_one, result)


def shift_left(a, b):
    """Shift bits left; a shift by the bit width or more returns 0."""
    in_range = (b >= 0) & (b < xp.bits(a))
    return xp.where(in_range, xp.left_shift(a, xp.where(in_range, b, 0)), 0)


def shift_right(a, b):
    """Shift bits right arithmetically."""
    in_range = (b >= 0) & (b < xp.bits(a))
    past = a >> (xp.bits(a) - 1) if xp.is_signed(a) else 0
    return xp.where(in_range, xp.right_shift(a, xp.where(in_range, b, 0)), past)


@needs(single)
def float_to_int(x, dtype, low, high):
    """Cast floats to an integer dtype with these limits: truncate, saturate, and convert nan to 0."""
    wide_x = single(x)
    wide_x = xp.trunc(xp.where(xp.isnan(wide_x), 0.0, wide_x))
    above, below = wide_x >= float(high), wide_x <= float(low)
    in_range = xp.astype(xp.where(above | below, 0.0, wide_x), dtype)
    return xp.where(above, xp.typed(high, in_range), xp.where(below, xp.typed(low, in_range), in_range))


def mod_float(a, b):
    """Return the remainder of floor division, which has the sign of b."""
    rest = xp.fmod(a, b)
    result = xp.where((rest != 0) & ((b < 0) != (rest < 0)), rest + b, rest)
    return xp.where(rest == 0, xp.signed_zero(b), result)


def floordiv_float(a, b):
    """Return the quotient rounded down, with infinities and zeros as in NumPy."""
    rest = xp.fmod(a, b)
    result = (a - rest) / b
    result = xp.where((rest != 0) & ((b < 0) != (rest < 0)), result - 1, result)
    # Without the remainder the quotient is an integer but for its rounding, which may be to below: as in CPython.
    rounded = xp.floor(result)
    rounded = xp.where(result - rounded > 0.5, rounded + 1, rounded)
    rounded = xp.where(result == 0, xp.signed_zero(a / b), rounded)
    return xp.where(b == 0, a / b, rounded)


def sign(x):
    """Return -1, 0 or 1, or nan for nan."""
    return xp.where(xp.isnan(x), x, xp.sign(x)) if xp.is_float(x) else xp.sign(x)
