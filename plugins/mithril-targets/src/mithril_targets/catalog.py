"""The targets of ``target_hardware=``, one file per kind, and detection of those of this machine.

Rates are the vendors' figures for dense arithmetic of one *device*, as a framework counts devices (half a chip on TPU
v2, v3 and v7x). Where a vendor states nothing, the figure is derived, and the line that derives it says how.

Words in ``costs``, all optional:

====================  ===============================================================================================
``interconnect``      bytes per second that one device sends to its neighbors, sum of all links
``hop``               seconds that the first byte takes to a neighbor
``launch``            seconds that starting one fused kernel costs
``efficiency``        part of the peak rate that large matrix products reach
``usable_memory``     bytes that programs may use: ``memory`` minus the share of the system
``devices_per_chip``  devices that share a chip
``tf32``              operations per second with float32 operands rounded to TensorFloat-32
====================  ===============================================================================================
"""

from __future__ import annotations

from mithril import Found, HardwareTarget
from mithril_targets import apple, cpu, mobile, nvidia, tpu


def all_targets() -> list[HardwareTarget]:
    """Return every target, including the CPU of this machine."""
    return [cpu.target(), *tpu.targets(), *nvidia.TARGETS, *apple.TARGETS, *mobile.TARGETS]


def detected() -> list[Found]:
    """Detect the targets of this machine; accelerators rank above the CPU, which is always present."""
    return [*tpu.detect(), *nvidia.detect(), *apple.detect(), *mobile.detect(), *cpu.detect()]
