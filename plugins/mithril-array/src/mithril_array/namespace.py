"""``ml.array_api``: the namespace of one engine."""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass
from functools import cache
from typing import Any

from mithril.backend import Backend
from mithril.graph import DType, DTypeError, InputError, float32, float64, int32, int64
from mithril.plugins import backend_class
from mithril_array import creation, elementwise, indexing, manipulation, searching, statistics
from mithril_array.array import Array
from mithril_array.creation import Creation
from mithril_array.dtypes import DTYPES, PYTHON_SCALARS, can_cast, is_kind, joined, limits, named, part_of, with_scalar
from mithril_array.engine import Engine
from mithril_array.fourier import fft_functions
from mithril_array.linear_algebra import FUNCTIONS as PRODUCTS, LINALG

VERSION = "2024.12"
MODULES = (creation, elementwise, indexing, manipulation, searching, statistics)
STANDARD = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float32", "float64",
    "complex64", "complex128",
)  # fmt: skip


@dataclass(frozen=True)
class Device:
    """Where the arrays of an engine are."""

    engine: str
    name: str

    def __str__(self) -> str:
        return self.name


class _Functions:
    """An extension: its functions by name."""

    def __init__(self, name: str, functions: dict[str, Any]) -> None:
        self.__name__ = name
        self.__dict__.update(functions)


@dataclass(frozen=True)
class FloatInfo:
    """The limits of a floating-point dtype."""

    bits: int
    eps: float
    max: float
    min: float
    smallest_normal: float
    dtype: DType


@dataclass(frozen=True)
class IntegerInfo:
    """The limits of an integer dtype."""

    bits: int
    max: int
    min: int
    dtype: DType


class Namespace(Creation):
    """The functions, dtypes and constants of the array API standard, on one engine."""

    __array_api_version__ = VERSION
    e, inf, nan, pi, newaxis = math.e, math.inf, math.nan, math.pi, None

    def __init__(self, backend: Backend) -> None:
        self.__name__ = f"mithril_array.{backend.name}"
        self.engine = Engine(backend)
        self.device = Device(backend.name, str(backend.device))
        self.dtypes = frozenset(d for d in DTYPES.values() if part_of(d) in backend.dtypes)
        self.default_float = float64 if float64 in self.dtypes else float32
        self.default_int = int64 if int64 in self.dtypes else int32
        for d in self.dtypes:
            setattr(self, d.name, d)
        for module in MODULES:
            self.__dict__.update(module.FUNCTIONS)
        self.__dict__.update(PRODUCTS)
        self.fft = _Functions("fft", fft_functions(self))
        self.linalg = _Functions("linalg", LINALG)

    def __getattr__(self, name: str) -> Any:
        close = difflib.get_close_matches(name, dir(self), 1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise AttributeError(f"the array API standard {VERSION} has no name '{name}'{hint}", name=name, obj=self)

    def __repr__(self) -> str:
        return f"<array API of mithril on {self.engine.backend!r}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return array_api, (self.engine.backend.name,)

    def selected(self, x: Array, key: Any) -> Array:
        return indexing.selected(x, key)

    def assign(self, x: Array, key: Any, value: Any) -> None:
        indexing.assign(x, key, value)

    # -- dtypes ----------------------------------------------------------------------------------------------------
    def dtype(self, like: Any) -> DType:
        """Return a dtype of this engine."""
        dtype = named(like)
        if dtype not in self.dtypes:
            names = [n for n in DTYPES if DTYPES[n] in self.dtypes]
            raise DTypeError(
                f"{self.engine.backend.name} has no arrays of {dtype}", facts=[f"accepted: {', '.join(names)}"]
            )
        return dtype

    def isdtype(self, dtype: DType, kind: Any) -> bool:
        return is_kind(named(dtype), kind)

    def can_cast(self, source: Any, target: Any, /) -> bool:
        return can_cast(source.dtype if isinstance(source, Array) else self.dtype(source), self.dtype(target))

    def result_type(self, *arrays_and_dtypes: Any) -> DType:
        """Return the dtype of a result of arrays, dtypes and Python numbers."""
        numbers = [a for a in arrays_and_dtypes if isinstance(a, PYTHON_SCALARS)]
        kinds = [
            a.dtype if isinstance(a, Array) else self.dtype(a)
            for a in arrays_and_dtypes
            if not isinstance(a, PYTHON_SCALARS)
        ]
        if not kinds:
            raise InputError("result_type needs an array or a dtype", facts=[f"got {arrays_and_dtypes!r}"])
        result = kinds[0]
        for kind in kinds[1:]:
            result = joined(result, kind)
        for value in numbers:
            result = with_scalar(result, value, self.default_float)
        return self.dtype(result)

    def finfo(self, type: Any, /) -> FloatInfo:
        dtype = type.dtype if isinstance(type, Array) else self.dtype(type)
        part = part_of(dtype)
        if not part.is_float:
            raise DTypeError(f"finfo is of floating-point dtypes, got {dtype}", hint="xp.iinfo")
        info = limits(part)
        eps, high, low, normal = (float(v) for v in (info.eps, info.max, info.min, info.smallest_normal))
        return FloatInfo(part.bits, eps, high, low, normal, part)

    def iinfo(self, type: Any, /) -> IntegerInfo:
        dtype = type.dtype if isinstance(type, Array) else self.dtype(type)
        if not dtype.is_integer:
            raise DTypeError(f"iinfo is of integer dtypes, got {dtype}", hint="xp.finfo")
        low, high = dtype.limits
        return IntegerInfo(dtype.bits, high, low, dtype)

    # -- inspection ------------------------------------------------------------------------------------------------
    def __array_namespace_info__(self) -> Info:
        return Info(self)

    def require_version(self, version: str | None) -> None:
        if version is not None and version not in ("2021.12", "2022.12", "2023.12", VERSION):
            raise InputError(f"the array API version is {VERSION}, requested {version}", hint="pass no api_version")

    def require_device(self, device: Any) -> None:
        if device is not None and device != self.device and device != self.device.name:
            raise InputError(
                f"the engine {self.engine.backend.name} has no device {device!r}",
                facts=[f"accepted: {self.device!r}"],
                hint="ml.array_api(backend) for a backend with another device, and xp.asarray(x)",
            )


class Info:
    """Devices, dtypes and capabilities of an engine, for ``__array_namespace_info__``."""

    def __init__(self, xp: Namespace) -> None:
        self._xp = xp

    def capabilities(self) -> dict[str, Any]:
        return {"boolean indexing": True, "data-dependent shapes": True, "max dimensions": 64}

    def default_device(self) -> Device:
        return self._xp.device

    def devices(self) -> list[Device]:
        return [self._xp.device]

    def default_dtypes(self, *, device: Any = None) -> dict[str, DType]:
        self._xp.require_device(device)
        real = self._xp.default_float
        names = {"real floating": real, "complex floating": _complex(real)}
        return {**names, "integral": self._xp.default_int, "indexing": self._xp.default_int}

    def dtypes(self, *, device: Any = None, kind: Any = None) -> dict[str, DType]:
        self._xp.require_device(device)
        available = {n: DTYPES[n] for n in STANDARD if DTYPES[n] in self._xp.dtypes}
        return {n: d for n, d in available.items() if kind is None or is_kind(d, kind)}


def _complex(real: DType) -> DType:
    return DTYPES["complex128" if real.bits == 64 else "complex64"]


@cache
def _namespace(backend: Backend) -> Namespace:
    return Namespace(backend)


@cache
def _by_name(name: str) -> Namespace:
    return _namespace(backend_class(name)())


def array_api(engine: Backend | str = "numpy") -> Namespace:
    """Return the array API namespace of an engine: its arrays are computed by mithril's operations on it.

    ``engine`` is the name of a backend, or a backend: ``ml.array_api(ml.TorchBackend(device="cuda"))``.
    """
    return _by_name(engine) if isinstance(engine, str) else _namespace(engine)
