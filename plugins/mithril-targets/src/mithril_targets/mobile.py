"""Mobile devices: the large cores of their CPUs, by instruction set.

"arm64" has no single vendor: the figures are those of a mid-range phone (four large cores, LPDDR4X), derived below from
cores, clock and the width of the vector units.
"""

from __future__ import annotations

import os
import platform
import sys

from mithril import Found, HardwareTarget

GIB = 1 << 30


def _phone(
    name: str,
    *aliases: str,
    cores: int,
    clock: float,
    single: int,
    half: int,
    int8: int,
    bandwidth: float,
    memory: int,
    summary: str,
) -> HardwareTarget:
    """Return a target; ``single``, ``half`` and ``int8`` are operations per clock and core, a multiply-add counts as
    two.
    """
    rates = {"float32": single, "float16": half, "int8": int8}
    return HardwareTarget(
        name=name,
        family="mobile",
        aliases=aliases,
        peak_flops={dtype: cores * clock * n for dtype, n in rates.items() if n},
        bandwidth=bandwidth,
        memory=memory,
        dtypes=("float32", "int8", *(("float16",) if half else ()), "int32", "int64", "uint8", "bool"),
        costs={
            "launch": 1e-7,
            "efficiency": 0.6,
            "usable_memory": memory
            * 0.5,  # the fraction that Android grants to one application before it closes others
            "devices_per_chip": 1.0,
        },
        summary=summary,
    )


TARGETS = (
    _phone(
        "mobile_arm64",
        "mobile",
        "arm64-v8a",
        "android_arm64",
        cores=4,
        clock=2.4e9,
        single=2 * 4 * 2,  # two vector units of 128 bits
        half=2 * 8 * 2,  # ARMv8.2 FP16
        int8=2 * 16 * 2,  # SDOT
        bandwidth=25.6e9,
        memory=6 * GIB,
        summary="ARMv8.2 phone: four large cores at 2.4 GHz",
    ),
    _phone(
        "mobile_armv7",
        "armeabi-v7a",
        "android_armv7",
        cores=4,
        clock=1.5e9,
        single=4 * 2 // 2,  # NEON of 64 bits per clock
        half=0,  # only conversions
        int8=8 * 2 // 2,
        bandwidth=6.4e9,
        memory=2 * GIB,
        summary="ARMv7 phone with NEON: four cores at 1.5 GHz",
    ),
    _phone(
        "mobile_x86_64",
        "mobile_x86",
        "android_x86_64",
        cores=4,
        clock=1.8e9,
        single=4 * 2,  # SSE4.2, required by Android's x86-64: one product and one sum of four
        half=0,
        int8=16 * 2,
        bandwidth=17e9,
        memory=4 * GIB,
        summary="x86-64 tablet or emulator with SSE4.2",
    ),
)


def detect() -> list[Found]:
    """Whether this is an Android system."""
    if sys.platform != "android" and "ANDROID_ROOT" not in os.environ:
        return []
    name = {"aarch64": "mobile_arm64", "x86_64": "mobile_x86_64"}.get(platform.machine(), "mobile_armv7")
    return [Found(name, 20, f"Android on {platform.machine()}")]
