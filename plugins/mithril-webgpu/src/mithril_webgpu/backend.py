"""``ml.WebGPUBackend``: programs of kernels in WGSL."""

from __future__ import annotations

from typing import ClassVar

from mithril.graph import ALL, DType
from mithril_cbackend.devices.backend import DeviceBackend
from mithril_cbackend.devices.host import Host


class WebGPUBackend(DeviceBackend):
    """Backend of the devices that wgpu lists; ``device="gpu:1"`` is the second of them."""

    name = "webgpu"
    dtypes: ClassVar[frozenset[DType]] = frozenset(d for d in ALL if d.bits < 64)  # WGSL has no others

    @classmethod
    def host_type(cls) -> type[Host]:
        from mithril_webgpu.host import WebGPUHost

        return WebGPUHost
