"""A GPU that is described by a target and not present: kernels are compiled for it, and nothing runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mithril.graph import BackendError
from mithril.plugins import HardwareTarget
from mithril_cbackend.devices.host import Array, Buffer, Host
from mithril_cbackend.devices.launches import Launch
from mithril_cbackend.devices.model import DeviceModel
from mithril_cuda import nvrtc
from mithril_cuda.host import GROUP


class AbsentHost(Host):
    """A device whose memory is counted only."""

    kind = "CUDA"

    @classmethod
    def devices(cls) -> Sequence[Any]:
        return ()

    @classmethod
    def title(cls, device: Any) -> str:
        return str(device)

    def __init__(self, target: HardwareTarget) -> None:
        super().__init__()
        if "capability" not in target.costs:
            raise BackendError(
                f"cannot compile for '{target.name}': its compute capability is not known",
                hint="set costs={'capability': 8.0} of the HardwareTarget",
            )
        self.label, self.capability = target.name, round(10 * target.costs["capability"])
        self.memory, self.model = (
            target.memory,
            DeviceModel("cuda", group=GROUP, largest_group=1024, shared_bytes=48 << 10),
        )
        self.largest_buffer = target.memory or 1 << 62

    def reserve(self, size: int) -> None:
        return None

    def write(self, buffer: Buffer, data: Array) -> None:
        pass

    def build(self, launches: Sequence[Launch]) -> Sequence[Any]:
        if launches:
            nvrtc.compiled([launch.text for launch in launches], self.capability)
        return launches

    def copy(self, source: Buffer, source_start: int, target: Buffer, target_start: int, size: int) -> None:
        raise self.absent()

    def read(self, buffer: Buffer, data: Array) -> None:
        raise self.absent()

    def launch(self, kernel: Any, launch: Launch, buffers: Sequence[Buffer]) -> None:
        raise self.absent()

    def finish(self) -> None:
        raise self.absent()

    def absent(self) -> BackendError:
        return BackendError(
            f"the program is compiled for '{self.label}', which is not on this machine",
            hint="omit target_hardware to run it here; compiled.export('model.ptx', format='ptx') writes its kernels",
        )
