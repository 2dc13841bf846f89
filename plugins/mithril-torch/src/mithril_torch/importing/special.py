"""ATen's special functions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from mithril import ops
from mithril_importing import special_functions as special
from mithril_torch.importing.table import cast, row


def _digamma(x: Any) -> Any:
    return ops.where(ops.equal(x, 0.0), ops.neg(ops.reciprocal(x)), special.digamma(x))


def _multiplied_by_log(x: Any, log: Any) -> Any:
    """Return x times a logarithm, or 0 for x = 0."""
    is_zero = ops.equal(x, 0.0)
    return ops.where(is_zero, 0.0, ops.mul(x, log))


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "lgamma": special.lgamma,
    "digamma": _digamma,
    "special_erfcx": special.erfcx,
    "special_log_ndtr": special.log_ndtr,
    "special_ndtri": special.ndtri,
    "i0": lambda x: special.bessel_i(x, 0),
    "special_i0e": lambda x: special.scaled_bessel_i(x, 0),
    "special_i1": lambda x: special.bessel_i(x, 1),
    "special_i1e": lambda x: special.scaled_bessel_i(x, 1),
    "special_modified_bessel_i0": lambda x: special.bessel_i(x, 0),
    "special_modified_bessel_i1": lambda x: special.bessel_i(x, 1),
    **{f"special_bessel_j{n}": partial(special.bessel_j, order=n) for n in (0, 1)},
    **{f"special_bessel_y{n}": partial(special.bessel_y, order=n) for n in (0, 1)},
    **{f"special_modified_bessel_k{n}": partial(special.bessel_k, order=n) for n in (0, 1)},
    **{f"special_scaled_modified_bessel_k{n}": partial(special.bessel_k, order=n, scaled=True) for n in (0, 1)},
    "special_spherical_bessel_j0": lambda x: ops.where(
        ops.equal(x, 0.0), 1.0, ops.div(ops.sin(x), ops.where(ops.equal(x, 0.0), 1.0, x))
    ),
    "igamma": special.igamma,
    "igammac": lambda a, x: special.igamma(a, x, upper=True),
    "special_zeta": special.zeta,
}
for _name, _function in FUNCTIONS.items():
    row(_name, promotes="result")(special.in_32_bits(_function))


@row("special_zeta.other_scalar", "special_zeta.self_scalar", promotes="result")
def zeta_of_number(s: Any, q: Any) -> Any:
    tensor = q if hasattr(q, "dtype") else s
    zeros = ops.mul(tensor, 0.0)
    return special.zeta(*(x if hasattr(x, "dtype") else ops.add(zeros, float(x)) for x in (s, q)))


@row("polygamma")
def polygamma(n: int, x: Any, like: Any = None) -> Any:
    x = cast(x, like.dtype)
    return _digamma(x) if n == 0 else special.polygamma(n, x)


@row("xlogy.Tensor", "xlogy.Scalar_Self", "xlogy.Scalar_Other", promotes="result")
def xlogy(x: Any, y: Any) -> Any:
    return _multiplied_by_log(x, ops.log(y))


@row("special_xlog1py", "special_xlog1py.self_scalar", "special_xlog1py.other_scalar", promotes="result")
def xlog1py(x: Any, y: Any) -> Any:
    return _multiplied_by_log(x, ops.log1p(y))


# -- orthogonal polynomials: their degrees are a tensor ----------------------------------------------------------
LARGEST_DEGREE = 32
RECURRENCES: dict[str, tuple[Callable[[Any], Any], Callable[[Any, float], tuple[Any, Any]]]] = {
    # the polynomial of degree 1, and factors of those of degree n - 1 and n - 2 in that of degree n
    "chebyshev_polynomial_t": (lambda x: x, lambda x, n: (2.0 * x, 1.0)),
    "chebyshev_polynomial_u": (lambda x: 2.0 * x, lambda x, n: (2.0 * x, 1.0)),
    "chebyshev_polynomial_v": (lambda x: 2.0 * x - 1.0, lambda x, n: (2.0 * x, 1.0)),
    "chebyshev_polynomial_w": (lambda x: 2.0 * x + 1.0, lambda x, n: (2.0 * x, 1.0)),
    "hermite_polynomial_h": (lambda x: 2.0 * x, lambda x, n: (2.0 * x, 2.0 * (n - 1))),
    "hermite_polynomial_he": (lambda x: x, lambda x, n: (x, n - 1)),
    "laguerre_polynomial_l": (lambda x: 1.0 - x, lambda x, n: ((2.0 * n - 1.0 - x) / n, (n - 1) / n)),
    "legendre_polynomial_p": (lambda x: x, lambda x, n: (x * ((2 * n - 1) / n), (n - 1) / n)),
}


def _polynomial(name: str, x: Any, degree: Any) -> Any:
    """Return the polynomials of the degrees; a degree below 0 gives 0, and one that is too large nan."""
    first, factors = RECURRENCES[name.removeprefix("shifted_")]
    x = 2.0 * x - 1.0 if name.startswith("shifted_") else x
    degree = ops.trunc(
        cast(degree, str(x.dtype)) if hasattr(degree, "dtype") else ops.add(ops.mul(x, 0.0), float(degree))
    )
    before, current = ops.add(ops.mul(x, 0.0), 1.0), first(x)
    result = ops.where(ops.equal(degree, 0.0), before, ops.where(ops.equal(degree, 1.0), current, 0.0))
    for n in range(2, LARGEST_DEGREE + 1):
        a, b = factors(x, float(n))
        before, current = current, ops.sub(ops.mul(current, a), ops.mul(before, b))
        result = ops.where(ops.equal(degree, float(n)), current, result)
    return ops.where(ops.greater(degree, float(LARGEST_DEGREE)), float("nan"), result)


for _name in (*RECURRENCES, *(f"shifted_chebyshev_polynomial_{kind}" for kind in "tuvw")):
    row(f"special_{_name}", f"special_{_name}.n_scalar", promotes="result")(
        lambda x, degree, name=_name: _polynomial(name, x, degree)
    )
    row(f"special_{_name}.x_scalar", promotes="result")(
        lambda x, degree, name=_name: _polynomial(name, ops.add(ops.mul(degree, 0.0), float(x)), degree)
    )
