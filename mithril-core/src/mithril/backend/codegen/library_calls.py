"""Lowerings to functions of a library that computes in 32 bits or more: linear algebra and Fourier transforms."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from mithril.backend.codegen.call import Call
from mithril.backend.codegen.shared import complex_numbers, reductions


@dataclass(frozen=True, kw_only=True)
class LibraryCalls:
    """Calls with operands of 32 bits or more, and results in the dtype of the operation."""

    cast: str = "{x}.astype({dtype})"  # expression of an array in another dtype
    upcast: Callable[..., Any] = reductions.single  # helper that converts 16-bit floats

    def operand(self, call: Call, name: str) -> str:
        """Return an operand as the library takes it."""
        return f"{call.helper(self.upcast)}({call.array(name)})"

    def rounded(self, call: Call, text: str) -> str:
        """Return the results of a factorization in the dtype of the operation."""
        if call.type.dtype.bits > 16:
            return text
        if len(call.results) == 1:
            return self.cast.format(x=text, dtype=call.dtype())
        return f"tuple({self.cast.format(x='r', dtype=call.dtype())} for r in {text})"


@dataclass(frozen=True, kw_only=True)
class FourierCalls(LibraryCalls):
    """Lowerings of Fourier transforms to a module with the functions of ``numpy.fft``."""

    module: str
    complex_array: str  # expression of a complex array of the parts {re} and {im}
    axis: str = "axis"  # keyword of the axis

    def functions(self) -> Iterator[tuple[str, Callable[[Call], str]]]:
        """Yield each operation with the function that lowers it, which has its name."""
        for lower in (self.fft, self.ifft, self.rfft, self.irfft):
            yield lower.__name__, lower

    def fft(self, call: Call) -> str:
        return self._pair(call, "fft", self._complex(call))

    def ifft(self, call: Call) -> str:
        return self._pair(call, "ifft", self._complex(call))

    def rfft(self, call: Call) -> str:
        return self._pair(call, "rfft", self.operand(call, "x"))

    def irfft(self, call: Call) -> str:
        text = f"{self.module}.irfft({self._complex(call)}, {call.size}, {self.axis}={call.axis})"
        return self.cast.format(x=text, dtype=call.dtype())

    def _complex(self, call: Call) -> str:
        return self.complex_array.format(re=self.operand(call, "re"), im=self.operand(call, "im"))

    def _pair(self, call: Call, function: str, operand: str) -> str:
        """Return real and imaginary part of a complex array in the dtype of the operation."""
        text = f"{self.module}.{function}({operand}, {self.axis}={call.axis})"
        return f"{call.helper(complex_numbers.as_pair)}({text}, {call.dtype()})"
