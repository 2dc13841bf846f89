"""Weights interleaved for the processor's vector units: ggml's CPU_REPACK buffers, where they are known to be safe."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable
from functools import cache
from typing import Any, Protocol

import numpy as np

from mithril.graph import MemoryLimitError
from mithril_ggml.library.abort_guard import guarded
from mithril_ggml.library.library import ggml
from mithril_ggml.library.quant_types import QuantType

SAFE = frozenset({"q4_0", "q4_k", "iq4_nl"})  # with others of ggml 0.15 the process ends


@cache
def buffer_type() -> int | None:
    """ggml's type of such buffers, where this build has it."""
    try:
        registry = ggml.ggml_backend_cpu_reg()
        procedure = ggml.ggml_backend_reg_get_proc_address(registry, b"ggml_backend_dev_get_extra_bufts")
        device = ggml.ggml_backend_reg_dev_get(registry, 0)
    except (AttributeError, RuntimeError):
        return None
    address = ctypes.cast(procedure, ctypes.c_void_p).value if procedure else None
    if not address:
        return None
    types = ctypes.CFUNCTYPE(ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p)(address)(_pointer(device))
    k = 0
    while types and types[k]:
        if ggml.ggml_backend_buft_name(types[k]) == b"CPU_REPACK":
            return int(types[k])
        k += 1
    return None


def _pointer(x: Any) -> int | None:
    return x if isinstance(x, int) or x is None else ctypes.cast(x, ctypes.c_void_p).value


@cache
def _mark() -> int | None:
    """Allocate a small buffer of the type: the buffer of a tensor marks it as interleaved."""
    kind = buffer_type()
    return _pointer(ggml.ggml_backend_buft_alloc_buffer(kind, 64)) if kind is not None else None


def prepare(tensor: Any) -> bool:
    """Make a description of a weight one of an interleaved weight; False where ggml has no way for this one."""
    mark = _mark()
    if mark is None:
        return False
    struct = tensor.contents
    struct.buffer = mark
    ggml.ggml_backend_buffer_init_tensor(mark, tensor)
    # ggml sets this field for the layouts that it has.
    if not struct.extra:
        struct.buffer = None
        return False
    return True


@cache
def is_supported(kind: QuantType, rows: int, columns: int) -> bool:
    """Whether weights of this kind and shape can be interleaved here."""
    if kind.name not in SAFE or buffer_type() is None:
        return False

    def ask() -> bool:
        context = ggml.ggml_init(
            ggml.ggml_init_params(mem_size=2 * ggml.ggml_tensor_overhead(), mem_buffer=None, no_alloc=True)
        )
        try:
            return prepare(ggml.ggml_new_tensor_2d(context, kind.code, columns, rows))
        finally:
            ggml.ggml_free(context)

    return bool(guarded(ask))


def _file_of(data: Any) -> mmap.mmap | None:
    """Return the mapped file that an array is a view of, or None."""
    owner = data
    while owner is not None and not isinstance(owner, mmap.mmap):
        owner = getattr(owner, "base", None) if not isinstance(owner, memoryview) else owner.obj
    return owner if hasattr(mmap, "MADV_DONTNEED") else None


def is_mapped(data: Any) -> bool:
    """Whether the memory of an array can be left to the file that it is mapped from."""
    return _file_of(data) is not None


def leave_to_the_disk(data: Any) -> bool:
    """Give back the memory of an array that is mapped from a file; whether it is one. It is read again when needed."""
    owner = _file_of(data)
    if owner is None:
        return False
    start = data.ctypes.data - np.frombuffer(owner, np.uint8).ctypes.data
    # Whole pages only: parts of pages at both ends belong to neighbors in the file.
    first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, (start + data.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if last > first:
        owner.madvise(mmap.MADV_DONTNEED, first, last - first)
    return True


class Packed(Protocol):
    """The part of a packed matrix that is read here: ``mithril_ggml.weights.packed_weights.PackedArray``."""

    kind: QuantType
    nbytes: int

    @property
    def data(self) -> np.ndarray[Any, Any]: ...
    @property
    def rows(self) -> tuple[int, int]: ...


class Repacked:
    """A packed matrix, interleaved."""

    def __init__(self, packed: Packed) -> None:
        self.buffer: Any = None
        self.nbytes = packed.nbytes
        guarded(lambda: self._fill(packed))

    def _fill(self, packed: Packed) -> None:
        rows, columns = packed.rows
        size = 2 * ggml.ggml_tensor_overhead()
        context = ggml.ggml_init(ggml.ggml_init_params(mem_size=size, mem_buffer=None, no_alloc=True))
        try:
            tensor = ggml.ggml_new_tensor_2d(context, packed.kind.code, columns, rows)
            self.buffer = _pointer(ggml.ggml_backend_buft_alloc_buffer(buffer_type(), packed.nbytes))
            if not self.buffer:
                raise MemoryLimitError(f"the system gives no {packed.nbytes} bytes for a weight")
            base = ggml.ggml_backend_buffer_get_base(self.buffer)
            ggml.ggml_backend_tensor_alloc(self.buffer, tensor, base)
            data = packed.data
            ggml.ggml_backend_tensor_set(tensor, data.ctypes.data, 0, data.nbytes)
            self.address = int(base)
        finally:
            ggml.ggml_free(context)

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if self.buffer and not ending():  # at the end of the process ggml's functions are gone
            ggml.ggml_backend_buffer_free(self.buffer)
            self.buffer = None
