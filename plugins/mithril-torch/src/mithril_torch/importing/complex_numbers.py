"""ATen operators on complex numbers: pairs of real tensors between operations, a last axis of two at the borders."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from mithril import ops
from mithril.graph import UnsupportedError
from mithril_importing import complex_numbers as pairs
from mithril_importing.arrays import as_value
from mithril_importing.complex_numbers import Complex
from mithril_torch.importing.table import ROWS, axis_of, cast, is_tensor, row

# Operators that move elements, or are linear over the reals: the same for both parts.
BOTH_PARTS = frozenset(
    (
        "mithril::stop_gradient",
        *("_reshape_alias", "_to_copy", "_unsafe_view", "add.Tensor", "alias", "as_strided", "as_strided_copy"),
        *("bernoulli.p", "cat", "clone", "constant_pad_nd", "contiguous", "cumsum", "detach", "diagonal", "diff"),
        *("expand", "flatten.using_ints", "flip", "gather", "index.Tensor", "index_add", "index_put"),
        *("index_select", "lift_fresh_copy", "masked_fill.Scalar", "mean", "mean.dim", "narrow", "neg", "permute"),
        *("prims::convert_element_type", "repeat", "reshape", "roll", "rsub.Scalar", "scatter.src", "scatter_add"),
        *("select.int", "select_scatter", "slice.Tensor", "slice_scatter", "split.Tensor", "split_with_sizes"),
        *(
            "mithril::stop_gradient",
            "squeeze",
            "squeeze.dim",
            "squeeze.dims",
            "stack",
            "sub.Tensor",
            "sum",
            "sum.dim_IntList",
            "t",
        ),
        *("transpose.int", "tril", "triu", "unbind.int", "unfold", "unsqueeze", "view", "where.self"),
    )
)
COMPLEX: dict[str, Callable[..., Any]] = {}  # operators by name, for complex operands


@dataclass(frozen=True)
class Part:
    """The recorded type of one part of a complex result."""

    dtype: torch.dtype
    shape: Any


def complex_row(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enter the decorated function for operators with complex operands."""

    def enter(function: Callable[..., Any]) -> Callable[..., Any]:
        COMPLEX.update(dict.fromkeys(names, function))
        return function

    return enter


def as_operand(x: Any) -> Any:
    """Return an array of complex numbers as a pair."""
    return Complex.of(x) if isinstance(x, np.ndarray) and np.iscomplexobj(x) else x


def packed(x: Any) -> Any:
    """Return a complex tensor as a real one, whose last axis has the two parts."""
    return ops.stack(as_value(x.re), as_value(x.im), axis=-1) if isinstance(x, Complex) else x


def unpacked(x: Any) -> Complex:
    return Complex(x[..., 0], x[..., 1])


def involves_complex(args: Any, kwargs: Any) -> bool:
    return any(isinstance(x, Complex) for x in pytree.tree_leaves((args, kwargs)))


def part_type(recorded: Any) -> Any:
    """Return recorded types with those of a part for complex ones."""
    return pytree.tree_map(
        lambda t: Part(t.dtype.to_real(), t.shape) if isinstance(t, torch.Tensor) and t.is_complex() else t, recorded
    )


def call_complex(name: str, example: Any, args: Sequence[Any], kwargs: Mapping[str, Any], call: Any) -> Any:
    """Return the result of an operator of which an operand is complex; ``call`` calls its row for one part."""
    if name in COMPLEX:
        return COMPLEX[name](*args, **kwargs)
    if name not in BOTH_PARTS or name not in ROWS:
        raise UnsupportedError(
            f"'{name}' of complex numbers cannot be expressed",
            facts=[f"expressed: {', '.join(sorted({*COMPLEX, *BOTH_PARTS}))}"],
            hint="compute with torch.view_as_real(x)",
        )
    if name in ("_to_copy", "prims::convert_element_type") and not example.is_complex():
        return cast(args[0].re, example.dtype)
    parts = []
    for part in ("re", "im"):
        arguments = pytree.tree_map(lambda x, part=part: _part(x, part, name), (tuple(args), dict(kwargs)))
        parts.append(call(*arguments, part_type(example)))
    if isinstance(parts[0], tuple):
        return tuple(Complex(re, im) for re, im in zip(*parts, strict=True))
    return Complex(*parts)


def _part(x: Any, part: str, name: str) -> Any:
    if isinstance(x, Complex):
        return getattr(x, part)
    if isinstance(x, complex):
        return x.real if part == "re" else x.imag
    if isinstance(x, torch.dtype):
        return x.to_real() if x.is_complex else x
    of_values = name in ("add.Tensor", "sub.Tensor", "cat", "stack", "where.self", "index_put", "rsub.Scalar")
    if part == "im" and of_values and is_tensor(x) and "float" in str(x.dtype):
        return ops.mul(x, 0.0)  # the operand is real
    return x


# -- real and complex numbers -------------------------------------------------------------------------------------
@row("complex")
def complex_(re: Any, im: Any, like: Any = None) -> Complex:
    shape = tuple(np.broadcast_shapes(re.shape, im.shape)) if re.shape != im.shape else tuple(re.shape)
    return Complex(ops.broadcast_to(re, shape=shape), ops.broadcast_to(im, shape=shape))


@row("view_as_complex")
def view_as_complex(x: Any) -> Complex:
    return unpacked(x)


@row("polar")
def polar(size: Any, phase: Any) -> Complex:
    return pairs.polar(size, phase)


@complex_row("view_as_real")
def view_as_real(x: Complex) -> Any:
    return packed(x)


@row("real", "resolve_conj", "resolve_neg", "conj_physical", "_conj", "_conj_physical", "conj")
def real(x: Any) -> Any:
    return x


@row("angle", promotes="result")
def angle_of_real(x: Any) -> Any:
    """Return 0, or pi for negative numbers."""
    return ops.where(ops.isnan(x), x, ops.where(ops.less(x, 0.0), math.pi, 0.0))


def _product(x: Any, y: Any) -> Complex:
    for a, b in ((x, y), (y, x)):
        if is_tensor(b):
            kind = a.dtype
            return Complex(ops.mul(a.re, cast(b, kind)), ops.mul(a.im, cast(b, kind)))
    return pairs.multiply(x, y)


def _quotient(x: Any, y: Any) -> Complex:
    if isinstance(y, Complex):
        return pairs.divide(cast(x, y.dtype) if is_tensor(x) else x, y)
    y = cast(y, x.dtype) if is_tensor(y) else y
    return _product(x, 1 / y) if isinstance(y, complex) else Complex(ops.div(x.re, y), ops.div(x.im, y))


def _powered(x: Complex, exponent: Any) -> Complex:
    if isinstance(exponent, (int, float)) and exponent == int(exponent) and exponent > 0:
        return pairs.power(x, int(exponent))
    return pairs.raised(x, exponent)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "real": lambda x: x.re,
    "imag": lambda x: x.im,
    **pairs.FUNCTIONS,
    "sgn": pairs.sign,
    "silu": lambda x: pairs.multiply(x, pairs.sigmoid(x)),
    "square": lambda x: pairs.power(x, 2),
    "mul.Tensor": _product,
    "mul.Scalar": _product,
    "div.Tensor": _quotient,
    "div.Scalar": _quotient,
    "eq.Tensor": pairs.equal,
    "ne.Tensor": lambda x, y: ops.logical_not(pairs.equal(x, y)),
    "isnan": lambda x: ops.logical_or(ops.isnan(x.re), ops.isnan(x.im)),
    "pow.Tensor_Scalar": _powered,
    "matmul": lambda x, y: pairs.bilinear(ops.matmul, x, y),
}
COMPLEX.update(_FUNCTIONS)
for _name in ("mm", "bmm", "mv", "dot"):
    COMPLEX[_name] = COMPLEX["matmul"]
for _name in ("conj", "_conj", "conj_physical", "_conj_physical"):
    COMPLEX[_name] = pairs.conj
for _name in ("resolve_conj", "resolve_neg"):
    COMPLEX[_name] = lambda x: x


@complex_row("einsum")
def einsum(equation: str, tensors: Any, path: Any = None) -> Any:
    if len(tensors) != 2:
        raise UnsupportedError("einsum of complex numbers takes two operands", hint="call it with two at a time")
    return pairs.bilinear(lambda a, b: ops.einsum(a, b, equation=equation.replace(" ", "")), *tensors)


# -- Fourier transforms -------------------------------------------------------------------------------------------
def _scaled(x: Any, factor: float) -> Any:
    if factor == 1:
        return x
    return Complex(*(ops.mul(part, float(factor)) for part in (x.re, x.im))) if isinstance(x, Complex) else x * factor


def _forward(count: int, normalization: int) -> float:
    """Return the factor of a transform of ``count`` elements: 0 leaves it, 1 divides by the root, 2 by the count."""
    return (1.0, count**-0.5, 1.0 / count)[normalization]


def _inverse(count: int, normalization: int) -> float:
    """Return the factor of an inverse transform, which mithril divides by the count."""
    return (float(count), count**0.5, 1.0)[normalization]


def _count(x: Any, axes: Sequence[int]) -> int:
    return math.prod(x.shape[a] for a in axes)


@row("_fft_r2c")
def fft_of_real(x: Any, dim: Any, normalization: int, onesided: bool) -> Any:
    axes = [axis_of(x, d) for d in dim]
    if onesided:
        y = pairs.over(ops.fft, Complex(*ops.rfft(x, axis=axes[-1])), axes[:-1])
    else:
        y = pairs.over(ops.fft, Complex(x, ops.mul(x, 0.0)), axes)
    return _scaled(y, _forward(_count(x, axes), normalization))


@complex_row("_fft_c2c")
def fft(x: Complex, dim: Any, normalization: int, forward: bool) -> Any:
    axes = [axis_of(x, d) for d in dim]
    factor = _forward if forward else _inverse
    return _scaled(pairs.over(ops.fft if forward else ops.ifft, x, axes), factor(_count(x, axes), normalization))


@complex_row("_fft_c2r")
def fft_to_real(x: Complex, dim: Any, normalization: int, last: int) -> Any:
    axes = [axis_of(x, d) for d in dim]
    y = pairs.over(ops.ifft, x, axes[:-1])
    half = last // 2 + 1
    if y.shape[axes[-1]] != half:
        index = (*[slice(None)] * axes[-1], slice(0, half))
        y = Complex(y.re[index], y.im[index])
    result = ops.irfft(y.re, y.im, size=last, axis=axes[-1])
    return _scaled(result, _inverse(_count(x, axes[:-1]) * last, normalization))
