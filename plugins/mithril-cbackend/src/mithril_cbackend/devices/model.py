"""Capabilities of a device, and the machine for whose loops kernels are generated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from mithril.graph import ALL, DType
from mithril_cbackend import tir as t
from mithril_cbackend.lowering.element.kernel import Template
from mithril_cbackend.lowering.element.kernel_builder import Machine


@dataclass(frozen=True)
class DeviceModel:
    """Capabilities of a device.

    Its levels are launches, workgroups whose threads share memory, and threads; kernels have no vectors.
    """

    text: str  # the language of its kernels, as TVM names the target
    dtypes: frozenset[DType] = frozenset(ALL)
    narrows: bool = False  # whether elements of 8 and 16 bits are stored in 32
    group: int = 64  # threads of a workgroup
    largest_group: int = 256
    shared_bytes: int = 16 << 10  # memory of a workgroup
    buffers: int = 128  # arrays that a launch may read and write
    binding: int | None = None  # bytes of the largest array; None: the memory of the device

    def storage(self, dtype: DType) -> str:
        """Return the dtype of an element in the memory of the device: bits of 16-bit floats, bools as bytes."""
        name = {"bool": "uint8", "float16": "uint16", "bfloat16": "uint16"}.get(dtype.name, dtype.name)
        if not self.narrows:
            return name
        return {"int8": "int32", "int16": "int32", "uint8": "uint32", "uint16": "uint32"}.get(name, name)


# The default limits of WebGPU, which every browser grants.
BROWSER = DeviceModel(
    "webgpu",
    frozenset(d for d in ALL if d.bits < 64),
    narrows=True,
    largest_group=256,
    shared_bytes=16 << 10,
    buffers=8,
    binding=128 << 20,
)


@dataclass(frozen=True)
class DeviceMachine(Machine):
    """A device: each iteration of a parallel loop is a thread."""

    cpu: str = "device"
    threads: int = 1
    vector_bytes: int = 4
    model: DeviceModel = field(default_factory=lambda: DeviceModel("opencl"))

    launches: ClassVar[bool] = True
    templates: ClassVar[Mapping[Template, Template]] = {}

    @property
    def buffers(self) -> int:
        return self.model.buffers

    def parallel(self, work: int) -> Any:
        return t.PARALLEL

    def kinds(self, extents: Sequence[int], work: int) -> dict[int, Any]:
        return dict.fromkeys(range(len(extents)), t.PARALLEL)
