"""CPU features, vector width, cache size and thread count of this machine, without TVM."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
from functools import cache
from pathlib import Path


def processors() -> int:
    """Return the number of threads this process may use: from the environment, else the CPUs it may run on."""
    for name in ("TVM_NUM_THREADS", "OMP_NUM_THREADS"):
        if os.environ.get(name, "").isdigit():
            return max(1, int(os.environ[name]))
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache
def features() -> frozenset[str]:
    """Return the CPU flags that Linux lists; empty on other systems."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    rows = [line.partition(":")[2].split() for line in lines if line.lower().startswith(("flags", "features"))]
    return frozenset(rows[0]) if rows else frozenset()


@cache
def vector_bytes() -> int:
    """Return the width of the CPU's vectors."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return 16
    if not features():
        return 32
    return 64 if "avx512f" in features() else 32 if "avx2" in features() else 16


@cache
def l2_bytes() -> int:
    """Return the size of the L2 cache; 512 KiB if the system does not report it."""
    folder = Path("/sys/devices/system/cpu/cpu0/cache")
    try:
        entries = [x for x in sorted(folder.glob("index*")) if (x / "level").read_text().strip() == "2"]
        text = (entries[0] / "size").read_text().strip() if entries else ""
    except OSError:
        return 1 << 19
    unit = {"K": 1 << 10, "M": 1 << 20}.get(text[-1:], 0)
    return int(text[:-1]) * unit if unit and text[:-1].isdigit() else 1 << 19


@cache
def enable_tiles() -> bool:
    """Ask Linux for the registers of matrix instructions (AMX), and return whether this process may use them."""
    if platform.machine() != "x86_64" or "amx_tile" not in features():
        return False
    # System call and constants of Linux 5.16 and later; without the permission the first AMX
    # instruction ends the process.
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    return int(ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data)) == 0


@cache
def fingerprint() -> str:
    """Return a key that is equal for CPUs that can run each other's machine code."""
    words = " ".join(sorted(features())) or platform.processor()
    return f"{platform.machine()} {hashlib.sha256(words.encode()).hexdigest()[:16]}"
