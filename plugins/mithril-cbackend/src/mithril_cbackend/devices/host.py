"""The interface of a device plugin: memory and launches of one device, and arrays in that memory."""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from mithril.backend import memory_plan
from mithril.graph import BackendError, DType, MemoryLimitError, dtype as as_dtype
from mithril_cbackend.devices.launches import Launch
from mithril_cbackend.devices.model import DeviceModel

Array = np.ndarray[Any, Any]


class Buffer:
    """Memory of a device, released with this object; ``handle`` is the object of its driver."""

    __slots__ = ("handle", "host", "size")

    def __init__(self, host: Host, size: int) -> None:
        self.host, self.size = host, 0  # nothing to release if the next line fails
        self.handle = host.reserve(size)
        self.size = size
        host.allocated += size
        host.peak = max(host.peak, host.allocated)

    def __del__(self) -> None:
        self.host.allocated -= self.size


class Host(ABC):
    """One device. Kernels are objects of the host; errors of its driver become mithril's.

    The class lists the devices of all drivers, and is called with one of them.
    """

    kind: ClassVar[str]  # the interface of the drivers, as errors name it
    remedy: ClassVar[str]  # how to install a driver
    model: DeviceModel
    label: str  # the device and its driver, in words
    largest_buffer: int  # bytes
    memory: int | None  # bytes; None if the driver does not say

    def __init__(self) -> None:
        self.allocated = self.peak = 0
        self.lock = threading.RLock()  # of calls: threads of a process share the queue

    @classmethod
    @abstractmethod
    def devices(cls) -> Sequence[Any]:
        """Return the devices of all drivers, GPUs first."""

    @classmethod
    @abstractmethod
    def title(cls, device: Any) -> str:
        """Return a device and its driver in words."""

    @classmethod
    def absence(cls) -> str:
        """Return why no device is listed."""
        return f"no {cls.kind} driver is installed"

    @classmethod
    def opened(cls, number: int) -> Self:
        """Open a device by its position in the list."""
        listed = cls.devices()
        if number < len(listed):
            return cls(listed[number])  # type: ignore[call-arg]
        facts = [f"device {k}: {cls.title(d)}" for k, d in enumerate(listed)] or [cls.absence()]
        raise BackendError(f"{cls.kind} has no device {number}", facts=facts, hint=cls.remedy)

    def allocate(self, size: int) -> Buffer:
        """Return a buffer of at least this many bytes; raise MemoryLimitError if the device has no room for it."""
        available = math.inf if self.memory is None else self.memory - self.allocated
        if size > min(self.largest_buffer, available):
            raise self.full(size)
        return Buffer(self, max(-(-size // 4) * 4, 4))  # WebGPU copies words

    def full(self, size: int) -> MemoryLimitError:
        """Return the error for an array that the device has no room for."""
        total = "" if self.memory is None else f" of {memory_plan.format_bytes(self.memory)}"
        return MemoryLimitError(
            f"the device '{self.label}' has no room for an array of {memory_plan.format_bytes(size)}",
            facts=[
                f"in use: {memory_plan.format_bytes(self.allocated)}{total}",
                f"largest array: {memory_plan.format_bytes(self.largest_buffer)}",
            ],
            hint="compile with smaller shapes, or release arrays of the device that are no longer needed",
        )

    def failed(self, action: str, cause: object) -> BackendError:
        """Return the error for a call of the driver that failed."""
        return BackendError(
            f"the device '{self.label}' could not {action}",
            facts=_lines(cause),
            hint="a driver that lost its device needs a new process; else compile with smaller shapes",
        )

    def refused(self, kernels: str, cause: object) -> BackendError:
        """Return the error for kernels that the driver cannot compile."""
        return BackendError(
            f"the {self.kind} driver of '{self.label}' cannot compile {kernels}",
            facts=_lines(cause),
            hint="this is a bug in mithril or in the driver: please report it with str(compiled.graph)",
        )

    @abstractmethod
    def reserve(self, size: int) -> Any:
        """Return an object of the driver that frees its memory when it is deleted."""

    @abstractmethod
    def write(self, buffer: Buffer, data: Array) -> None:
        """Write a contiguous array to the beginning of a buffer."""

    @abstractmethod
    def read(self, buffer: Buffer, data: Array) -> None:
        """Read the beginning of a buffer into a contiguous array, after all launches before it."""

    @abstractmethod
    def copy(self, source: Buffer, source_start: int, target: Buffer, target_start: int, size: int) -> None:
        """Copy bytes between buffers."""

    @abstractmethod
    def build(self, launches: Sequence[Launch]) -> Sequence[Any]:
        """Compile the text of launches and return their kernels."""

    @abstractmethod
    def launch(self, kernel: Any, launch: Launch, buffers: Sequence[Buffer]) -> None:
        """Start a kernel."""

    @abstractmethod
    def finish(self) -> None:
        """Wait for all launches."""


def _lines(cause: object) -> list[str]:
    return [line for line in str(cause).splitlines() if line.strip()][:6]


def to_storage(model: DeviceModel, data: Array, dtype: DType) -> Array:
    """Return elements as the device stores them."""
    kind = np.dtype(model.storage(dtype))
    data = np.asarray(data, dtype.numpy, order="C")
    if dtype.is_float and dtype.bits == 16:
        data = data.view(np.uint16)
    return data if data.dtype == kind else data.astype(kind)


def from_storage(model: DeviceModel, data: Array, dtype: DType) -> Array:
    if dtype.is_float and dtype.bits == 16:
        return data.astype(np.uint16, copy=False).view(dtype.numpy)
    return data if data.dtype == dtype.numpy else data.astype(dtype.numpy)


class DeviceArray(NDArrayOperatorsMixin):
    """An array in the memory of a device; NumPy reads it by a copy, computes with that copy, and pickles it."""

    __slots__ = ("buffer", "dtype", "host", "shape")

    def __init__(self, host: Host, buffer: Buffer, shape: tuple[int, ...], dtype: Any) -> None:
        self.host, self.buffer, self.shape, self.dtype = host, buffer, shape, np.dtype(dtype)

    @classmethod
    def of(cls, host: Host, data: Array) -> DeviceArray:
        stored = to_storage(host.model, data, as_dtype(data.dtype))
        buffer = host.allocate(stored.nbytes)
        if stored.nbytes:
            with host.lock:
                host.write(buffer, stored)
        return cls(host, buffer, data.shape, data.dtype)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return int(self.size * self.dtype.itemsize)

    def numpy(self) -> Array:
        """Return a copy in main memory."""
        dtype, model = as_dtype(self.dtype), self.host.model
        data = np.empty(self.size, model.storage(dtype))
        if data.nbytes:
            with self.host.lock:
                self.host.read(self.buffer, data)
        return from_storage(model, data, dtype).reshape(self.shape)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        if copy is False:
            raise ValueError("an array of a device can only be copied to main memory")
        data = self.numpy()
        return data if dtype is None else data.astype(dtype, copy=False)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **settings: Any) -> Any:
        if "out" in settings:
            return NotImplemented  # arrays of a device are not written in place
        arrays = [x.numpy() if isinstance(x, DeviceArray) else x for x in inputs]
        return getattr(ufunc, method)(*arrays, **settings)

    def __deepcopy__(self, memo: Any) -> DeviceArray:
        return DeviceArray.of(self.host, self.numpy())

    def __reduce__(self) -> Any:
        return np.asarray, (self.numpy(),)  # another process may have no such device

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, key: Any) -> Any:
        return self.numpy()[key]

    def __float__(self) -> float:
        return float(self.numpy())

    def __int__(self) -> int:
        return int(self.numpy())

    def __bool__(self) -> bool:
        return bool(self.numpy())

    def item(self) -> Any:
        return self.numpy().item()

    def __repr__(self) -> str:
        return f"DeviceArray({self.numpy()!r}, {self.host.label})"
