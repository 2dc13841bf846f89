"""Machine code from disk, by TVM's small library for calling functions alone: its compiler stays away."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mithril.base import BackendError
from mithril_cbackend.cpu_info import processors

INSTALL = "pip install apache-tvm==0.27.0.post1 apache-tvm-ffi==0.1.14.post1"


@contextmanager
def without_torch() -> Iterator[None]:
    """TVM imports PyTorch where that is installed, which takes a second and gives nothing."""
    hidden = "torch" not in sys.modules
    if hidden:
        sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        yield
    except Exception as cause:
        raise BackendError(f"backend 'c' cannot import TVM: {cause}", hint=INSTALL) from cause
    finally:
        if hidden:
            del sys.modules["torch"]


def load(library: bytes, threads: int) -> Any:
    """The module in a shared library."""
    with without_torch():
        import tvm_ffi
    if threads > 1:
        _thread_pool(tvm_ffi, threads)
    handle, name = tempfile.mkstemp(suffix=".so")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(library)
        return tvm_ffi.load_module(name)
    except Exception as cause:
        raise BackendError(f"machine code from the cache cannot be loaded: {cause}") from cause
    finally:
        os.unlink(name)


def _thread_pool(tvm_ffi: Any, threads: int) -> None:
    """Parallel loops run on the threads of TVM's run-time library."""
    os.environ.setdefault("TVM_NUM_THREADS", str(processors()))
    spec = importlib.util.find_spec("tvm")
    if spec is None or spec.origin is None:
        raise BackendError("backend 'c' cannot find TVM", hint=INSTALL)
    suffix = {"darwin": "dylib", "win32": "dll"}.get(sys.platform, "so")
    ctypes.CDLL(str(Path(spec.origin).parent / "lib" / f"libtvm_runtime.{suffix}"), ctypes.RTLD_GLOBAL)
    tvm_ffi.get_global_func("runtime.config_threadpool")(1, threads)
