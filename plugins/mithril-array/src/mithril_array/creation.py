"""Functions of a namespace that create arrays, and the conversion of arrays of others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from mithril import ops
from mithril.graph import DType, DTypeError, InputError, bool_
from mithril_array.array import Array, as_array, moved
from mithril_array.dtypes import DTYPES, ComplexDType, complex_of, named
from mithril_array.elementwise import astype
from mithril_array.engine import Engine

Shape = int | Sequence[int]


def _shape(shape: Shape) -> tuple[int, ...]:
    sizes = (
        (shape,) if isinstance(shape, int) or (hasattr(shape, "__index__") and not isinstance(shape, tuple)) else shape
    )
    return tuple(int(n) for n in sizes)


class Creation:
    """The part of a namespace whose functions need its engine."""

    engine: Engine
    dtypes: frozenset[DType]
    default_float: DType
    default_int: DType

    def dtype(self, like: Any) -> DType:
        raise NotImplementedError

    def require_device(self, device: Any) -> None:
        raise NotImplementedError

    def from_numpy(self, array: np.ndarray[Any, Any]) -> Array:
        """Return the array of a NumPy array, in its memory if the engine computes in main memory."""
        dtype = self.dtype(named(array.dtype))
        backend, xp = self.engine.backend, self
        parts = (array.real, array.imag) if isinstance(dtype, ComplexDType) else (array,)
        part = dtype.part if isinstance(dtype, ComplexDType) else dtype
        return Array(xp, tuple(backend.array(np.asarray(p), part) for p in parts), dtype)  # type: ignore[arg-type]

    def asarray(self, obj: Any, /, *, dtype: Any = None, device: Any = None, copy: bool | None = None) -> Array:
        """Convert numbers, nested sequences, and arrays of any library; without a copy where memory is shared."""
        self.require_device(device)
        target = None if dtype is None else self.dtype(dtype)
        if isinstance(obj, Array):
            return self._of_array(obj, target, copy)
        backend = self.engine.backend
        if backend.is_array(obj) and (kind := named(obj.dtype)) in self.dtypes and kind.kind != "complex":
            array = Array(self, (backend.copied(obj) if copy else obj,), kind)  # type: ignore[arg-type]
            return array if target is None else self._of_array(array, target, copy)
        if not hasattr(obj, "__array__") and not hasattr(obj, "__dlpack__"):
            if copy is False:
                raise InputError(f"a {type(obj).__name__} has no memory to share", hint="pass copy=None")
            return self.from_numpy(self._of_numbers(obj, target))
        host: Any = np.asarray(obj) if hasattr(obj, "__array__") else np.from_dlpack(obj)
        if named(host.dtype) is not target and target is not None:
            if copy is False:
                raise InputError(f"a conversion from {host.dtype} to {target} copies", hint="pass copy=None")
            return astype(self.from_numpy(host), target)
        return self.from_numpy(np.array(host) if copy else host)

    def _of_array(self, x: Array, target: DType | None, copy: bool | None) -> Array:
        owner: Any = x._xp
        if owner is not self:
            if copy is False:
                raise InputError("a conversion from another engine copies", hint="pass copy=None")
            x = self.from_numpy(x.numpy())
        if target is not None and target is not x.dtype:
            if copy is False:
                raise InputError(f"a conversion from {x.dtype} to {target} copies", hint="pass copy=None")
            return astype(x, target)
        if copy:
            return Array(x._xp, tuple(map(self.engine.backend.copied, x.parts)), x.dtype)
        return x if copy is False or copy is None else Array(x._xp, x.parts, x.dtype)

    def _of_numbers(self, obj: Any, target: DType | None) -> np.ndarray[Any, Any]:
        """Return the array of numbers, of which an array without axes may be one."""
        if target is not None and isinstance(obj, int) and target.is_integer:
            return np.asarray(obj, target.numpy)
        try:
            array = np.asarray(_unpacked(obj))
        except ValueError:  # rows of several lengths
            array = np.asarray(None)
        if array.dtype.kind not in "biufc":
            raise DTypeError(
                f"cannot make an array of {obj!r:.100}", facts=["accepted: numbers, rows of equal length, arrays"]
            )
        if target is not None:
            if array.dtype.kind == "c" and target.kind != "complex":
                raise DTypeError(f"cannot convert complex numbers to {target}", hint="dtype=xp.complex128")
            return array.astype(target.numpy)
        defaults = {"b": bool_, "i": self.default_int, "u": self.default_int, "f": self.default_float}
        kind = complex_of(self.default_float) if array.dtype.kind == "c" else defaults[array.dtype.kind]
        if array.dtype.kind in "iu" and array.size and int(array.max()) > kind.limits[1]:
            kind = DTYPES["uint64"]
        return array if _has_dtype(obj) else array.astype(kind.numpy)

    # -- filled ----------------------------------------------------------------------------------------------------
    def full(self, shape: Shape, fill_value: complex, *, dtype: Any = None, device: Any = None) -> Array:
        self.require_device(device)
        if isinstance(fill_value, Array):
            fill_value = fill_value.numpy().item()
        kind = self.dtype(dtype) if dtype is not None else self._of_number(fill_value)
        make = self.engine.backend.full
        if isinstance(kind, ComplexDType):
            value = complex(fill_value)
            parts: tuple[Any, ...] = tuple(make(_shape(shape), v, kind.part) for v in (value.real, value.imag))
        elif kind.bits == 64 and kind.is_integer:
            parts = (self.engine.backend.array(np.full(_shape(shape), fill_value, kind.numpy), kind),)
        else:
            parts = (make(_shape(shape), fill_value, kind),)
        return Array(self, parts, kind)  # type: ignore[arg-type]

    def _of_number(self, value: complex) -> DType:
        if isinstance(value, bool):
            return bool_
        if isinstance(value, int):
            return self.default_int
        return self.default_float if isinstance(value, float) else complex_of(self.default_float)

    def zeros(self, shape: Shape, *, dtype: Any = None, device: Any = None) -> Array:
        return self.full(shape, 0, dtype=self.default_float if dtype is None else dtype, device=device)

    def ones(self, shape: Shape, *, dtype: Any = None, device: Any = None) -> Array:
        return self.full(shape, 1, dtype=self.default_float if dtype is None else dtype, device=device)

    def empty(self, shape: Shape, *, dtype: Any = None, device: Any = None) -> Array:
        """Return zeros: arrays are values, of which none is undefined."""
        return self.zeros(shape, dtype=dtype, device=device)

    def full_like(self, x: Array, /, fill_value: complex, *, dtype: Any = None, device: Any = None) -> Array:
        return self.full(as_array(x).shape, fill_value, dtype=x.dtype if dtype is None else dtype, device=device)

    def zeros_like(self, x: Array, /, *, dtype: Any = None, device: Any = None) -> Array:
        return self.full_like(x, 0, dtype=dtype, device=device)

    def ones_like(self, x: Array, /, *, dtype: Any = None, device: Any = None) -> Array:
        return self.full_like(x, 1, dtype=dtype, device=device)

    def empty_like(self, x: Array, /, *, dtype: Any = None, device: Any = None) -> Array:
        return self.full_like(x, 0, dtype=dtype, device=device)

    # -- sequences -------------------------------------------------------------------------------------------------
    def _converted(self, array: np.ndarray[Any, Any], dtype: Any, device: Any, default: DType) -> Array:
        self.require_device(device)
        return self.from_numpy(array.astype((default if dtype is None else self.dtype(dtype)).numpy))

    def arange(
        self, start: float, /, stop: float | None = None, step: float = 1, *, dtype: Any = None, device: Any = None
    ) -> Array:
        first, last = (0, start) if stop is None else (start, stop)
        if step == 0:
            raise InputError("the step of arange is 0", hint="step=1")
        if not (isinstance(first, int) and isinstance(last, int) and isinstance(step, int)):
            count = max(0, math.ceil((last - first) / step))
            return self._converted(first + step * np.arange(count), dtype, device, self.default_float)
        numbers = range(first, last, step)
        kind = np.uint64 if max((*numbers[:1], *numbers[-1:]), default=0) >= 2**63 else np.int64
        return self._converted(np.asarray(numbers, kind), dtype, device, self.default_int)

    def linspace(
        self,
        start: complex,
        stop: complex,
        /,
        num: int,
        *,
        dtype: Any = None,
        device: Any = None,
        endpoint: bool = True,
    ) -> Array:
        is_complex = isinstance(start, complex) or isinstance(stop, complex)
        default = complex_of(self.default_float) if is_complex else self.default_float
        return self._converted(np.linspace(start, stop, num, endpoint=endpoint), dtype, device, default)

    def eye(
        self, n_rows: int, n_cols: int | None = None, /, *, k: int = 0, dtype: Any = None, device: Any = None
    ) -> Array:
        k = max(min(k, n_rows + (n_cols or n_rows)), -n_rows - (n_cols or n_rows))
        return self._converted(np.eye(n_rows, n_cols, k), dtype, device, self.default_float)

    def from_dlpack(self, x: Any, /, *, device: Any = None, copy: bool | None = None) -> Array:
        """Return the array of an object with ``__dlpack__``; on the same device without a copy where possible."""
        self.require_device(device)
        if isinstance(x, Array):
            return self.asarray(x, copy=copy)
        if not hasattr(x, "__dlpack__"):
            raise DTypeError(f"a {type(x).__name__} has no __dlpack__", hint="xp.asarray(x)")
        return self.asarray(x if self.engine.backend.is_array(x) else np.from_dlpack(x), copy=copy)

    def meshgrid(self, *arrays: Array, indexing: str = "xy") -> list[Array]:
        if indexing not in ("xy", "ij"):
            raise InputError(f"indexing cannot be {indexing!r}", facts=["accepted: 'xy', 'ij'"])
        arrays = tuple(map(as_array, arrays))
        count = len(arrays)
        order = [1, 0, *range(2, count)] if indexing == "xy" and count > 1 else list(range(count))
        shape = tuple(arrays[j].size for j in order)
        out = []
        for k, x in enumerate(arrays):
            column = tuple(x.size if order[j] == k else 1 for j in range(count))
            out.append(moved(_spread, x, column=column, shape=shape))
        return out


def _spread(x: Any, *, column: tuple[int, ...], shape: tuple[int, ...]) -> Any:
    return ops.broadcast_to(ops.reshape(x, shape=column), shape=shape)


def _unpacked(obj: Any) -> Any:
    if isinstance(obj, Array):
        return obj.numpy()
    if isinstance(obj, (list, tuple)):
        return [_unpacked(x) for x in obj]
    return obj


def _has_dtype(obj: Any) -> bool:
    """Whether a nested sequence contains arrays, whose dtype remains."""
    while isinstance(obj, (list, tuple)) and obj:
        obj = obj[0]
    return isinstance(obj, (Array, np.generic))


def tril(x: Array, /, *, k: int = 0) -> Array:
    return moved(_triangle, as_array(x), k=_diagonal(x, k), lower=True)


def triu(x: Array, /, *, k: int = 0) -> Array:
    return moved(_triangle, as_array(x), k=_diagonal(x, k), lower=False)


def _diagonal(x: Array, k: int) -> int:
    reach = sum(x.shape[-2:])
    return max(-reach, min(k, reach))


def _triangle(x: Any, *, k: int, lower: bool) -> Any:
    return ops.tril(x, k=k) if lower else ops.triu(x, k=k)


FUNCTIONS = {"tril": tril, "triu": triu}
