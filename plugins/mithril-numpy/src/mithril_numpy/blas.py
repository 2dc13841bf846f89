"""The OpenBLAS in NumPy's wheel: its number of threads during a call, and its selected kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

Forward = Callable[[Mapping[str, Any], Mapping[str, Any]], dict[str, Any]]
NARROW = ("Haswell", "Zen")  # kernels of 256 bits


@dataclass(frozen=True)
class OpenBlas:
    """The library, with the suffix of its functions' names."""

    library: ctypes.CDLL
    suffix: str

    def threads(self) -> int:
        return int(self._function("get_num_threads")())

    def set_threads(self, count: int) -> None:
        self._function("set_num_threads")(count)

    def kernels(self) -> str:
        """Return the CPU type that its kernels target."""
        function = self._function("get_corename")
        function.restype = ctypes.c_char_p
        return str(function().decode())

    def _function(self, name: str) -> Any:
        return getattr(self.library, f"scipy_openblas_{name}{self.suffix}")


@cache
def openblas() -> OpenBlas | None:
    """Return NumPy's OpenBLAS, or None if NumPy uses another library."""
    package = Path(np.__file__).parent
    for folder in (package.parent / "numpy.libs", package / ".dylibs"):
        for file in sorted(folder.glob("libscipy_openblas*")):
            library = ctypes.CDLL(str(file))  # the one that NumPy has loaded
            for suffix in ("64_", ""):
                if hasattr(library, f"scipy_openblas_get_num_threads{suffix}"):
                    return OpenBlas(library, suffix)
    return None


def limited(forward: Forward, blas: OpenBlas, count: int) -> Forward:
    """Wrap a function so that its products use ``count`` threads; restore the previous number afterwards."""

    def call(params: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
        before = blas.threads()
        blas.set_threads(count)
        try:
            return forward(params, inputs)
        finally:
            blas.set_threads(before)

    return call


def facts() -> dict[str, str]:
    """Return facts for ``mithril doctor``."""
    blas = openblas()
    if blas is None:
        return {"products": "not by the OpenBLAS of NumPy's wheel"}
    facts = {"products": f"OpenBLAS, kernels for {blas.kernels()}", "threads": str(blas.threads())}
    if blas.kernels() in NARROW and _has_avx512():
        facts["advice"] = (
            "OPENBLAS_CORETYPE=SkylakeX in the environment: this processor has AVX-512, which these leave out"
        )
    return facts


def _has_avx512() -> bool:
    cpu = Path("/proc/cpuinfo")
    return cpu.exists() and " avx512dq " in cpu.read_text()
