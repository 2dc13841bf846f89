"""Machine code as shared libraries, loaded from disk with tvm_ffi only: TVM's compiler is not imported."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import pkgutil
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from mithril.graph import BackendError
from mithril_cbackend.cpu_info import processors
from mithril_cbackend.toolchains import HOST

INSTALL = "pip install 'apache-tvm>=0.27.0,<0.28'"


# Parts of TVM that this backend never uses; importing them takes most of the time of ``import tvm``.
UNUSED = ("tvm.relax", "tvm.runtime.disco")
SEARCH = ("tvm.s_tir.meta_schedule", "tvm.s_tir.dlight")  # the same for ``import tvm.s_tir``
# The setting by which TVM loads its code generators for accelerators, and the compilers that use them.
AUTOLOAD = "TVM_DEVICE_BACKEND_AUTOLOAD"
COMPILERS = {"tvm": ("compile", "build"), "tvm.driver": ("compile", "build"), "tvm.tirx": ("build",)}


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
    if "tvm" in sys.modules:
        yield
        return
    autoload = os.environ.get(AUTOLOAD)
    os.environ[AUTOLOAD] = "0"
    try:
        # TVM 0.27 is imported in 0.15 s without these, 0.63 s with them (commit 10906d6f).
        with _absent(UNUSED):
            yield
    finally:
        if autoload is None:
            del os.environ[AUTOLOAD]
        else:
            os.environ[AUTOLOAD] = autoload
        if autoload != "0" and "tvm.backend" in sys.modules:
            _defer_accelerators()


def without_search() -> AbstractContextManager[None]:
    """Import TVM's schedules without its searches for them, which take four fifths of the 0.11 s."""
    return _absent(SEARCH)


@contextmanager
def _absent(names: Sequence[str]) -> Iterator[None]:
    """Import packages without these modules, which are imported when they are first accessed."""
    absent = [name for name in names if name not in sys.modules]
    for name in absent:
        sys.modules[name] = types.ModuleType(name)
    try:
        yield
    finally:
        for name in absent:
            placeholder = sys.modules.pop(name)
            package, _, part = name.rpartition(".")
            if vars(sys.modules.get(package, placeholder)).get(part) is placeholder:
                delattr(sys.modules[package], part)
                _defer(package, {part: partial(importlib.import_module, name)})


def _defer_accelerators() -> None:
    """Load the code generators for accelerators when another library accesses them or a compiler of TVM."""
    loader: Any = importlib.import_module("tvm.backend._autoload_backends")
    loader._AUTO_LOAD_DONE = False

    def loaded(find: Callable[[], Any]) -> Any:
        loader._autoload_backends()
        return find()

    accelerators = [m.name for m in pkgutil.iter_modules(sys.modules["tvm.backend"].__path__) if m.ispkg]
    for package in ("tvm.backend", "tvm.tirx"):
        modules = {n: partial(importlib.import_module, f"tvm.backend.{n}") for n in accelerators}
        _defer(package, {n: partial(loaded, find) for n, find in modules.items()})
    for package, names in COMPILERS.items():
        functions: dict[str, Any] = {n: vars(sys.modules[package]).pop(n) for n in names}
        _defer(package, {n: partial(loaded, partial(functions.get, n)) for n in names})


def _defer(package: str, parts: Mapping[str, Callable[[], Any]]) -> None:
    """Set attributes of a package when they are first accessed."""
    otherwise = vars(sys.modules[package]).get("__getattr__")

    def access(name: str) -> Any:
        if name in parts:
            value = parts[name]()
            setattr(sys.modules[package], name, value)
            return value
        if otherwise is not None:
            return otherwise(name)
        raise AttributeError(f"module '{package}' has no attribute '{name}'")

    vars(sys.modules[package])["__getattr__"] = access


def shared_library(code: Any) -> bytes | None:
    """Link a module of machine code, or return None if no linker is installed."""
    compiler = HOST.compiler()
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        parts, library = Path(folder) / "code.o", Path(folder) / "code.so"
        code.write_to_file(str(parts), "o")
        linked = subprocess.run([compiler, "-shared", "-o", library, parts, "-lm"], capture_output=True, check=False)
        return library.read_bytes() if linked.returncode == 0 else None


def load(library: bytes, threads: int) -> Any:
    """Return the module in a shared library."""
    with without_torch():
        import tvm_ffi
    if threads > 1:
        _thread_pool(tvm_ffi, threads)
    # The loader needs a file. It is removed at once: the mapping keeps the code.
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
    # TVM's pool has this many threads for the whole process; it cannot grow later.
    os.environ.setdefault("TVM_NUM_THREADS", str(processors()))
    spec = importlib.util.find_spec("tvm")
    if spec is None or spec.origin is None:
        raise BackendError("backend 'c' cannot find TVM", hint=INSTALL)
    suffix = {"darwin": "dylib", "win32": "dll"}.get(sys.platform, "so")
    ctypes.CDLL(str(Path(spec.origin).parent / "lib" / f"libtvm_runtime.{suffix}"), ctypes.RTLD_GLOBAL)
    tvm_ffi.get_global_func("runtime.config_threadpool")(1, threads)
