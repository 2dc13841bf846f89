"""The functions of CUDA's driver that a device needs, by ctypes; codes of failures become exceptions with names."""

from __future__ import annotations

import ctypes
import sys
from ctypes import c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from functools import cache
from typing import Any

LIBRARY = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuDriverGetVersion": (c_void_p,),
    "cuGetErrorName": (c_int, c_void_p),
    "cuGetErrorString": (c_int, c_void_p),
    "cuDeviceGetCount": (c_void_p,),
    "cuDeviceGetName": (c_char_p, c_int, c_int),
    "cuDeviceTotalMem_v2": (c_void_p, c_int),
    "cuDeviceGetAttribute": (c_void_p, c_int, c_int),
    "cuDevicePrimaryCtxRetain": (c_void_p, c_int),
    "cuCtxSetCurrent": (c_void_p,),
    "cuStreamCreate": (c_void_p, c_uint),
    "cuStreamSynchronize": (c_void_p,),
    "cuDeviceGetDefaultMemPool": (c_void_p, c_int),
    "cuMemPoolSetAttribute": (c_void_p, c_int, c_void_p),
    "cuMemAllocAsync": (c_void_p, c_size_t, c_void_p),
    "cuMemFreeAsync": (c_uint64, c_void_p),
    "cuMemAlloc_v2": (c_void_p, c_size_t),
    "cuMemFree_v2": (c_uint64,),
    "cuMemcpyHtoDAsync_v2": (c_uint64, c_void_p, c_size_t, c_void_p),
    "cuMemcpyDtoHAsync_v2": (c_void_p, c_uint64, c_size_t, c_void_p),
    "cuMemcpyDtoDAsync_v2": (c_uint64, c_uint64, c_size_t, c_void_p),
    "cuModuleLoadData": (c_void_p, c_char_p),
    "cuModuleGetFunction": (c_void_p, c_void_p, c_char_p),
    "cuModuleUnload": (c_void_p,),
    "cuLaunchKernel": (c_void_p, *(c_uint,) * 7, c_void_p, c_void_p, c_void_p),
}
# CUDA_ERROR_OUT_OF_MEMORY of cuda.h.
OUT_OF_MEMORY = 2


class DriverError(Exception):
    """A call of the driver that failed, or a library that cannot be loaded (code None)."""

    def __init__(self, text: str, code: int | None = None) -> None:
        super().__init__(text)
        self.code = code


class Driver:
    """The library of the driver; ``driver("cuInit", 0)`` calls a function and raises DriverError if it fails."""

    def __init__(self, path: str) -> None:
        try:
            self.library = ctypes.CDLL(path)
            self.functions = {name: getattr(self.library, name) for name in FUNCTIONS}
        except (OSError, AttributeError) as error:  # no library, or one of a driver before CUDA 11.2
            raise DriverError(str(error)) from error
        for name, types in FUNCTIONS.items():
            self.functions[name].argtypes = types
        self("cuInit", 0)

    def __call__(self, name: str, *arguments: Any) -> None:
        code = self.functions[name](*arguments)
        if code:
            raise DriverError(
                f"{name}: {self.words('cuGetErrorName', code)}: {self.words('cuGetErrorString', code)}", code
            )

    def words(self, function: str, code: int) -> str:
        text = c_char_p()
        self.functions[function](code, ctypes.byref(text))
        return str(code) if text.value is None else text.value.decode()

    def value(self, kind: Any, name: str, *arguments: Any) -> Any:
        """Return the value that a function writes to its first argument."""
        result = kind()
        self(name, ctypes.byref(result), *arguments)
        return result.value

    def attribute(self, number: int, device: int) -> int:
        return int(self.value(c_int, "cuDeviceGetAttribute", number, device))

    def name(self, device: int) -> str:
        text = ctypes.create_string_buffer(256)
        self("cuDeviceGetName", text, len(text), device)
        return text.value.decode()


@cache
def loaded(path: str) -> Driver:
    return Driver(path)


def driver() -> Driver:
    """Return the driver, loaded once; DriverError if it is missing or has no device."""
    return loaded(LIBRARY)
