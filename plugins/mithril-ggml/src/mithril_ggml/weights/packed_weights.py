"""Packed weights as arrays: quantization, dequantization, and a cache of packed weights."""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import numpy as np

from mithril.graph import InputError
from mithril_ggml.library.abort_guard import guarded
from mithril_ggml.library.library import ggml, raw
from mithril_ggml.library.quant_types import QuantType
from mithril_ggml.library.repack import Repacked, is_mapped, leave_to_the_disk

Array = np.ndarray[Any, Any]
_TO_FLOAT = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
_quantize = raw(
    "ggml_quantize_chunk",
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_int64,
    ctypes.c_int64,
    ctypes.c_int64,
    ctypes.c_void_p,
)
_dropping = threading.RLock()  # between a program that takes an address and one that has no use for the rows


class PackedArray:
    """A matrix in a quantized type. It replaces an array of its shape, and ``numpy.asarray`` unpacks it.

    ``transposed``: its columns were packed instead of its rows, as products require. ``source`` makes the rows again: a
    program that reads them interleaved needs them no more.
    """

    __slots__ = ("__weakref__", "_data", "_pinned", "kind", "nbytes", "shape", "source", "stale", "transposed")
    dtype = np.dtype(np.float32)

    def __init__(
        self,
        data: Array,
        kind: QuantType,
        shape: tuple[int, int],
        transposed: bool = False,
        source: Callable[[], Array] | None = None,
    ) -> None:
        self._data: Array | None = data
        self._pinned = False
        self.kind = kind
        self.nbytes = int(data.nbytes)
        self.shape = shape
        self.transposed = transposed
        self.source = source
        self.stale = False  # whether its source array became writable again

    @property
    def data(self) -> Array:
        """The bytes, one row per packed row."""
        rows = self._data
        if rows is None:
            assert self.source is not None
            rows = self.source()
        return rows

    def pinned(self) -> Array:
        """Return the bytes, whose address a program reads: they stay in memory as long as this object."""
        with _dropping:
            self._data, self._pinned = self.data, True
            return self._data

    def drop_rows(self) -> None:
        """Release the rows if they can be made or read again, because they are in memory interleaved."""
        with _dropping:
            if self._data is not None and not (self._pinned or leave_to_the_disk(self._data) or self.source is None):
                self._data = None

    @property
    def bytes_in_memory(self) -> int:
        """The bytes of rows in memory, without those that were dropped or left on the disk."""
        rows = self._data
        return 0 if rows is None or is_mapped(rows) else self.nbytes

    @property
    def size(self) -> int:
        return self.shape[0] * self.shape[1]

    @property
    def ndim(self) -> int:
        return 2

    @property
    def rows(self) -> tuple[int, int]:
        """The shape as packed."""
        return (self.shape[1], self.shape[0]) if self.transposed else self.shape

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        unpacked = unpack(self.data, self.kind, self.rows)
        unpacked = unpacked.T if self.transposed else unpacked
        return unpacked if dtype is None else unpacked.astype(dtype)

    def __repr__(self) -> str:
        return f"<PackedArray {self.kind} {list(self.shape)}, {self.nbytes} bytes>"


def pack(array: Array, kind: QuantType, transposed: bool = False, name: str = "a weight") -> PackedArray:
    """Quantize a matrix."""
    rows = np.asarray(array.T if transposed else array, dtype=np.float32, order="C")
    if rows.ndim != 2 or not rows.size or not kind.fits(rows.shape[1]):
        raise InputError(
            f"{kind} cannot hold {name} of shape {list(array.shape)}",
            facts=[f"it takes matrices with rows of a multiple of {kind.block} elements"],
        )
    if not np.isfinite(rows).all():
        raise InputError(f"{name} holds nan or infinity, which no quantized kind can", hint="quantize it not")
    data = np.zeros((rows.shape[0], kind.row(rows.shape[1])), np.uint8)
    if kind.name == "f32":
        data[...] = rows.view(np.uint8).reshape(data.shape)
    elif kind.name in ("f16", "bf16"):
        data[...] = _narrow(rows, kind, name).view(np.uint8).reshape(data.shape)
    else:
        source, target, (n, k) = rows.ctypes.data, data.ctypes.data, rows.shape
        size = guarded(lambda: _quantize(kind.code, source, target, 0, n, k, None))
        if size != data.nbytes:
            raise InputError(f"quantizing {name} to {kind} made {size} bytes, expected {data.nbytes}")
    return PackedArray(data, kind, tuple(array.shape), transposed)


def _narrow(rows: Array, kind: QuantType, name: str) -> Array:
    if kind.name == "bf16":
        from mithril.graph import bfloat16

        return rows.astype(bfloat16.numpy)
    if np.abs(rows).max() > np.finfo(np.float16).max:
        raise InputError(f"{name} has values beyond the range of float16", hint="choose 'bf16' for it")
    return rows.astype(np.float16)


def unpack(data: Array, kind: QuantType, shape: tuple[int, int]) -> Array:
    """float32 of packed rows."""
    if data.size != shape[0] * kind.row(shape[1]):
        raise InputError(f"{data.size} bytes are not a valid {kind}{list(shape)}")
    raw_data = np.asarray(data, order="C")
    if kind.name == "f32":
        return raw_data.reshape(-1).view(np.float32).reshape(shape).copy()
    out = np.empty(shape, np.float32)
    convert = ggml.ggml_get_type_traits(kind.code).contents.to_float
    function = _TO_FLOAT(ctypes.cast(convert, ctypes.c_void_p).value or 0)
    function(raw_data.ctypes.data, out.ctypes.data, out.size)
    return out


def values(array: Array, ternary: bool) -> Array:
    """Return the values of a weight that are packed."""
    if not ternary:
        return array
    from mithril_ggml.lowering.ternary import ternary as make

    out = np.empty(array.shape, np.float32)
    make(array, out)
    return out


def _owner(x: Array) -> Array:
    """Return the array that owns the memory of a view."""
    while isinstance(x.base, np.ndarray):
        x = x.base
    return x


def _writable(x: Any) -> bool:
    """Whether an array can be written to; always true for arrays of other libraries."""
    return not isinstance(x, np.ndarray) or x.flags.writeable or _owner(x).flags.writeable


def outdated(x: Any, saved: Any) -> bool:
    """Whether a weight may differ from its packed form; `saved` is that form, alone or first of a pair."""
    packed = saved[0] if type(saved) is tuple else saved
    return type(x) is not PackedArray and (packed.stale or _writable(x))


class Store:
    """Cache of packed weights by source array, shared by several programs.

    An array that a program reads packed becomes read-only, so that NumPy refuses to write values that the packed form
    would not have. One that its owner makes writable again is packed again, for all stores.
    """

    _all: ClassVar[weakref.WeakSet[Store]] = weakref.WeakSet()
    _lock = threading.RLock()

    def __init__(self) -> None:
        self._arrays: dict[tuple[int, str, bool, bool], tuple[Any, PackedArray]] = {}
        self._repacked: weakref.WeakKeyDictionary[PackedArray, Any] = weakref.WeakKeyDictionary()
        with self._lock:
            self._all.add(self)

    def packed(
        self, x: Any, kind: QuantType, transposed: bool, ternary: bool, name: str, freeze: bool = True
    ) -> PackedArray:
        """Return the packed form of an array, or the array itself if it is already packed this way."""
        if isinstance(x, PackedArray):
            if x.kind is kind and x.transposed is transposed:
                return x
            packed = pack(np.asarray(x), kind, transposed, name)
            packed.source = lambda: pack(np.asarray(x), kind, transposed, name).data
            return packed
        array = np.asarray(x)
        if array is not x or (not freeze and _writable(x)):
            return pack(values(array, ternary), kind, transposed, name)
        key = (id(x), kind.name, transposed, ternary)
        with self._lock:
            if _writable(x):
                _owner(x).flags.writeable = x.flags.writeable = False
                for store in self._all:
                    store._forget(_owner(x))
            entry = self._arrays.get(key)
            if entry is None or entry[0]() is not x or entry[1].stale:
                reference = weakref.ref(x, lambda _: self._arrays.pop(key, None))
                packed_array = pack(values(array, ternary), kind, transposed, name)
                packed_array.source = partial(_packed_again, reference, kind, transposed, ternary, name)
                entry = self._arrays[key] = (reference, packed_array)
        return entry[1]

    def _forget(self, owner: Array) -> None:
        """Mark all packed forms of this memory as stale."""
        for reference, packed in list(self._arrays.values()):
            x = reference()
            packed.stale |= x is not None and _owner(x) is owner

    def repacked(self, packed: PackedArray) -> Any:
        """Return the same rows interleaved for this CPU."""
        with self._lock:
            repacked = self._repacked.get(packed)
            if repacked is None:
                repacked = self._repacked[packed] = Repacked(packed)
                packed.drop_rows()
        return repacked


def _packed_again(reference: weakref.ref[Array], kind: QuantType, transposed: bool, ternary: bool, name: str) -> Array:
    """Return the packed rows of an array that is in memory interleaved."""
    array = reference()
    if array is None:
        raise InputError(
            f"the packed rows of {name} are gone: its program holds them interleaved, and its array does not exist",
            hint="hold the array that was bound, or export the model before the array is released",
        )
    return pack(values(array, ternary), kind, transposed, name).data
