"""Plugin of mithril-opencl; importing this module imports no framework."""

from __future__ import annotations

from collections.abc import Sequence

from mithril import BackendSpec, DeviceSpec, hookimpl


@hookimpl
def mithril_backends() -> Sequence[BackendSpec]:
    """Return the OpenCL backend."""
    return [
        BackendSpec(
            name="opencl",
            class_name="OpenCLBackend",
            loads="mithril_opencl.backend:OpenCLBackend",
            requires=("tvm", "pyopencl"),
            summary="kernels of the C backend as OpenCL, on GPUs and other devices with a driver",
        )
    ]


@hookimpl
def mithril_devices() -> Sequence[DeviceSpec]:
    """Return the device ``ml.CBackend(device="opencl")``."""
    return [DeviceSpec("opencl", "mithril_opencl.backend:OpenCLBackend", summary="devices of OpenCL drivers")]
