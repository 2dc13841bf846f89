"""Cloud TPUs, v2 to v7x: figures of Google's documentation, memory as granted by its compiler."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from mithril import Found, HardwareTarget
from mithril_targets.system_info import read

GIB = 1 << 30
# A float32 product at full precision consists of six bfloat16 products on the matrix unit.
FLOAT32_PASSES = 6


@dataclass(frozen=True, slots=True)
class Generation:
    """A TPU version: its figures, and the names of its topologies in the compiler."""

    name: str  # of the target
    topology: str  # its name in libtpu
    axes: int  # of the torus: 2 or 3
    devices_per_chip: int
    bfloat16: float  # operations per second and device
    bandwidth: float  # bytes per second and device
    memory: int  # bytes per device
    usable: float  # GiB that a program may use, from the compiler's own messages
    interconnect: float  # bytes per second and device
    int8: float | None = None
    float8: float | None = None
    aliases: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()  # numbers of the PCI device
    kinds: tuple[str, ...] = ()  # JAX's names of the device
    chip_config: str | None = None  # "megacore": two cores that show as one device


GENERATIONS = (
    Generation(
        name="tpu_v2",
        topology="v2",
        axes=2,
        devices_per_chip=2,
        bfloat16=46e12 / 2,
        bandwidth=700e9 / 2,
        memory=8 * GIB,
        usable=7.48,
        interconnect=62e9,
        aliases=("tpu_v2-8",),
        kinds=("TPU v2",),
    ),
    Generation(
        name="tpu_v3",
        topology="v3",
        axes=2,
        devices_per_chip=2,
        bfloat16=123e12 / 2,
        bandwidth=900e9 / 2,
        memory=16 * GIB,
        usable=15.48,
        interconnect=82e9,
        aliases=("tpu_v3-8",),
        devices=("0x0027",),
        kinds=("TPU v3",),
    ),
    Generation(
        name="tpu_v4",
        topology="v4",
        axes=3,
        devices_per_chip=1,
        bfloat16=275e12,
        bandwidth=1228e9,
        memory=32 * GIB,
        usable=30.75,
        interconnect=300e9,
        int8=275e12,
        devices=("0x005e",),
        kinds=("TPU v4",),
        chip_config="megacore",
    ),
    Generation(
        name="tpu_v5e",
        topology="v5e",
        axes=2,
        devices_per_chip=1,
        bfloat16=197e12,
        bandwidth=819e9,
        memory=16 * GIB,
        usable=15.75,
        interconnect=200e9,
        int8=393e12,
        aliases=("tpu_v5litepod", "tpu_v5lite"),
        devices=("0x0063",),
        kinds=("TPU v5 lite", "TPU v5e"),
    ),
    Generation(
        name="tpu_v5p",
        topology="v5p",
        axes=3,
        devices_per_chip=1,
        bfloat16=459e12,
        bandwidth=2765e9,
        memory=96 * GIB,
        usable=95.73,
        interconnect=600e9,
        int8=918e12,
        aliases=("tpu_v5",),
        devices=("0x0062",),
        kinds=("TPU v5", "TPU v5p"),
    ),
    Generation(
        name="tpu_v6e",
        topology="v6e",
        axes=2,
        devices_per_chip=1,
        bfloat16=918e12,
        bandwidth=1600e9,
        memory=32 * GIB,
        usable=31.24,
        interconnect=400e9,
        int8=1836e12,
        aliases=("tpu_v6", "tpu_trillium"),
        devices=("0x006f",),
        kinds=("TPU v6 lite", "TPU v6e"),
    ),
    Generation(
        name="tpu_v7x",
        topology="tpu7x",
        axes=3,
        devices_per_chip=2,
        bfloat16=2307e12 / 2,
        bandwidth=7380e9 / 2,
        memory=96 * GIB,
        usable=94.74,
        interconnect=1200e9 / 2,
        float8=4614e12 / 2,
        aliases=("tpu7x", "tpu_v7", "tpu_ironwood"),
        devices=("0x0076",),
        kinds=("TPU7x", "TPU v7x"),
    ),
)
DEFAULT = "tpu_v5e"  # the generation that "tpu" selects on other machines


def generation(name: str) -> Generation | None:
    """Return the generation of a target's name, or None if it is not a TPU of this list."""
    return next((g for g in GENERATIONS if g.name == name), None)


def of_device(kind: str) -> Generation | None:
    """Return the generation of a device by JAX's ``device_kind``, or None."""
    return next((g for g in GENERATIONS if kind in g.kinds), None)


def targets() -> list[HardwareTarget]:
    """Return one target per generation; "tpu" is the local one, or v5e."""
    local = next(iter(_chips()), DEFAULT)
    return [_target(g, ("tpu",) if g.name == local else ()) for g in GENERATIONS]


def _target(g: Generation, more: tuple[str, ...]) -> HardwareTarget:
    rates = {"bfloat16": g.bfloat16, "float32": g.bfloat16 / FLOAT32_PASSES}
    if g.int8:
        rates["int8"] = g.int8
    return HardwareTarget(
        name=g.name,
        family="tpu",
        aliases=g.aliases + more,
        peak_flops=rates,
        bandwidth=g.bandwidth,
        memory=g.memory,
        dtypes=("bfloat16", "float32", *(("int8",) if g.int8 else ()), "int32", "uint32", "bool"),
        costs={
            "interconnect": g.interconnect,
            "hop": 1e-6,
            "launch": 1e-6,
            "efficiency": 0.6,
            "usable_memory": g.usable * GIB,
            "devices_per_chip": float(g.devices_per_chip),
        },
        summary=f"Cloud TPU {g.topology}, one {'device' if g.devices_per_chip == 1 else 'half of a chip'}",
    )


def detect() -> list[Found]:
    """Return the TPUs on this machine's PCI bus, or those that its environment announces."""
    return [Found(name, 120, f"{count} chips: {source}") for name, (count, source) in _chips().items()]


@cache
def _chips() -> dict[str, tuple[int, str]]:
    counts: Counter[str] = Counter()
    for vendor in Path("/sys/bus/pci/devices").glob("*/vendor"):
        if read(vendor) == "0x1ae0":
            number = read(vendor.with_name("device"))
            counts.update(g.name for g in GENERATIONS if number in g.devices)
    if counts:
        return {name: (count, "PCI devices of Google") for name, count in counts.items()}
    accelerators = list(Path("/dev").glob("accel*"))
    promised = os.environ.get("TPU_ACCELERATOR_TYPE", "").partition("-")[0]
    generation = next(
        (g for g in GENERATIONS if promised in (g.topology, f"{g.topology.removesuffix('e')}litepod")), None
    )
    if accelerators and generation is not None:
        return {generation.name: (len(accelerators), f"/dev/accel* and TPU_ACCELERATOR_TYPE={promised}")}
    return {}
