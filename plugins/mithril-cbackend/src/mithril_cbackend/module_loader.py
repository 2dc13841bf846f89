"""Loading of machine code from disk with tvm_ffi only: TVM's compiler is not imported."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import sys
import tempfile
import types
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from mithril.base import BackendError
from mithril_cbackend.cpu_info import processors

INSTALL = "pip install apache-tvm==0.27.0.post1 apache-tvm-ffi==0.1.14.post1"


# Parts of TVM that this backend never uses; importing them takes most of the time of ``import tvm``.
UNUSED = ("tvm.relax", "tvm.runtime.disco")


@contextmanager
def without_torch() -> Iterator[None]:
    """Hide PyTorch while TVM is imported: TVM would import it, which takes a second and has no use here."""
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


@contextmanager
def without_unused_parts() -> Iterator[None]:
    """Import TVM without its unused parts, which are imported when another library first accesses them."""
    absent = [] if "tvm" in sys.modules else [name for name in UNUSED if name not in sys.modules]
    for name in absent:
        sys.modules[name] = types.ModuleType(name)
    try:
        yield
    finally:
        for name in absent:
            placeholder = sys.modules.pop(name)
            package, _, part = name.rpartition(".")
            owner = sys.modules.get(package)
            if owner is not None and vars(owner).get(part) is placeholder:
                delattr(owner, part)
                owner.__dict__["__getattr__"] = partial(_import_part, owner.__name__, part)


def _import_part(package: str, part: str, name: str) -> Any:
    """Import the part of a package that is missing, as the package's ``__getattr__``."""
    if name != part:
        raise AttributeError(f"module '{package}' has no attribute '{name}'")
    return importlib.import_module(f"{package}.{part}")


def load(library: bytes, threads: int) -> Any:
    """Return the module in a shared library."""
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
        raise BackendError(f"cannot load machine code from the cache: {cause}") from cause
    finally:
        os.unlink(name)


def _thread_pool(tvm_ffi: Any, threads: int) -> None:
    """Load TVM's runtime library, whose threads run parallel loops, and set its number of threads."""
    os.environ.setdefault("TVM_NUM_THREADS", str(processors()))
    spec = importlib.util.find_spec("tvm")
    if spec is None or spec.origin is None:
        raise BackendError("backend 'c' cannot find TVM", hint=INSTALL)
    suffix = {"darwin": "dylib", "win32": "dll"}.get(sys.platform, "so")
    ctypes.CDLL(str(Path(spec.origin).parent / "lib" / f"libtvm_runtime.{suffix}"), ctypes.RTLD_GLOBAL)
    tvm_ffi.get_global_func("runtime.config_threadpool")(1, threads)
