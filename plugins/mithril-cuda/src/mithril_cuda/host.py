"""One NVIDIA GPU: memory, modules and a stream of CUDA's driver."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import suppress
from ctypes import c_int, c_size_t, c_uint64, c_void_p
from typing import Any

from mithril_cbackend.devices.host import Array, Buffer, Host
from mithril_cbackend.devices.launches import Launch
from mithril_cbackend.devices.model import DeviceModel
from mithril_cuda import nvrtc
from mithril_cuda.driver import OUT_OF_MEMORY, DriverError, driver

GROUP = 128  # threads: GPUs of desktops hold 16 groups, which 64 threads each would fill to two thirds
NON_BLOCKING = 1  # a stream that does not wait for those of other libraries
# Numbers of attributes of devices
GROUP_THREADS, GROUP_BYTES, MAJOR, MINOR, POOLS = 1, 8, 75, 76, 115
RELEASE_THRESHOLD = 4  # the attribute of a pool: bytes that it holds when the stream is idle


def capability(device: int) -> int:
    """Return the compute capability, 80 for 8.0."""
    return 10 * driver().attribute(MAJOR, device) + driver().attribute(MINOR, device)


class Memory:
    """Memory of the device, freed with this object, after the launches before it."""

    def __init__(self, host: CUDAHost, size: int) -> None:
        self.host = host
        allocation = ("cuMemAllocAsync", size, host.stream) if host.pools else ("cuMemAlloc_v2", size)
        self.address = host.value(c_uint64, *allocation)

    def __del__(self) -> None:
        if hasattr(self, "address"):
            free = (
                ("cuMemFreeAsync", self.address, self.host.stream)
                if self.host.pools
                else ("cuMemFree_v2", self.address)
            )
            self.host.released(*free)


class Module:
    """Machine code on the device, unloaded with this object."""

    def __init__(self, host: CUDAHost, code: bytes) -> None:
        self.host = host
        self.address = host.value(c_void_p, "cuModuleLoadData", code)

    def __del__(self) -> None:
        if hasattr(self, "address"):
            self.host.released("cuModuleUnload", self.address)

    def kernel(self, name: str) -> tuple[Module, int]:
        return self, self.host.value(c_void_p, "cuModuleGetFunction", self.address, name.encode())


class CUDAHost(Host):
    """A device with its primary context, which other libraries share, and a stream that runs launches in order."""

    kind = "CUDA"
    remedy = "install NVIDIA's driver; target_hardware='nvidia_a100' compiles without a GPU"

    @classmethod
    def devices(cls) -> Sequence[int]:
        try:
            return range(driver().value(c_int, "cuDeviceGetCount"))
        except DriverError:
            return ()

    @classmethod
    def title(cls, device: int) -> str:
        version = driver().value(c_int, "cuDriverGetVersion")
        versions = f"compute capability {capability(device) / 10}, CUDA {version // 1000}.{version % 1000 // 10}"
        return f"{driver().name(device)} ({versions})"

    @classmethod
    def absence(cls) -> str:
        try:
            driver()
        except DriverError as error:
            return f"the driver cannot be used: {error}"
        return "the driver lists no device"

    def __init__(self, device: int) -> None:
        super().__init__()
        self.driver, self.context, self.label = driver(), None, f"CUDA device {device}"
        try:
            self.label = self.title(device)
            self.capability = capability(device)
            self.memory = self.largest_buffer = self.value(c_size_t, "cuDeviceTotalMem_v2", device)
            self.model = DeviceModel(
                "cuda",
                group=GROUP,
                largest_group=self.driver.attribute(GROUP_THREADS, device),
                shared_bytes=self.driver.attribute(GROUP_BYTES, device),
            )
            self.context = self.value(c_void_p, "cuDevicePrimaryCtxRetain", device)
            self.stream = self.value(c_void_p, "cuStreamCreate", NON_BLOCKING)
            self.pools = bool(self.driver.attribute(POOLS, device))
            if self.pools:  # else each wait for the device returns free memory to the system
                pool = self.value(c_void_p, "cuDeviceGetDefaultMemPool", device)
                self.call("cuMemPoolSetAttribute", pool, RELEASE_THRESHOLD, ctypes.byref(c_uint64(-1)))
        except DriverError as error:
            raise self.failed("open", error) from error

    # -- calls --------------------------------------------------------------------------------------------------------
    def call(self, name: str, *arguments: Any) -> None:
        """Call the driver; the current context belongs to the thread, and other libraries may change it."""
        self.driver("cuCtxSetCurrent", self.context)
        self.driver(name, *arguments)

    def value(self, kind: Any, name: str, *arguments: Any) -> Any:
        """Return the value that a function of the driver writes to its first argument."""
        self.driver("cuCtxSetCurrent", self.context)
        return self.driver.value(kind, name, *arguments)

    def released(self, name: str, *arguments: Any) -> None:
        """Free something; a device that was lost has freed all."""
        with suppress(DriverError):
            self.call(name, *arguments)

    def guarded(self, action: str, name: str, *arguments: Any) -> None:
        try:
            self.call(name, *arguments)
        except DriverError as error:
            raise self.failed(action, error) from error

    # -- the interface of devices -------------------------------------------------------------------------------------
    def reserve(self, size: int) -> Memory:
        try:
            return Memory(self, size)
        except DriverError as error:
            raise (self.full(size) if error.code == OUT_OF_MEMORY else self.failed("allocate memory", error)) from error

    def write(self, buffer: Buffer, data: Array) -> None:
        action = "write to memory"
        self.guarded(action, "cuMemcpyHtoDAsync_v2", buffer.handle.address, data.ctypes.data, data.nbytes, self.stream)
        self.guarded(action, "cuStreamSynchronize", self.stream)  # the array may change afterwards

    def read(self, buffer: Buffer, data: Array) -> None:
        action = "read from memory"
        self.guarded(action, "cuMemcpyDtoHAsync_v2", data.ctypes.data, buffer.handle.address, data.nbytes, self.stream)
        self.guarded(action, "cuStreamSynchronize", self.stream)

    def copy(self, source: Buffer, source_start: int, target: Buffer, target_start: int, size: int) -> None:
        places = target.handle.address + target_start, source.handle.address + source_start
        self.guarded("copy memory", "cuMemcpyDtoDAsync_v2", *places, size, self.stream)

    def build(self, launches: Sequence[Launch]) -> Sequence[Any]:
        if not launches:
            return []
        code = nvrtc.compiled([launch.text for launch in launches], self.capability)
        try:
            module = Module(self, code)
            return [module.kernel(launch.name) for launch in launches]
        except DriverError as error:
            raise self.refused(f"{len(launches)} kernels", error) from error

    def launch(self, kernel: Any, launch: Launch, buffers: Sequence[Buffer]) -> None:
        count = len(buffers)
        addresses = (c_uint64 * count)(*(b.handle.address for b in buffers))
        first = ctypes.addressof(addresses)
        pointers = (c_void_p * count)(*range(first, first + 8 * count, 8))
        size = launch.groups, 1, 1, launch.threads, 1, 1, 0
        self.guarded(f"run the kernel '{launch.name}'", "cuLaunchKernel", kernel[1], *size, self.stream, pointers, None)

    def finish(self) -> None:
        self.guarded("finish", "cuStreamSynchronize", self.stream)
