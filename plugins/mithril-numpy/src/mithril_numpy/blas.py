"""The OpenBLAS that NumPy's wheel brings: how many threads it uses during a call, and which kernels it chose."""

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
    """The library, by the ending of its functions' names."""

    library: ctypes.CDLL
    suffix: str

    def threads(self) -> int:
        return int(self._function("get_num_threads")())

    def set_threads(self, count: int) -> None:
        self._function("set_num_threads")(count)

    def kernels(self) -> str:
        """The processor that its kernels were written for."""
        function = self._function("get_corename")
        function.restype = ctypes.c_char_p
        return str(function().decode())

    def _function(self, name: str) -> Any:
        return getattr(self.library, f"scipy_openblas_{name}{self.suffix}")


@cache
def openblas() -> OpenBlas | None:
    """None where NumPy multiplies by something else."""
    package = Path(np.__file__).parent
    for folder in (package.parent / "numpy.libs", package / ".dylibs"):
        for file in sorted(folder.glob("libscipy_openblas*")):
            library = ctypes.CDLL(str(file))  # the one that NumPy has loaded
            for suffix in ("64_", ""):
                if hasattr(library, f"scipy_openblas_get_num_threads{suffix}"):
                    return OpenBlas(library, suffix)
    return None


def limited(forward: Forward, blas: OpenBlas, count: int) -> Forward:
    """The function with so many threads for its products, and the number from before afterwards."""

    def call(params: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
        before = blas.threads()
        blas.set_threads(count)
        try:
            return forward(params, inputs)
        finally:
            blas.set_threads(before)

    return call


def facts() -> dict[str, str]:
    """For ``mithril doctor``."""
    blas = openblas()
    if blas is None:
        return {"products": "not by the OpenBLAS of NumPy's wheel"}
    found = {"products": f"OpenBLAS, kernels for {blas.kernels()}", "threads": str(blas.threads())}
    if blas.kernels() in NARROW and _has_avx512():
        found["advice"] = (
            "OPENBLAS_CORETYPE=SkylakeX in the environment: this processor has AVX-512, which these leave out"
        )
    return found


def _has_avx512() -> bool:
    cpu = Path("/proc/cpuinfo")
    return cpu.exists() and " avx512dq " in cpu.read_text()
