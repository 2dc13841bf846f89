"""The array object: a value on an engine, with the operators of the standard."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from mithril.graph import DType, DTypeError, InputError, ShapeError, shape_text
from mithril_array.dtypes import PYTHON_SCALARS, ComplexDType, part_of, with_scalar
from mithril_array.engine import Engine, Kernel


class Namespace(Protocol):
    """The namespace of an engine, as its arrays refer to it."""

    engine: Engine
    default_float: DType
    default_int: DType
    dtypes: frozenset[DType]

    def asarray(self, obj: Any, /, *, dtype: Any = None, device: Any = None, copy: bool | None = None) -> Array: ...

    def __getattr__(self, name: str) -> Any: ...


class PositionError(InputError, IndexError):
    """A position is outside of its axis, or an index has another form than the accepted ones."""


class Array:
    """An array of one engine: real parts, or real and imaginary ones. It is a value: no other array changes with it."""

    __slots__ = ("__weakref__", "_is_private", "_parts", "_xp", "dtype", "shape")
    __array_priority__ = 1000.0
    # Operators of NumPy arrays leave mixed operands to this class, which refuses them.
    __array_ufunc__ = None
    dtype: DType
    shape: tuple[int, ...]

    def __init__(self, xp: Namespace, parts: tuple[Any, ...], dtype: DType) -> None:
        self._xp, self._parts, self.dtype = xp, parts, dtype
        self.shape = tuple(parts[0].shape)
        self._is_private = False  # whether no other object reads the memory of the parts, so that it can be written

    # -- attributes ------------------------------------------------------------------------------------------------
    @property
    def parts(self) -> tuple[Any, ...]:
        """The arrays of the backend: one, or the real and the imaginary parts."""
        self._is_private = False
        return self._parts

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def device(self) -> Any:
        return self._xp.device

    @property
    def T(self) -> Array:
        """The transposed matrix."""
        if self.ndim != 2:
            raise ShapeError(f"T is of a matrix, got shape {shape_text(self.shape)}", hint="x.mT, or xp.permute_dims")
        return self._xp.matrix_transpose(self)  # type: ignore[no-any-return]

    @property
    def mT(self) -> Array:
        """The array with its last two axes swapped."""
        return self._xp.matrix_transpose(self)  # type: ignore[no-any-return]

    def __array_namespace__(self, *, api_version: str | None = None) -> Namespace:
        self._xp.require_version(api_version)
        return self._xp

    # -- conversions -----------------------------------------------------------------------------------------------
    def numpy(self) -> np.ndarray[Any, Any]:
        """Return a NumPy array, of the memory of this one where it is main memory."""
        parts = [np.asarray(self._xp.engine.backend.to_numpy(p)) for p in self.parts]
        if len(parts) == 1:
            return parts[0]
        array = np.empty(self.shape, self.dtype.numpy)
        array.real, array.imag = parts
        return array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        array = self.numpy()
        if copy is False and len(self._parts) == 2:
            raise InputError("a complex array has its parts in two arrays: NumPy's is a copy", hint="pass copy=None")
        return np.array(array, dtype, copy=copy)

    def __dlpack__(
        self, *, stream: Any = None, max_version: Any = None, dl_device: Any = None, copy: bool | None = None
    ) -> Any:
        options = {"max_version": max_version, "dl_device": dl_device, "copy": copy, "stream": stream}
        passed = {name: value for name, value in options.items() if value is not None}
        if len(self._parts) == 2 or copy or not hasattr(self._parts[0], "__dlpack__"):
            if copy is False:
                raise BufferError("the array has its parts in two arrays: an export is a copy, pass copy=None")
            array: Any = np.array(self.numpy())
            return array.__dlpack__(**passed)
        (array,) = self.parts
        real: Any = np.asarray(array) if isinstance(array, np.generic) else array
        return real.__dlpack__(**passed)

    def __dlpack_device__(self) -> tuple[Any, int]:
        if len(self._parts) == 2 or not hasattr(self._parts[0], "__dlpack_device__"):
            return np.empty(0).__dlpack_device__()
        (array,) = self.parts
        return (np.asarray(array) if isinstance(array, np.generic) else array).__dlpack_device__()

    def to_device(self, device: Any, /, *, stream: Any = None) -> Array:
        if stream is not None:
            raise InputError(f"streams belong to an engine's library, got {stream!r}", hint="call without stream=")
        self._xp.require_device(device)
        return self

    def _item(self, kinds: tuple[str, ...], name: str) -> Any:
        if self.size != 1 or self.ndim:
            raise ShapeErrorOfScalar(
                f"{name} is of an array without axes, got shape {shape_text(self.shape)}", hint="x[0]"
            )
        if self.dtype.kind not in kinds:
            raise DTypeError(f"{name} is not of an array of {self.dtype}", hint="convert it: xp.astype(x, ...)")
        return self.numpy().item()

    def __bool__(self) -> bool:
        return bool(self._item(("bool", "int", "uint", "float", "complex"), "bool()"))

    def __int__(self) -> int:
        return int(self._item(("bool", "int", "uint", "float"), "int()"))

    def __float__(self) -> float:
        return float(self._item(("bool", "int", "uint", "float"), "float()"))

    def __complex__(self) -> complex:
        return complex(self._item(("bool", "int", "uint", "float", "complex"), "complex()"))

    def __index__(self) -> int:
        return operator.index(self._item(("int", "uint"), "index()"))

    def __len__(self) -> int:
        if not self.shape:
            raise DTypeError("an array without axes has no len()", hint="x.size")
        return self.shape[0]

    def __iter__(self) -> Iterator[Array]:
        if not self.shape:
            raise DTypeError("an array without axes has no elements to iterate over", hint="float(x), int(x)")
        return (self[k] for k in range(self.shape[0]))

    def __repr__(self) -> str:
        values = np.array2string(self.numpy(), separator=", ", prefix="Array(")
        return f"Array({values}, dtype={self.dtype}, engine='{self._xp.engine.backend.name}')"

    def __reduce__(self) -> tuple[Any, ...]:
        return restored, (self._xp, self.numpy())

    __hash__ = None  # type: ignore[assignment]  # == returns an array

    # -- elements --------------------------------------------------------------------------------------------------
    def __getitem__(self, key: Any, /) -> Array:
        return self._xp.selected(self, key)  # type: ignore[no-any-return]

    def __setitem__(self, key: Any, value: Any, /) -> None:
        self._xp.assign(self, key, value)

    # -- operators -------------------------------------------------------------------------------------------------
    def __abs__(self) -> Array:
        return self._xp.abs(self)  # type: ignore[no-any-return]

    def __neg__(self) -> Array:
        return self._xp.negative(self)  # type: ignore[no-any-return]

    def __pos__(self) -> Array:
        return self._xp.positive(self)  # type: ignore[no-any-return]

    def __invert__(self) -> Array:
        return self._xp.bitwise_invert(self)  # type: ignore[no-any-return]


OPERATORS = {
    "add": "add", "sub": "subtract", "mul": "multiply", "truediv": "divide", "floordiv": "floor_divide",
    "mod": "remainder", "pow": "pow", "matmul": "matmul", "and": "bitwise_and", "or": "bitwise_or",
    "xor": "bitwise_xor", "lshift": "bitwise_left_shift", "rshift": "bitwise_right_shift",
}  # fmt: skip
COMPARISONS = {
    "lt": "less", "le": "less_equal", "gt": "greater", "ge": "greater_equal", "eq": "equal", "ne": "not_equal",
}  # fmt: skip


def _operator(name: str, reflected: bool) -> Callable[[Array, Any], Any]:
    def method(self: Array, other: Any, /) -> Any:
        if not isinstance(other, (Array, *PYTHON_SCALARS)):
            return NotImplemented
        if name == "matmul" and not isinstance(other, Array):
            raise DTypeError(f"a matrix product has no operand {other!r}", hint="x * number")
        function = getattr(self._xp, name)
        return function(other, self) if reflected else function(self, other)

    return method


for _symbol, _name in (OPERATORS | COMPARISONS).items():
    setattr(Array, f"__{_symbol}__", _operator(_name, reflected=False))
for _symbol, _name in OPERATORS.items():
    setattr(Array, f"__r{_symbol}__", _operator(_name, reflected=True))


class ShapeErrorOfScalar(ShapeError, TypeError, ValueError):
    """A Python number was requested of an array with more than one element."""


def restored(xp: Namespace, array: np.ndarray[Any, Any]) -> Array:
    return xp.asarray(array)


# -- calls ---------------------------------------------------------------------------------------------------------
def as_array(x: Any, name: str = "x") -> Array:
    if isinstance(x, Array):
        return x
    raise DTypeError(
        f"'{name}' is a {type(x).__name__}, expected an array of this namespace", hint=f"convert it: xp.asarray({name})"
    )


def engine_of(arrays: Sequence[Array]) -> Namespace:
    xp = arrays[0]._xp
    for a in arrays:
        if a._xp is not xp:
            names = sorted({a._xp.engine.backend.name for a in arrays})
            raise InputError(
                f"arrays of several engines: {', '.join(names)}", hint="convert one: xp.asarray(other.numpy())"
            )
    return xp


def call(kernel: Kernel, *arrays: Array, **attributes: Any) -> Any:
    """Run a function of values on arrays by the program for their types."""
    xp = engine_of(arrays)
    types = tuple((a.dtype, a.shape) for a in arrays)
    return _run(xp, xp.engine.program(kernel, tuple(attributes.items()), types), arrays)


def call_open(kernel: Kernel, *arrays: Array, **attributes: Any) -> Any:
    """Run an element-wise function or a reduction by the program for any sizes, if the engine has one."""
    xp = engine_of(arrays)
    types = tuple((a.dtype, a.shape) for a in arrays)
    return _run(xp, xp.engine.program_of_any_size(kernel, tuple(attributes.items()), types), arrays)


def _run(xp: Namespace, program: Any, arrays: Sequence[Array]) -> Any:
    results = program([part for a in arrays for part in a.parts])
    if program.is_single:
        return Array(xp, tuple(results), program.dtypes[0])
    out, k = [], 0
    for dtype in program.dtypes:
        count = 1 + (dtype.kind == "complex")
        out.append(Array(xp, tuple(results[k : k + count]), dtype))
        k += count
    return tuple(out)


def moved(kernel: Kernel, *arrays: Array, **attributes: Any) -> Array:
    """Run a function that moves elements, for each part of the numbers; in main memory without a program."""
    xp = engine_of(arrays)
    dtype = arrays[0].dtype
    results = []
    for parts in zip(*(a.parts for a in arrays), strict=True):
        if all(isinstance(p, (np.ndarray, np.generic)) for p in parts):
            results.append(kernel(*map(np.asarray, parts), **attributes))
        else:
            part = part_of(dtype)
            wrapped = (Array(xp, (p,), part) for p in parts)
            results += call(kernel, *wrapped, **attributes).parts
    return Array(xp, tuple(results), dtype)


def on_host(function: Callable[..., Any], *arrays: Array) -> Any:
    """Run a function of NumPy arrays, for results whose sizes depend on elements, and complex matrices."""
    xp = engine_of(arrays)
    with np.errstate(all="ignore"):
        results = function(*(a.numpy() for a in arrays))
    return tuple(map(xp.asarray, results)) if isinstance(results, tuple) else xp.asarray(results)


def with_numbers(x1: Any, x2: Any) -> tuple[Array, Array]:
    """Return two operands, of which one may be a Python number, as arrays."""
    if isinstance(x1, Array):
        if isinstance(x2, Array):
            return x1, x2
        if isinstance(x2, PYTHON_SCALARS):
            return x1, number(x2, x1)
    elif isinstance(x2, Array) and isinstance(x1, PYTHON_SCALARS):
        return number(x1, x2), x2
    return as_array(x1, "x1"), as_array(x2, "x2")


def number(value: complex, like: Array) -> Array:
    """Return a Python number as an array without axes, with the dtype that it gets next to an array."""
    xp = like._xp
    dtype = with_scalar(like.dtype, value, xp.default_float)
    array = xp.engine.backend.array
    if isinstance(dtype, ComplexDType):
        kind = dtype.part.numpy.type
        return Array(xp, (array(kind(value.real)), array(kind(value.imag))), dtype)
    return Array(xp, (array(np.asarray(value, dtype.numpy)),), dtype)


__all__ = ["Array", "PositionError", "as_array", "call", "call_open", "moved", "number", "on_host", "with_numbers"]
