"""Complex numbers between operations, as pairs of real tensors: Fourier transforms and the arithmetic around them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from mithril import ops
from mithril.graph import UnsupportedError
from mithril_importing import complex_numbers as pairs
from mithril_importing.arrays import broadcast
from mithril_importing.complex_numbers import Complex, over, part_of
from mithril_jax.importing.table import ROWS, cast

# Primitives that move elements, or are linear over the reals: the same for both parts.
BOTH_PARTS = frozenset(
    {"broadcast_in_dim", "concatenate", "copy", "cumsum", "dynamic_slice", "dynamic_update_slice", "expand_dims"}
    | {"gather", "neg", "pad", "reduce_sum", "reshape", "rev", "select_n", "slice", "split", "squeeze", "transpose"}
    | {"add", "add_any", "sub", "copy_p", "device_put", "stop_gradient"}
)


def is_complex(aval: Any) -> bool:
    return bool(jax.numpy.issubdtype(getattr(aval, "dtype", np.float32), np.complexfloating))


def apply(equation: Any, operands: Sequence[Any], params: Mapping[str, Any]) -> list[Any]:
    """Return the results of an equation of which an operand or a result is complex."""
    name = equation.primitive.name
    if all(isinstance(x, np.ndarray) for x in operands):  # JAX computes constants
        results = equation.primitive.bind(*operands, **params)
        return [np.asarray(r) for r in (results if equation.primitive.multiple_results else [results])]
    if name in BOTH_PARTS:
        complexes = [k for k, v in enumerate(equation.invars) if is_complex(v.aval)]
        parts = [
            _results(ROWS[name](*(_part(x, p) if k in complexes else x for k, x in enumerate(operands)), **params))
            for p in ("re", "im")
        ]
        return [Complex(re, im) for re, im in zip(*parts, strict=True)]
    if name not in FUNCTIONS:
        raise UnsupportedError(
            f"'{name}' of complex numbers cannot be expressed",
            facts=[f"expressed: fft, {', '.join(sorted({*FUNCTIONS, *BOTH_PARTS} - {'fft'}))}"],
            hint="compute with jnp.real(x) and jnp.imag(x)",
        )
    return [FUNCTIONS[name](*operands, **params)]


def _results(result: Any) -> tuple[Any, ...]:
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def _part(x: Any, part: str) -> Any:
    return getattr(Complex.of(x), part)


def _fft(x: Any, fft_type: Any, fft_lengths: Any, **_: Any) -> Any:
    """Return the transform over the last axes."""
    kind, count = str(getattr(fft_type, "name", fft_type)).rpartition(".")[2].upper(), len(fft_lengths)
    rank = len(x.shape)
    axes = list(range(rank - count, rank))
    if kind == "RFFT":
        y = Complex(*ops.rfft(x, axis=axes[-1]))
        return over(ops.fft, y, axes[:-1])
    if kind == "IRFFT":
        y = over(ops.ifft, Complex.of(x), axes[:-1])
        return ops.irfft(y.re, y.im, size=int(fft_lengths[-1]), axis=axes[-1])
    return over(ops.fft if kind == "FFT" else ops.ifft, Complex.of(x), axes)


def _integer_pow(x: Complex, y: int, **_: Any) -> Complex:
    if y < 1:
        raise UnsupportedError(
            f"complex numbers to the power {y} cannot be expressed",
            facts=["accepted: powers from 1"],
            hint="divide by a positive power, 1 / z**n, or use ones for the power 0",
        )
    return pairs.power(x, y)


def _complex(re: Any, im: Any, **_: Any) -> Complex:
    shape = re.shape if re.shape == im.shape else np.broadcast_shapes(tuple(re.shape), tuple(im.shape))
    return Complex(broadcast(re, shape), broadcast(im, shape))


def _convert(x: Any, new_dtype: Any, **_: Any) -> Any:
    if np.issubdtype(np.dtype(new_dtype), np.complexfloating):
        kind = part_of(new_dtype)
        if isinstance(x, Complex):
            return Complex(cast(x.re, kind), cast(x.im, kind))
        return Complex.of(cast(x, kind))
    return cast(x.re, new_dtype)


def _dot(a: Any, b: Any, *, preferred_element_type: Any = None, **parameters: Any) -> Complex:
    return pairs.bilinear(lambda x, y: ROWS["dot_general"](x, y, **parameters), a, b)


def _conv(x: Any, w: Any, *, preferred_element_type: Any = None, **parameters: Any) -> Complex:
    return pairs.bilinear(lambda a, b: ROWS["conv_general_dilated"](a, b, **parameters), x, w)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: lambda x, function=function, **_: function(x) for name, function in pairs.FUNCTIONS.items()},
    "logistic": lambda x, **_: pairs.sigmoid(x),
    "sign": lambda x, **_: pairs.sign(x),
    "square": lambda x, **_: pairs.power(x, 2),
    "fft": _fft,
    "complex": _complex,
    "real": lambda x, **_: x.re,
    "imag": lambda x, **_: x.im,
    "conj": lambda x, **_: pairs.conj(Complex.of(x)),
    "mul": lambda x, y, **_: pairs.bilinear(ops.mul, x, y),
    "div": lambda x, y, **_: pairs.divide(x, y),
    "max": lambda x, y, **_: pairs.maximum(x, y),
    "min": lambda x, y, **_: pairs.minimum(x, y),
    "pow": lambda x, y, **_: pairs.raised(x, y),
    "eq": lambda x, y, **_: pairs.equal(x, y),
    "ne": lambda x, y, **_: ops.logical_not(pairs.equal(x, y)),
    "integer_pow": _integer_pow,
    "convert_element_type": _convert,
    "dot_general": _dot,
    "conv_general_dilated": _conv,
}
