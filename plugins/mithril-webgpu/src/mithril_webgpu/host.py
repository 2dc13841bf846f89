"""One WebGPU device: buffers, pipelines and a queue of wgpu."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import wgpu

from mithril_cbackend.devices.host import Array, Buffer, Host
from mithril_cbackend.devices.launches import Launch
from mithril_cbackend.devices.model import BROWSER, DeviceModel
from mithril_cbackend.devices.wgsl import WEBGPU

KINDS = ("DiscreteGPU", "IntegratedGPU")
USAGE = wgpu.BufferUsage.STORAGE | wgpu.BufferUsage.COPY_SRC | wgpu.BufferUsage.COPY_DST
LIMITS = (
    *("max-buffer-size", "max-storage-buffer-binding-size", "max-storage-buffers-per-shader-stage"),
    *("max-compute-workgroup-storage-size", "max-compute-invocations-per-workgroup", "max-compute-workgroup-size-x"),
)
PENDING = 256  # launches, after which the device starts while further ones are encoded


class WebGPUHost(Host):
    """A device and its queue; launches are encoded until something waits for them."""

    kind = "WebGPU"
    remedy = "install the driver of the device for Vulkan, Metal or Direct3D 12, or one for CPUs: mesa-vulkan-drivers"
    memory = None  # WebGPU does not say

    @classmethod
    def devices(cls) -> list[Any]:
        # OpenGL would list the same ones again.
        listed = [a for a in wgpu.gpu.enumerate_adapters_sync() if a.info["backend_type"] != "OpenGL"]

        def rank(adapter: Any) -> int:
            name = adapter.info["adapter_type"]
            return KINDS.index(name) if name in KINDS else len(KINDS)

        return sorted(listed, key=rank)

    @classmethod
    def title(cls, device: Any) -> str:
        return str(device.summary)

    def __init__(self, adapter: Any) -> None:
        super().__init__()
        self.label = self.title(adapter)
        limits = adapter.limits
        with self.guarded("open"):
            self.device = adapter.request_device_sync(required_limits={name: limits[name] for name in LIMITS})
        self.largest_buffer = min(limits["max-buffer-size"], limits["max-storage-buffer-binding-size"])
        self.model = DeviceModel(
            "webgpu",
            BROWSER.dtypes,
            narrows=True,
            largest_group=limits["max-compute-invocations-per-workgroup"],
            shared_bytes=limits["max-compute-workgroup-storage-size"],
            buffers=limits["max-storage-buffers-per-shader-stage"],
        )
        self.encoder: Any = None
        self.compute: Any = None
        self.pending = 0

    def reserve(self, size: int) -> Any:
        with self.guarded("allocate memory"):
            return self.device.create_buffer(size=size, usage=USAGE)

    def write(self, buffer: Buffer, data: Array) -> None:
        self.submit()
        with self.guarded("write to memory"):
            self.device.queue.write_buffer(buffer.handle, 0, data)

    def read(self, buffer: Buffer, data: Array) -> None:
        self.submit()
        with self.guarded("read from memory"):
            data.reshape(-1)[:] = np.frombuffer(
                self.device.queue.read_buffer(buffer.handle, 0, data.nbytes), data.dtype
            )

    def copy(self, source: Buffer, source_start: int, target: Buffer, target_start: int, size: int) -> None:
        with self.guarded("copy memory"):
            self.encode(computes=False)
            self.encoder.copy_buffer_to_buffer(source.handle, source_start, target.handle, target_start, size)

    def build(self, launches: Sequence[Launch]) -> Sequence[Any]:
        return [self.pipeline(launch) for launch in launches]

    def pipeline(self, launch: Launch) -> tuple[Any, Any]:
        try:
            module = self.device.create_shader_module(code=WEBGPU.program(launch.text))
            stage = {"module": module, "entry_point": launch.name}
            pipeline = self.device.create_compute_pipeline(layout="auto", compute=stage)
        except wgpu.GPUError as error:
            raise self.refused(f"the kernel '{launch.name}'", error) from error
        return pipeline, pipeline.get_bind_group_layout(0)

    def launch(self, kernel: Any, launch: Launch, buffers: Sequence[Buffer]) -> None:
        pipeline, layout = kernel
        entries = [
            {"binding": k, "resource": {"buffer": b.handle, "offset": 0, "size": b.handle.size}}
            for k, b in enumerate(buffers)
        ]
        with self.guarded(f"run the kernel '{launch.name}'"):
            self.encode(computes=True)
            self.compute.set_pipeline(pipeline)
            self.compute.set_bind_group(0, self.device.create_bind_group(layout=layout, entries=entries))
            self.compute.dispatch_workgroups(*WEBGPU.grid(launch.groups))
        self.pending += 1
        if self.pending == PENDING:
            self.submit()

    def encode(self, computes: bool) -> None:
        """Open an encoder, and in it a pass of launches or none."""
        if self.encoder is None:
            self.encoder = self.device.create_command_encoder()
        if computes and self.compute is None:
            self.compute = self.encoder.begin_compute_pass()
        elif not computes and self.compute is not None:
            self.compute.end()
            self.compute = None

    def submit(self) -> None:
        """Start everything that was encoded."""
        if self.encoder is not None:
            with self.guarded("run kernels"):
                self.encode(computes=False)
                commands, self.encoder, self.pending = self.encoder.finish(), None, 0
                self.device.queue.submit([commands])

    def finish(self) -> None:
        self.submit()
        with self.guarded("finish"):
            self.device.queue.on_submitted_work_done_sync()

    @contextmanager
    def guarded(self, action: str) -> Iterator[None]:
        try:
            yield
        except (wgpu.GPUError, RuntimeError) as error:
            raise self.failed(action, error) from error
