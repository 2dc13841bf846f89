"""The ggml library with repaired bindings, without back traces and log output; features of this build."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import cache
from typing import Any

# An assertion would start a debugger, which takes seconds.
os.environ.setdefault("GGML_NO_BACKTRACE", "1")

import ggml

# Their results are declared with a typing alias that ctypes does not know, so that pointers lose their upper half.
for _name in (
    "ggml_backend_alloc_buffer",
    "ggml_backend_cpu_buffer_from_ptr",
    "ggml_backend_cpu_buffer_type",
    "ggml_backend_sched_get_tensor_backend",
):
    getattr(ggml, _name).restype = ctypes.c_void_p

_LOG = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)


@_LOG  # type: ignore[untyped-decorator]
def _silent(level: int, text: bytes, user: int) -> None:
    """Failed allocations are reported by our own errors."""


ggml.ggml_log_set(_silent, None)

__all__ = ["compute", "features", "ggml", "machine_memory", "raw"]

CPU = ("sse3", "ssse3", "avx", "avx2", "f16c", "fma", "avx_vnni", "bmi2", "avx512", "avx512_vbmi", "avx512_vnni",
       "avx512_bf16", "amx_int8", "neon", "arm_fma", "fp16_va", "dotprod", "matmul_int8", "sve", "sme")  # fmt: skip


def raw(name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
    """Return a library function without the binding's conversions, which cost as much as a small graph."""
    address = ctypes.cast(getattr(ggml.lib, name), ctypes.c_void_p).value
    assert address is not None
    return ctypes.CFUNCTYPE(result, *arguments)(address)


compute = raw("ggml_graph_compute", ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)

# The first tables (of 16-bit conversions) are made with the first context: here, once, before there are threads.
ggml.ggml_free(ggml.ggml_init(ggml.ggml_init_params(mem_size=1024, mem_buffer=None, no_alloc=True)))


def features() -> dict[str, str]:
    """Version and instruction sets of this build, for ``mithril doctor``."""
    from importlib.metadata import version

    has = [name for name in CPU if _has(name)]
    fast = _has("llamafile")
    return {
        "ggml-python": version("ggml-python"),
        "gguf": version("gguf"),
        "instructions": ", ".join(has) or "none beyond the baseline",
        "llamafile": "on"
        if fast
        else "off: products of many rows take about twice as long; see the README to build it",
    }


def _has(name: str) -> bool:
    try:
        return bool(getattr(ggml, f"ggml_cpu_has_{name}")())
    except (AttributeError, RuntimeError):
        return False


@cache
def machine_memory() -> int:
    """Bytes of memory that this machine has; where it does not tell, as many as anything could need."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 1 << 48
