"""The complementary error function, accurate where it is small."""

from __future__ import annotations

import math
from typing import Any

from mithril.graph import Arr, composite, sample
from mithril.ops.activations import ANY
from mithril.ops.basic import downcast, upcast
from mithril.ops.elementwise import erf, exp, greater, less, neg, reciprocal, square, where

# erfc(x) exp(x^2) as quotients of polynomials, lowest power first: W. J. Cody, Math. Comp. 23 (1969), in the form of
# the Cephes library, for x from 1 to 8 and, of its reciprocal, from 8.
NEAR = (
    (557.535335369399327526, 1027.55188689515710272, 934.528527171957607540, 526.445194995477358631,
     196.520832956077098242, 48.6371970985681366614, 7.46321056442269912687, 5.64189564831068821977e-1,
     2.46196981473530512524e-10),
    (557.535340817727675546, 1656.66309194161350182, 2246.33760818710981792, 1823.90916687909736289,
     975.708501743205489753, 354.937778887819891062, 86.7072140885989742329, 13.2281951154744992508, 1.0),
)  # fmt: skip
FAR = (
    (5.64189583547755073984e-1, 1.27536670759978104416, 5.01905042251180477414, 6.16021097993053585195,
     7.40974269950448939160, 2.97886665372100240670),
    (1.0, 2.26052863220117276590, 9.39603524938001434673, 12.0489539808096656605, 17.0814450747565897222,
     9.60896809063285878198, 3.36907645100081516050),
)  # fmt: skip


def scaled_erfc(x: Any) -> Any:
    """Return erfc(x) exp(x**2) for x of at least 1."""
    is_near = less(x, 8.0)
    inverse = reciprocal(where(is_near, 8.0, x))  # powers of x itself could overflow
    return where(is_near, _quotient(where(is_near, x, 1.0), NEAR), _quotient(inverse, FAR) * inverse)


def _quotient(x: Any, coefficients: tuple[tuple[float, ...], tuple[float, ...]]) -> Any:
    above, below = (_polynomial(x, row) for row in coefficients)
    return above / below


def _polynomial(x: Any, coefficients: tuple[float, ...]) -> Any:
    result: Any = coefficients[-1]
    for c in reversed(coefficients[:-1]):
        result = result * x + c
    return result


@composite(
    elementwise=True,
    promotes="float",
    flops=70,
    tolerance=4.0,
    samples=[*ANY, sample(Arr((2, 5), low=0.5, high=9.0), label="tail")],
)
def erfc(x):
    """1 - erf(x), accurate where it is small."""
    z = upcast(x)
    is_large = greater(z, 1.0)
    tail = where(is_large, z, 1.0)
    return downcast(where(is_large, scaled_erfc(tail) * exp(neg(square(tail))), 1.0 - erf(z)), x)


@erfc.vjp
def _(g, y, x):
    z = upcast(x)
    return (downcast(upcast(g) * exp(neg(square(z))) * (-2.0 / math.sqrt(math.pi)), x),)
