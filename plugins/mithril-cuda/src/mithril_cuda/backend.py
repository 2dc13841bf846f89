"""``ml.CUDABackend``: programs of kernels in CUDA C++."""

from __future__ import annotations

from dataclasses import replace

from mithril.backend import BuildOptions, Capabilities
from mithril_cbackend.devices.backend import DeviceBackend
from mithril_cbackend.devices.host import Host


class CUDABackend(DeviceBackend):
    """Backend of NVIDIA GPUs; ``device="gpu:1"`` is the second that the driver lists.

    ``target_hardware="nvidia_a100"`` compiles for a GPU that need not be present.
    """

    name = "cuda"

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, families=("gpu", "nvidia"))

    @classmethod
    def host_type(cls) -> type[Host]:
        from mithril_cuda.host import CUDAHost

        return CUDAHost

    def host_of(self, options: BuildOptions) -> Host:
        from mithril_cuda.absent import AbsentHost
        from mithril_cuda.host import CUDAHost, capability

        if options.target is None:
            return self.host
        absent = AbsentHost(options.target)
        present = CUDAHost.devices()
        number = self.number
        is_present = number < len(present) and capability(present[number]) == absent.capability
        return self.host if is_present else absent
