"""A fast BLAS for MLX on Linux.

MLX's CPU build for Linux contains the reference BLAS, 15 times slower than a tuned one. It first looks up
``cblas_sgemm`` in the process's global scope, so a library that is loaded there before MLX computes its products.
NumPy's wheel contains OpenBLAS under other names and with 64-bit sizes; a small C shim, compiled once and cached,
forwards the calls. ``MITHRIL_MLX_BLAS`` is ``auto``, ``off``, or the path of a library that exports ``cblas_sgemm``.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from mithril.graph import OptionError
from mithril.system import files

VARIABLE = "MITHRIL_MLX_BLAS"
SYSTEM = ("openblas", "mkl_rt", "blis")

# In C, a flag and two enumerations precede the sizes; real scalars are passed by value, complex ones by address.
# A product of one row or column is GEMV's, which reads the matrix once; OpenBLAS's GEMM packs it first, at four times
# the time.
_SHIM = """
#include <stdint.h>
enum { ROW_MAJOR = 101, PLAIN = 111, TRANSPOSED = 112 };
#define GEMM(name, there, scalar, element, shortcut) \\
    void there(int, int, int, int64_t, int64_t, int64_t, scalar, const element *, int64_t, const element *, int64_t, \\
               scalar, element *, int64_t); \\
    void name(int order, int ta, int tb, int m, int n, int k, scalar alpha, const element *a, int lda, \\
              const element *b, int ldb, scalar beta, element *c, int ldc) { \\
        shortcut \\
        there(order, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc); \\
    }
#define GEMV(there) \\
    if (order == ROW_MAJOR && k > 0 && m == 1) { \\
        int flipped = tb == PLAIN; \\
        there(order, flipped ? TRANSPOSED : PLAIN, flipped ? k : n, flipped ? n : k, alpha, b, ldb, \\
              a, ta == PLAIN ? 1 : lda, beta, c, 1); \\
        return; \\
    } \\
    if (order == ROW_MAJOR && k > 0 && n == 1) { \\
        int flipped = ta != PLAIN; \\
        there(order, ta, flipped ? k : m, flipped ? m : k, alpha, a, lda, b, tb == PLAIN ? ldb : 1, beta, c, ldc); \\
        return; \\
    }
#define DECLARED(there, element) \\
    void there(int, int, int64_t, int64_t, element, const element *, int64_t, const element *, int64_t, element, \\
               element *, int64_t);
DECLARED(scipy_cblas_sgemv64_, float)
DECLARED(scipy_cblas_dgemv64_, double)
GEMM(cblas_sgemm, scipy_cblas_sgemm64_, float, float, GEMV(scipy_cblas_sgemv64_))
GEMM(cblas_dgemm, scipy_cblas_dgemm64_, double, double, GEMV(scipy_cblas_dgemv64_))
GEMM(cblas_cgemm, scipy_cblas_cgemm64_, const void *, void, )
"""


@dataclass(frozen=True)
class Blas:
    """The BLAS library for MLX's products on the CPU, the reason for selecting it, and its thread controls if known."""

    name: str
    reason: str
    fast: bool
    library: ctypes.CDLL | None = None
    suffix: str = ""  # of the functions that get and set the number of threads

    def threads(self) -> int | None:
        """Return the number of threads of a product."""
        if self.library is None:
            return None
        function = getattr(self.library, f"{self._prefix}get_num_threads{self.suffix}", None)
        return int(function()) if function is not None else None

    def set_threads(self, count: int) -> None:
        getattr(self.library, f"{self._prefix}set_num_threads{self.suffix}")(count)

    @property
    def _prefix(self) -> str:
        return "scipy_openblas_" if self.suffix else "openblas_"

    def __str__(self) -> str:
        return f"{self.name} ({self.reason})"


@cache
def prepare() -> Blas:
    """Select and load a BLAS library; called once, before MLX is imported."""
    if not sys.platform.startswith("linux"):
        return Blas("the system's", "MLX brings its own way to compute on this system", True)
    setting = os.environ.get(VARIABLE, "auto")
    slow = "MLX's own reference BLAS"
    if setting == "off":
        return Blas(slow, f"{VARIABLE}=off", False)
    if "mlx.core" in sys.modules:
        return Blas(slow, "MLX was imported before mithril's backend could load a faster one", False)
    if setting != "auto":
        return Blas(setting, f"{VARIABLE} names it", True, _load(setting))
    tried: list[str] = []
    ways: tuple[Callable[[list[str]], Blas | None], ...] = (_of_numpy, _of_system)
    for way in ways:
        library = way(tried)
        if library is not None:
            return library
    return Blas(slow, "; ".join(tried), False)


def _load(path: str) -> ctypes.CDLL:
    library = ctypes.CDLL(path, ctypes.RTLD_GLOBAL)
    if not hasattr(library, "cblas_sgemm"):
        raise OSError(f"{path} exports no cblas_sgemm")
    return library


def _of_system(tried: list[str]) -> Blas | None:
    for name in SYSTEM:
        path = ctypes.util.find_library(name)
        if path is not None:
            try:
                return Blas(path, "found on this system", True, _load(path))
            except OSError as error:
                tried.append(str(error))
    tried.append(f"none of {', '.join(SYSTEM)} is installed")
    return None


def _of_numpy(tried: list[str]) -> Blas | None:
    import numpy as np

    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc") or shutil.which("clang")
    folder = Path(np.__file__).parents[1] / "numpy.libs"
    libraries = sorted(folder.glob("libscipy_openblas64_*.so*"))
    if not libraries:
        tried.append("NumPy brings no OpenBLAS")
        return None
    try:
        library = ctypes.CDLL(str(libraries[0]))
        shim = _shim_path(libraries[0])
        files.private_folder(shim.parent)  # its contents are executed
        if not shim.exists():
            if compiler is None:
                tried.append("there is no C compiler to lead to NumPy's OpenBLAS")
                return None
            _compile(compiler, libraries[0], shim)
        _load(str(shim))
    except (OSError, subprocess.SubprocessError, OptionError) as error:
        tried.append(f"NumPy's OpenBLAS could not be used: {error}")
        return None
    return Blas("OpenBLAS", "NumPy's, through a few lines of C", True, library, "64_")


def _shim_path(library: Path) -> Path:
    """Return the path of the compiled shim, named by the library, its version and the machine type."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    key = hashlib.sha256(f"{_SHIM}{library}{library.stat().st_size}{os.uname().machine}".encode()).hexdigest()[:16]
    return Path(base) / "mithril" / "mlx" / f"blas-{key}.so"


def _compile(compiler: str, library: Path, target: Path) -> None:
    """Compile the shim atomically, since several processes may start at once."""
    with files.parts(target) as folder:
        source, part = folder / "blas.c", folder / "blas.so"
        source.write_text(_SHIM)
        command = [compiler, "-O2", "-shared", "-fPIC", str(source), str(library), f"-Wl,-rpath,{library.parent}"]
        subprocess.run([*command, "-o", str(part)], check=True, capture_output=True, timeout=60)
        files.move(part, target)
