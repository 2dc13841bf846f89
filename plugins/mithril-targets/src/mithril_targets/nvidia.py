"""NVIDIA GPUs: dense rates of the data sheets, with tensor cores where a dtype uses them."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from pathlib import Path

from mithril import Found, HardwareTarget
from mithril_targets.system_info import read, run_command

GIB = 1 << 30
DTYPES = ("bfloat16", "float16", "float32", "int8", "float64", "int32", "int64", "uint32", "bool")


def _gpu(
    name: str,
    *aliases: str,
    capability: float,
    half: float,
    single: float,
    double: float,
    int8: float,
    tf32: float,
    bandwidth: float,
    memory: float,
    link: float,
    summary: str,
) -> HardwareTarget:
    return HardwareTarget(
        name=name,
        family="nvidia",
        aliases=aliases,
        peak_flops={"bfloat16": half, "float16": half, "float32": single, "float64": double, "int8": int8},
        bandwidth=bandwidth,
        memory=int(memory),
        dtypes=DTYPES,
        costs={
            "capability": capability,
            "interconnect": link,
            "hop": 3e-6,
            "launch": 4e-6,
            "efficiency": 0.65,
            "usable_memory": memory * 0.97,  # the fraction that driver and context use
            "devices_per_chip": 1.0,
            "tf32": tf32,
        },
        summary=summary,
    )


TARGETS = (
    _gpu(
        "nvidia_a100",
        "a100",
        "nvidia_a100_80gb",
        capability=8.0,
        half=312e12,
        single=19.5e12,
        double=9.7e12,
        int8=624e12,
        tf32=156e12,
        bandwidth=2.039e12,
        memory=80 * GIB,
        link=300e9,
        summary="A100 SXM, 80 GB",
    ),
    _gpu(
        "nvidia_a100_40gb",
        "a100_40gb",
        capability=8.0,
        half=312e12,
        single=19.5e12,
        double=9.7e12,
        int8=624e12,
        tf32=156e12,
        bandwidth=1.555e12,
        memory=40 * GIB,
        link=300e9,
        summary="A100 SXM, 40 GB",
    ),
    _gpu(
        "nvidia_h100",
        "h100",
        capability=9.0,
        half=989e12,
        single=67e12,
        double=34e12,
        int8=1979e12,
        tf32=494e12,
        bandwidth=3.35e12,
        memory=80 * GIB,
        link=450e9,
        summary="H100 SXM, 80 GB",
    ),
    _gpu(
        "nvidia_h100_pcie",
        "h100_pcie",
        capability=9.0,
        half=756e12,
        single=51e12,
        double=26e12,
        int8=1513e12,
        tf32=378e12,
        bandwidth=2.0e12,
        memory=80 * GIB,
        link=300e9,
        summary="H100 PCIe, 80 GB",
    ),
    _gpu(
        "nvidia_h200",
        "h200",
        capability=9.0,
        half=989e12,
        single=67e12,
        double=34e12,
        int8=1979e12,
        tf32=494e12,
        bandwidth=4.8e12,
        memory=141e9,
        link=450e9,
        summary="H200 SXM, 141 GB",
    ),
    _gpu(
        "nvidia_b200",
        "b200",
        capability=10.0,
        half=2250e12,
        single=75e12,
        double=37e12,
        int8=4500e12,
        tf32=1100e12,
        bandwidth=7.7e12,
        memory=180e9,
        link=900e9,
        summary="B200 of an HGX board, 180 GB",
    ),
    _gpu(
        "nvidia_rtx4090",
        "rtx4090",
        capability=8.9,
        half=165.2e12,
        single=82.6e12,
        double=1.29e12,
        int8=660.6e12,
        tf32=82.6e12,
        bandwidth=1.008e12,
        memory=24 * GIB,
        link=32e9,  # PCIe 4
        summary="GeForce RTX 4090, 24 GB",
    ),
)

# Names reported by the driver, most specific first.
_NAMES = (
    (r"A100.*40GB", "nvidia_a100_40gb"),
    (r"A100", "nvidia_a100"),
    (r"H100.*PCIe", "nvidia_h100_pcie"),
    (r"H100", "nvidia_h100"),
    (r"H200", "nvidia_h200"),
    (r"B200", "nvidia_b200"),
    (r"RTX 4090$", "nvidia_rtx4090"),
)


def target_of(model: str) -> str | None:
    """Return the target of a GPU by the name that the driver reports, or None if it is not listed."""
    return next((name for pattern, name in _NAMES if re.search(pattern, model)), None)


def detect() -> list[Found]:
    """Return the GPUs that the driver lists."""
    models = _models()
    counted = Counter(target_of(model) for model in models)
    return [
        Found(name, 100, f"{count} x {next(m for m in models if target_of(m) == name)}")
        for name, count in counted.items()
        if name is not None
    ]


@cache
def _models() -> tuple[str, ...]:
    targets = []
    for information in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        match = re.search(r"^Model:\s*(.+)$", read(information) or "", re.MULTILINE)
        if match:
            targets.append(match.group(1).strip())
    # Containers may hide the driver's files, but not its devices.
    if not targets and Path("/dev/nvidiactl").exists():
        listed = run_command("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
        targets = listed.splitlines() if listed else []
    return tuple(targets)
