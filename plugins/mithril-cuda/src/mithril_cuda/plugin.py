"""Plugin of mithril-cuda; importing this module imports no framework."""

from __future__ import annotations

from collections.abc import Sequence

from mithril import BackendSpec, DeviceSpec, FileFormat, hookimpl


@hookimpl
def mithril_backends() -> Sequence[BackendSpec]:
    """Return the CUDA backend."""
    return [
        BackendSpec(
            name="cuda",
            class_name="CUDABackend",
            loads="mithril_cuda.backend:CUDABackend",
            requires=("tvm",),
            summary="kernels of the C backend as CUDA, on NVIDIA GPUs",
        )
    ]


@hookimpl
def mithril_devices() -> Sequence[DeviceSpec]:
    """Return the device ``ml.CBackend(device="cuda")``."""
    return [DeviceSpec("cuda", "mithril_cuda.backend:CUDABackend", summary="NVIDIA GPUs")]


@hookimpl
def mithril_formats() -> Sequence[FileFormat]:
    """Return the format of ``compiled.export("model.ptx", format="ptx")``."""
    return [
        FileFormat(
            "ptx",
            suffixes=(".ptx",),
            saves="mithril_cuda.export:export",
            summary="the kernels of a program for an NVIDIA GPU, as its assembly",
            backends=("cuda",),
        )
    ]
