"""Facts of ``mithril doctor`` about NumPy's products."""

from __future__ import annotations

from pathlib import Path

from mithril.backend import openblas

NARROW = ("Haswell", "Zen")  # kernels of 256 bits


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
