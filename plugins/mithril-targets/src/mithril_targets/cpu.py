"""The CPU of this machine: cores, clock, vector width and memory, as reported by the operating system.

Rates are cores x clock x operations per clock, the figure that vendors also publish. Limits of containers apply.
"""

from __future__ import annotations

import os
import platform
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from mithril import Found, HardwareTarget, MemoryLevel
from mithril_targets.system_info import read, read_int, run_command

GHZ = 1e9
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
# Operations in float32 per clock and core: vector units x lanes x 2, since one instruction multiplies and adds.
_PER_CLOCK = (("avx512f", 2 * 16 * 2), ("avx2", 2 * 8 * 2), ("avx", 8 * 2), ("asimd", 2 * 4 * 2), ("neon", 2 * 4 * 2))
_BARE = 4 * 2  # SSE2: one product and one sum of four


@dataclass(frozen=True, slots=True)
class Processor:
    """Detected facts about the CPU."""

    model: str
    cores: int
    clock: float  # per second
    flags: frozenset[str]
    memory: int | None

    @property
    def per_clock(self) -> int:
        return next((n for flag, n in _PER_CLOCK if flag in self.flags), _BARE)


@cache
def processor() -> Processor:
    """Return the CPU of this machine."""
    if platform.system() == "Darwin":
        return _darwin()
    text = read("/proc/cpuinfo") or ""
    model = _field(text, "model name") or _field(text, "Processor") or platform.processor() or platform.machine()
    flags = frozenset((_field(text, "flags") or _field(text, "Features") or "").split())
    return Processor(model, _cores(), _clock(text), flags, _memory())


def _darwin() -> Processor:
    number = run_command("sysctl", "-n", "hw.memsize")
    flags = frozenset(
        (run_command("sysctl", "-n", "machdep.cpu.features", "machdep.cpu.leaf7_features") or "").lower().split()
    )
    arm = platform.machine() == "arm64"
    return Processor(
        run_command("sysctl", "-n", "machdep.cpu.brand_string") or platform.machine(),
        os.cpu_count() or 1,
        3.2 * GHZ if arm else float(run_command("sysctl", "-n", "hw.cpufrequency_max") or 2.5 * GHZ),
        frozenset({"asimd"}) if arm else frozenset("avx512f" if f == "avx512f" else f.split(".")[0] for f in flags),
        int(number) if number and number.isdigit() else None,
    )


def _field(text: str, name: str) -> str | None:
    match = re.search(rf"^{re.escape(name)}\s*:\s*(.+)$", text, re.MULTILINE)
    return match.group(1).strip() if match else None


def _cores() -> int:
    """Return the cores available to this process: the smaller of its affinity mask and its container's quota."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = (read("/sys/fs/cgroup/cpu.max") or "max").split()
    if len(quota) == 2 and quota[0].isdigit():
        allowed = min(allowed, max(1, round(int(quota[0]) / int(quota[1]))))
    return allowed


def _clock(cpuinfo: str) -> float:
    """Return the highest sustained frequency: the driver's, the current one, or a default for an old server."""
    kilohertz = read_int("/sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq")
    if kilohertz:
        return kilohertz * 1e3
    megahertz = _field(cpuinfo, "cpu MHz")
    return float(megahertz) * 1e6 if megahertz else 2.0 * GHZ


def _memory() -> int | None:
    """Return the bytes of main memory, or the limit of the container."""
    limits = []
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        limit = read_int(path)
        if limit:
            limits.append(limit)
    return min(limits, default=None)


def levels() -> tuple[MemoryLevel, ...]:
    """Return the caches of data that a core does not share, as Linux reports them."""
    caches = []
    for folder in sorted(CACHES.glob("index*")):
        level, kind, size = (read(folder / name) or "" for name in ("level", "type", "size"))
        match = re.fullmatch(r"(\d+)([KM])", size)
        if match and level in ("1", "2") and kind != "Instruction":
            caches.append(MemoryLevel(f"L{level}", int(match[1]) << {"K": 10, "M": 20}[match[2]]))
    return tuple(caches)


@cache
def target() -> HardwareTarget:
    """Return the target ``cpu``."""
    seen = processor()
    single = seen.cores * seen.clock * seen.per_clock
    bfloat16 = "avx512_bf16" in seen.flags or "amx_bf16" in seen.flags or "bf16" in seen.flags
    int8 = bool({"avx512_vnni", "avx_vnni", "amx_int8", "asimddp"} & seen.flags)
    rates = {"float32": single, "float64": single / 2}
    if bfloat16:
        rates["bfloat16"] = single * 2
    if int8:
        rates["int8"] = single * 4
    return HardwareTarget(
        name="cpu",
        family="cpu",
        aliases=("host",),
        peak_flops=rates,
        # Not reported by the system. One core reaches about 12 GB/s; sockets are limited by their channels.
        bandwidth=min(12e9 * seen.cores, 300e9),
        memory=seen.memory,
        dtypes=(
            "float32",
            "float64",
            *(("bfloat16",) if bfloat16 else ()),
            "int8",
            "int16",
            "int32",
            "int64",
            "uint8",
            "uint32",
            "bool",
        ),
        costs={
            "launch": 1e-7,
            "efficiency": 0.7,
            "devices_per_chip": 1.0,
            "cores": float(seen.cores),
            "clock": seen.clock,
            # Devices simulated on one CPU exchange data through its memory.
            "interconnect": 5e9,
            "hop": 2e-5,
        },
        levels=levels(),
        summary=f"{seen.model}, {seen.cores} cores at {seen.clock / GHZ:.2g} GHz",
    )


def detect() -> list[Found]:
    """Return the CPU, which is always present."""
    return [Found("cpu", 10, target().summary)]
