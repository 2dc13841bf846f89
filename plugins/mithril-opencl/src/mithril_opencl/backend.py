"""``ml.OpenCLBackend``: programs of kernels in OpenCL C."""

from __future__ import annotations

from mithril_cbackend.devices.backend import DeviceBackend
from mithril_cbackend.devices.host import Host


class OpenCLBackend(DeviceBackend):
    """Backend of the devices that OpenCL drivers list; ``device="gpu:1"`` is the second of them."""

    name = "opencl"

    @classmethod
    def host_type(cls) -> type[Host]:
        from mithril_opencl.host import OpenCLHost

        return OpenCLHost
