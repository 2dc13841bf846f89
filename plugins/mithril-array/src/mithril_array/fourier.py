"""The extension ``fft``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mithril import ops
from mithril.graph import DTypeError, InputError, ShapeError, normalize_axis
from mithril_array import complex_numbers as pairs
from mithril_array.array import Array, Namespace, as_array, call
from mithril_array.complex_numbers import Pair, as_pair
from mithril_array.dtypes import ComplexDType
from mithril_array.manipulation import roll

NORMS = ("backward", "ortho", "forward")


def _resized(x: Any, axis: int, size: int) -> Any:
    """Return the first ``size`` elements of an axis, or append zeros."""
    n = x.shape[axis]
    if n >= size:
        return x if n == size else x[(*(slice(None),) * axis, slice(0, size))]
    return ops.pad(x, widths=tuple((0, size - n if k == axis else 0) for k in range(len(x.shape))))


def _each(z: Any, function: Callable[[Any], Any]) -> Any:
    return Pair(function(z.re), function(z.im)) if isinstance(z, Pair) else function(z)


def _scale(norm: str, total: int, inverse: bool) -> float:
    """Return the factor of a transform next to that of mithril's operations, 1 and 1/n."""
    if norm == "ortho":
        return math.sqrt(total) if inverse else 1 / math.sqrt(total)
    if norm == "forward":
        return float(total) if inverse else 1 / total
    return 1.0


def _complex(x: Any, *, axes: tuple[int, ...], sizes: tuple[int, ...], norm: str, inverse: bool) -> Any:
    z = x if isinstance(x, Pair) else as_pair(x, x.dtype)
    for axis, size in zip(axes, sizes, strict=True):
        z = _each(z, lambda part, a=axis, n=size: _resized(part, a, n))  # type: ignore[misc]
        z = Pair(*(ops.ifft if inverse else ops.fft)(z.re, z.im, axis=axis))
    factor = _scale(norm, math.prod(sizes), inverse)
    return z if factor == 1.0 else pairs.scaled(z, factor)


def _real(x: Any, *, axes: tuple[int, ...], sizes: tuple[int, ...], norm: str) -> Any:
    *first, last = zip(axes, sizes, strict=True)
    z = Pair(*ops.rfft(_resized(x, *last), axis=last[0]))
    for axis, size in first:
        z = _each(z, lambda part, a=axis, n=size: _resized(part, a, n))  # type: ignore[misc]
        z = Pair(*ops.fft(z.re, z.im, axis=axis))
    return pairs.scaled(z, _scale(norm, math.prod(sizes), inverse=False))


def _half(x: Any, *, axes: tuple[int, ...], sizes: tuple[int, ...], norm: str) -> Any:
    z = x if isinstance(x, Pair) else as_pair(x, x.dtype)
    *first, (axis, size) = zip(axes, sizes, strict=True)
    for a, n in first:
        z = _each(z, lambda part, a=a, n=n: _resized(part, a, n))  # type: ignore[misc]
        z = Pair(*ops.ifft(z.re, z.im, axis=a))
    z = _each(z, lambda part: _resized(part, axis, size // 2 + 1))
    return ops.irfft(z.re, z.im, size=size, axis=axis) * _scale(norm, math.prod(sizes), inverse=True)


def _hermitian(x: Any, *, axis: int, size: int, norm: str) -> Any:
    """Transform the half spectrum of a real signal forward: the inverse transform of its conjugate times n."""
    z = pairs.conj(x if isinstance(x, Pair) else as_pair(x, x.dtype))
    z = _each(z, lambda part: _resized(part, axis, size // 2 + 1))
    return ops.irfft(z.re, z.im, size=size, axis=axis) * (size * _scale(norm, size, inverse=False))


def _inverse_hermitian(x: Any, *, axis: int, size: int, norm: str) -> Any:
    z = Pair(*ops.rfft(_resized(x, axis, size), axis=axis))
    return pairs.scaled(pairs.conj(z), _scale(norm, size, inverse=True) / size)


# -- functions -------------------------------------------------------------------------------------------------------
def _checked(x: Array, norm: str, real: bool = False) -> Array:
    x = as_array(x)
    if norm not in NORMS:
        raise InputError(f"norm cannot be {norm!r}", facts=[f"accepted: {', '.join(NORMS)}"])
    if x.dtype.kind not in (("float",) if real else ("float", "complex")):
        hint = "xp.real(x)" if x.dtype.kind == "complex" else "xp.astype(x, xp.float64)"
        raise DTypeError(f"the transform is not defined for {x.dtype}", hint=hint)
    return x


def _span(x: Array, axes: Sequence[int], sizes: Sequence[int]) -> dict[str, Any]:
    if any(n < 1 for n in sizes):
        raise ShapeError(f"a transform of {min(sizes)} elements", hint="sizes from 1 on")
    return {"axes": tuple(normalize_axis(a, x.ndim) for a in axes), "sizes": tuple(sizes)}


def _spans(x: Array, s: Sequence[int] | None, axes: Sequence[int] | None, last: bool = False) -> dict[str, Any]:
    if axes is None:
        axes = range(x.ndim) if s is None else range(x.ndim - len(s), x.ndim)
    sizes = [x.shape[a] for a in axes] if s is None else list(s)
    if last and s is None:
        sizes[-1] = 2 * (sizes[-1] - 1)
    if len(sizes) != len(axes):
        raise ShapeError(f"{len(sizes)} sizes for {len(axes)} axes", hint="pass a size for each axis")
    return _span(x, axes, [x.shape[a] if n == -1 else n for a, n in zip(axes, sizes, strict=True)])


def fft(x: Array, /, *, n: int | None = None, axis: int = -1, norm: str = "backward") -> Array:
    x = _checked(x, norm)
    return call(_complex, x, **_spans(x, None if n is None else (n,), (axis,)), norm=norm, inverse=False)  # type: ignore[no-any-return]


def ifft(x: Array, /, *, n: int | None = None, axis: int = -1, norm: str = "backward") -> Array:
    x = _checked(x, norm)
    return call(_complex, x, **_spans(x, None if n is None else (n,), (axis,)), norm=norm, inverse=True)  # type: ignore[no-any-return]


def fftn(
    x: Array, /, *, s: Sequence[int] | None = None, axes: Sequence[int] | None = None, norm: str = "backward"
) -> Array:
    x = _checked(x, norm)
    return call(_complex, x, **_spans(x, s, axes), norm=norm, inverse=False)  # type: ignore[no-any-return]


def ifftn(
    x: Array, /, *, s: Sequence[int] | None = None, axes: Sequence[int] | None = None, norm: str = "backward"
) -> Array:
    x = _checked(x, norm)
    return call(_complex, x, **_spans(x, s, axes), norm=norm, inverse=True)  # type: ignore[no-any-return]


def rfft(x: Array, /, *, n: int | None = None, axis: int = -1, norm: str = "backward") -> Array:
    x = _checked(x, norm, real=True)
    return call(_real, x, **_spans(x, None if n is None else (n,), (axis,)), norm=norm)  # type: ignore[no-any-return]


def rfftn(
    x: Array, /, *, s: Sequence[int] | None = None, axes: Sequence[int] | None = None, norm: str = "backward"
) -> Array:
    x = _checked(x, norm, real=True)
    return call(_real, x, **_spans(x, s, axes), norm=norm)  # type: ignore[no-any-return]


def irfft(x: Array, /, *, n: int | None = None, axis: int = -1, norm: str = "backward") -> Array:
    x = _checked(x, norm)
    return call(_half, x, **_spans(x, None if n is None else (n,), (axis,), last=True), norm=norm)  # type: ignore[no-any-return]


def irfftn(
    x: Array, /, *, s: Sequence[int] | None = None, axes: Sequence[int] | None = None, norm: str = "backward"
) -> Array:
    x = _checked(x, norm)
    return call(_half, x, **_spans(x, s, axes, last=True), norm=norm)  # type: ignore[no-any-return]


def hfft(x: Array, /, *, n: int | None = None, axis: int = -1, norm: str = "backward") -> Array:
    x = _checked(x, norm)
    span = _spans(x, None if n is None else (n,), (axis,), last=True)
    return call(_hermitian, x, axis=span["axes"][0], size=span["sizes"][0], norm=norm)  # type: ignore[no-any-return]


def ihfft(x: Array, /, *, n: int | None = None, axis: int = -1, norm: str = "backward") -> Array:
    x = _checked(x, norm, real=True)
    span = _spans(x, None if n is None else (n,), (axis,))
    return call(_inverse_hermitian, x, axis=span["axes"][0], size=span["sizes"][0], norm=norm)  # type: ignore[no-any-return]


def _shifted(x: Array, axes: int | Sequence[int] | None, sign: int) -> Array:
    x = as_array(x)
    used_axes = tuple(range(x.ndim)) if axes is None else (axes,) if isinstance(axes, int) else tuple(axes)
    shifts = [x.shape[a] // 2 if sign > 0 else -(x.shape[a] // 2) for a in used_axes]
    return roll(x, shifts, axis=used_axes)


def fftshift(x: Array, /, *, axes: int | Sequence[int] | None = None) -> Array:
    return _shifted(x, axes, 1)


def ifftshift(x: Array, /, *, axes: int | Sequence[int] | None = None) -> Array:
    return _shifted(x, axes, -1)


def fft_functions(xp: Namespace) -> dict[str, Callable[..., Array]]:
    """Return the functions of the extension; two of them create arrays of a namespace."""

    def fftfreq(n: int, /, *, d: float = 1.0, dtype: Any = None, device: Any = None) -> Array:
        return xp.asarray(np.fft.fftfreq(n, d), dtype=_frequency(dtype), device=device)

    def rfftfreq(n: int, /, *, d: float = 1.0, dtype: Any = None, device: Any = None) -> Array:
        return xp.asarray(np.fft.rfftfreq(n, d), dtype=_frequency(dtype), device=device)

    def _frequency(dtype: Any) -> Any:
        used_axes = xp.default_float if dtype is None else xp.dtype(dtype)
        if isinstance(used_axes, ComplexDType) or not used_axes.is_float:
            raise DTypeError(f"frequencies are real numbers, not {used_axes}", hint="dtype=xp.float64")
        return used_axes

    functions = (
        fft,
        fftfreq,
        fftn,
        fftshift,
        hfft,
        ifft,
        ifftn,
        ifftshift,
        ihfft,
        irfft,
        irfftn,
        rfft,
        rfftfreq,
        rfftn,
    )
    return {f.__name__: f for f in functions}
