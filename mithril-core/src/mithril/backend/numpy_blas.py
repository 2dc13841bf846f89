"""The OpenBLAS in NumPy's wheel, for all backends that multiply with NumPy: its threads and its kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np


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


@contextmanager
def numpy_threads(count: int | None) -> Iterator[None]:
    """Have NumPy's products use ``count`` threads; None, and another library than OpenBLAS, keep their number."""
    blas = openblas()
    if blas is None or count is None:
        yield
        return
    before = blas.threads()
    blas.set_threads(count)
    try:
        yield
    finally:
        blas.set_threads(before)
