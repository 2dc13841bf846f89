"""One OpenCL device: buffers, programs and a queue of pyopencl."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyopencl as cl

from mithril.graph import ALL, BackendError
from mithril_cbackend.devices.host import Array, Buffer, Host
from mithril_cbackend.devices.languages import OPENCL
from mithril_cbackend.devices.launches import Launch
from mithril_cbackend.devices.model import DeviceModel

UNKNOWN_CPU = "unknown target CPU"  # of the LLVM inside of PoCL


class OpenCLHost(Host):
    """A device and its queue, which runs launches in order."""

    kind = "OpenCL"
    remedy = "install the driver of the device, or one for CPUs: pip install 'mithril-opencl[cpu]'"

    @classmethod
    def devices(cls) -> list[Any]:
        try:
            listed = [d for platform in cl.get_platforms() for d in platform.get_devices()]
        except cl.LogicError:  # no driver is installed
            return []
        return sorted(listed, key=lambda d: not d.type & cl.device_type.GPU)

    @classmethod
    def title(cls, device: Any) -> str:
        return f"{device.name.strip()} ({device.platform.name.strip()}, {device.version.strip()})"

    def __init__(self, device: Any) -> None:
        super().__init__()
        self.label = self.title(device)
        self.largest_buffer, self.memory = int(device.max_mem_alloc_size), int(device.global_mem_size)
        lacks = set() if "cl_khr_fp64" in device.extensions else {"float64"}
        self.model = DeviceModel(
            "opencl",
            frozenset(d for d in ALL if d.name not in lacks),
            largest_group=int(device.max_work_group_size),
            shared_bytes=int(device.local_mem_size),
        )
        self.context = cl.Context([device])
        self.queue = cl.CommandQueue(self.context)

    def reserve(self, size: int) -> Any:
        try:
            return cl.Buffer(self.context, cl.mem_flags.READ_WRITE, size)
        except cl.MemoryError as error:
            raise self.full(size) from error
        except cl.Error as error:
            raise self.failed("allocate memory", error) from error

    def write(self, buffer: Buffer, data: Array) -> None:
        self.guarded("write to memory", cl.enqueue_copy, self.queue, buffer.handle, data)

    def read(self, buffer: Buffer, data: Array) -> None:
        self.guarded("read from memory", cl.enqueue_copy, self.queue, data, buffer.handle)

    def copy(self, source: Buffer, source_start: int, target: Buffer, target_start: int, size: int) -> None:
        places = {"src_offset": source_start, "dst_offset": target_start, "byte_count": size}
        self.guarded("copy memory", cl.enqueue_copy, self.queue, target.handle, source.handle, **places)

    def build(self, launches: Sequence[Launch]) -> Sequence[Any]:
        if not launches:
            return []
        text = OPENCL.prelude + "\n".join(launch.text for launch in launches)
        try:
            program = cl.Program(self.context, text).build()
        except cl.Error as error:
            if UNKNOWN_CPU in str(error):
                raise BackendError(
                    f"the OpenCL driver of '{self.label}' is older than this CPU and cannot compile for it",
                    hint="install a newer driver: PoCL 3.0, which mithril-opencl[cpu] installs, is from 2022",
                ) from error
            raise self.refused(f"{len(launches)} kernels", error) from error
        return [cl.Kernel(program, launch.name) for launch in launches]

    def launch(self, kernel: Any, launch: Launch, buffers: Sequence[Buffer]) -> None:
        kernel.set_args(*(b.handle for b in buffers))
        size = (launch.groups * launch.threads,), (launch.threads,)
        self.guarded(f"run the kernel '{launch.name}'", cl.enqueue_nd_range_kernel, self.queue, kernel, *size)

    def finish(self) -> None:
        self.guarded("finish", self.queue.finish)

    def guarded(self, action: str, function: Any, *arguments: Any, **keywords: Any) -> None:
        try:
            function(*arguments, **keywords)
        except cl.Error as error:
            raise self.failed(action, error) from error
