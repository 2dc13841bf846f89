"""Apple silicon: the GPU that MLX and MPS compute on, and the unified memory of the chip."""

from __future__ import annotations

import platform
import re
from functools import cache

from mithril import Found, HardwareTarget
from mithril_targets.system_info import run_command

GB = 10**9
# chip: operations per second of the largest GPU of that chip in float32, bytes per second, largest memory.
# Up to the M2 as published by Apple; from the M3 on cores x 128 lanes x 2 x clock.
_CHIPS = {
    "m1": (2.6e12, 68.25 * GB, 16 * GB),
    "m1_pro": (5.2e12, 200 * GB, 32 * GB),
    "m1_max": (10.4e12, 400 * GB, 64 * GB),
    "m1_ultra": (21e12, 800 * GB, 128 * GB),
    "m2": (3.6e12, 100 * GB, 24 * GB),
    "m2_pro": (6.8e12, 200 * GB, 32 * GB),
    "m2_max": (13.6e12, 400 * GB, 96 * GB),
    "m2_ultra": (27.2e12, 800 * GB, 192 * GB),
    "m3": (10 * 256 * 1.38e9, 100 * GB, 24 * GB),
    "m3_pro": (18 * 256 * 1.38e9, 150 * GB, 36 * GB),
    "m3_max": (40 * 256 * 1.38e9, 400 * GB, 128 * GB),
    "m3_ultra": (80 * 256 * 1.38e9, 819 * GB, 512 * GB),
    "m4": (10 * 256 * 1.58e9, 120 * GB, 32 * GB),
    "m4_pro": (20 * 256 * 1.58e9, 273 * GB, 64 * GB),
    "m4_max": (40 * 256 * 1.58e9, 546 * GB, 128 * GB),
}
DEFAULT = "m2"  # the chip that "apple" selects on other machines


@cache
def _chip_name() -> str | None:
    """Return the name of this machine's chip, such as ``m1_pro``, or None."""
    if platform.system() != "Darwin" or platform.machine() != "arm64":
        return None
    match = re.fullmatch(
        r"Apple (M\d+)(?: (Pro|Max|Ultra))?", run_command("sysctl", "-n", "machdep.cpu.brand_string") or ""
    )
    if match is None:
        return None
    chip = "_".join(part.lower() for part in match.groups() if part)
    return chip if chip in _CHIPS else None


def _target(chip: str) -> HardwareTarget:
    rate, bandwidth, memory = _CHIPS[chip]
    return HardwareTarget(
        name=f"apple_{chip}",
        family="apple",
        aliases=(chip, *(("apple",) if chip == (_chip_name() or DEFAULT) else ())),
        peak_flops={"float32": rate, "float16": rate, "bfloat16": rate},  # one lane per number of any width
        bandwidth=bandwidth,
        memory=int(memory),
        dtypes=("float16", "bfloat16", "float32", "int8", "int32", "int64", "uint32", "bool"),
        costs={
            "launch": 5e-6,
            "efficiency": 0.75,
            "usable_memory": memory * 0.75,  # Metal's recommended working set
            "devices_per_chip": 1.0,
        },
        summary=f"GPU of an Apple {chip.replace('_', ' ').upper()}, its largest configuration",
    )


TARGETS = tuple(_target(chip) for chip in _CHIPS)


def detect() -> list[Found]:
    """Detect the chip of this machine."""
    chip = _chip_name()
    return [Found(f"apple_{chip}", 50, f"this is an Apple {chip.replace('_', ' ').upper()}")] if chip else []
