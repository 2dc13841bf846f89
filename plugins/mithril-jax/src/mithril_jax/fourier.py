"""Lowerings of Fourier transforms to jax.numpy.fft."""

from __future__ import annotations

from mithril.backend import Call, complex_numbers, reductions


def _complex(call: Call) -> str:
    re, im = (f"{call.helper(reductions.single)}({call.array(name)})" for name in ("re", "im"))
    return f"lax.complex({re}, {im})"


def _pair(call: Call, text: str) -> str:
    """Return real and imaginary part of a complex array in the dtype of the operation."""
    return f"{call.helper(complex_numbers.as_pair)}({text}, {call.dtype()})"


def fft(call: Call) -> str:
    return _pair(call, f"jnp.fft.fft({_complex(call)}, axis={call.axis})")


def ifft(call: Call) -> str:
    return _pair(call, f"jnp.fft.ifft({_complex(call)}, axis={call.axis})")


def rfft(call: Call) -> str:
    x = f"{call.helper(reductions.single)}({call.array('x')})"
    return _pair(call, f"jnp.fft.rfft({x}, axis={call.axis})")


def irfft(call: Call) -> str:
    return f"jnp.fft.irfft({_complex(call)}, {call.size}, axis={call.axis}).astype({call.dtype()})"


FUNCTIONS = (fft, ifft, rfft, irfft)
