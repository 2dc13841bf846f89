"""Lowerings of Fourier transforms to torch.fft."""

from __future__ import annotations

from mithril.backend import Call, complex_numbers
from mithril_torch import helpers


def _complex(call: Call) -> str:
    re, im = (f"{call.helper(helpers.single)}({call.array(name)})" for name in ("re", "im"))
    return f"torch.complex({re}, {im})"


def _pair(call: Call, text: str) -> str:
    """Return real and imaginary part of a complex array in the dtype of the operation."""
    return f"{call.helper(complex_numbers.as_pair)}({text}, {call.dtype()})"


def fft(call: Call) -> str:
    return _pair(call, f"torch.fft.fft({_complex(call)}, dim={call.axis})")


def ifft(call: Call) -> str:
    return _pair(call, f"torch.fft.ifft({_complex(call)}, dim={call.axis})")


def rfft(call: Call) -> str:
    x = f"{call.helper(helpers.single)}({call.array('x')})"
    return _pair(call, f"torch.fft.rfft({x}, dim={call.axis})")


def irfft(call: Call) -> str:
    return f"torch.fft.irfft({_complex(call)}, {call.size}, dim={call.axis}).to({call.dtype()})"


FUNCTIONS = (fft, ifft, rfft, irfft)
