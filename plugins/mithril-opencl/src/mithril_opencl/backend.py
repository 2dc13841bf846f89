"""``ml.OpenCLBackend``: programs of kernels in OpenCL C."""

from __future__ import annotations

from collections.abc import Mapping

from mithril_cbackend.devices.backend import DeviceBackend
from mithril_cbackend.devices.host import Host


class OpenCLBackend(DeviceBackend):
    """Backend of the devices that OpenCL drivers list; ``device="gpu:1"`` is the second of them."""

    name = "opencl"

    @classmethod
    def open(cls, number: int) -> Host:
        from mithril_opencl.host import OpenCLHost

        return OpenCLHost(number)

    @classmethod
    def diagnose(cls) -> Mapping[str, str]:
        """Return the rows that ``mithril doctor`` prints."""
        from mithril_opencl.host import devices, label

        listed = devices()
        return {f"device {k}": label(d) for k, d in enumerate(listed)} or {"devices": "none: no driver is installed"}
