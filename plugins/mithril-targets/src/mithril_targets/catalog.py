"""The hardware that ``target_hardware=`` may name, one file per kind, and what of it this machine has.

Rates are the vendors' figures for dense arithmetic of one *device*, as a framework counts devices (half a chip on TPU
v2, v3 and v7x). Where a vendor states nothing, the figure is derived, and the line that derives it says how.

Words in ``costs``, all optional:

====================  ===============================================================================================
``interconnect``      bytes per second that one device sends to its neighbours, all links together
``hop``               seconds that the first byte takes to a neighbour
``launch``            seconds that starting one fused kernel costs
``efficiency``        part of the peak rate that large matrix products reach
``usable_memory``     bytes that programs may use: ``memory`` less what the system keeps
``devices_per_chip``  devices that share a chip
``tf32``              operations per second with float32 operands rounded to TensorFloat-32
====================  ===============================================================================================
"""

from __future__ import annotations

from mithril import Found, HardwareTarget
from mithril_targets import apple, cpu, mobile, nvidia, tpu


def all_targets() -> list[HardwareTarget]:
    """Every target, this machine's own processor among them."""
    return [cpu.target(), *tpu.targets(), *nvidia.TARGETS, *apple.TARGETS, *mobile.TARGETS]


def detected() -> list[Found]:
    """What this machine has: accelerators rank above the processor, which is always there."""
    return [*tpu.detect(), *nvidia.detect(), *apple.detect(), *mobile.detect(), *cpu.detect()]
