"""Plugin of mithril-webgpu; importing this module imports no framework."""

from __future__ import annotations

from collections.abc import Sequence

from mithril import BackendSpec, DeviceSpec, FileFormat, hookimpl


@hookimpl
def mithril_backends() -> Sequence[BackendSpec]:
    """Return the WebGPU backend."""
    return [
        BackendSpec(
            name="webgpu",
            class_name="WebGPUBackend",
            loads="mithril_webgpu.backend:WebGPUBackend",
            requires=("tvm", "wgpu"),
            summary="kernels of the C backend as WGSL, on GPUs by Vulkan, Metal and Direct3D",
        )
    ]


@hookimpl
def mithril_devices() -> Sequence[DeviceSpec]:
    """Return the device ``ml.CBackend(device="webgpu")``."""
    return [DeviceSpec("webgpu", "mithril_webgpu.backend:WebGPUBackend", summary="devices of wgpu")]


@hookimpl
def mithril_formats() -> Sequence[FileFormat]:
    """Return the format of ``compiled.export("folder", format="web")``."""
    return [
        FileFormat(
            "web",
            saves="mithril_webgpu.web.export:export",
            summary="a folder for browsers: WebGPU, WebAssembly, a page that checks both, a package of npm",
            backends=("webgpu", "c"),
        )
    ]
