"""``ml.WebGPUBackend``: programs of kernels in WGSL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from mithril.graph import ALL, DType
from mithril_cbackend.devices.backend import DeviceBackend
from mithril_cbackend.devices.host import Host


class WebGPUBackend(DeviceBackend):
    """Backend of the devices that wgpu lists; ``device="gpu:1"`` is the second of them."""

    name = "webgpu"
    dtypes: ClassVar[frozenset[DType]] = frozenset(d for d in ALL if d.bits < 64)  # WGSL has no others

    @classmethod
    def open(cls, number: int) -> Host:
        from mithril_webgpu.host import WebGPUHost

        return WebGPUHost(number, cls.dtypes)

    @classmethod
    def diagnose(cls) -> Mapping[str, str]:
        """Return the rows that ``mithril doctor`` prints."""
        from mithril_webgpu.host import adapters

        listed = adapters()
        return {f"device {k}": a.summary for k, a in enumerate(listed)} or {"devices": "none: no driver is installed"}
