"""Descriptions of NVIDIA GPUs for XLA's compiler, which requires neither a driver nor the toolkit.

The figures are from NVIDIA's data sheets; compute capabilities are those of the targets.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from mithril.graph import BackendError
from mithril.plugins import HardwareTarget

KIB = 1 << 10
MIB = 1 << 20
PLUGINS = ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13")


@dataclass(frozen=True, slots=True)
class Chip:
    """The properties of a GPU's multiprocessors that the compiler requires, and their number."""

    processors: int
    lanes: int  # float32 units per multiprocessor
    clock: float  # GHz
    l2: int  # bytes
    shared: int  # bytes of shared memory per multiprocessor; a block can use 1 KiB less
    label: str


def _ampere(label: str) -> Chip:
    return Chip(108, 64, 1.41, 40 * MIB, 164 * KIB, label)


def _hopper(label: str, processors: int, clock: float) -> Chip:
    return Chip(processors, 128, clock, 50 * MIB, 228 * KIB, label)


CHIPS = {
    "nvidia_a100": _ampere("NVIDIA A100-SXM4-80GB"),
    "nvidia_a100_40gb": _ampere("NVIDIA A100-SXM4-40GB"),
    "nvidia_h100": _hopper("NVIDIA H100 80GB HBM3", 132, 1.98),
    "nvidia_h100_pcie": _hopper("NVIDIA H100 PCIe", 114, 1.755),
    "nvidia_h200": _hopper("NVIDIA H200", 132, 1.98),
    "nvidia_b200": Chip(148, 128, 1.965, 126 * MIB, 228 * KIB, "NVIDIA B200"),
    "nvidia_rtx4090": Chip(128, 128, 2.52, 72 * MIB, 100 * KIB, "NVIDIA GeForce RTX 4090"),
}


def described_gpus(target: HardwareTarget, count: int) -> list[Any]:
    """Return ``count`` device descriptions of GPUs of one machine, for compilation only."""
    chip = CHIPS.get(target.name)
    if chip is None:
        raise BackendError(
            f"cannot compile for '{target.name}' ahead of time",
            facts=["supported GPUs: " + ", ".join(CHIPS)],
        )
    if not has_compiler():
        raise BackendError(
            "compiling for a GPU that is not on this machine requires XLA's compiler for GPUs",
            facts=["the package 'jax-cuda12-pjrt' is not installed"],
            hint=f"pip install --no-deps jax-cuda12-pjrt=={version('jaxlib')}",
        )
    from jax.experimental import topologies

    try:
        described = topologies.get_topology_desc(
            target.name, platform="cuda", target_config=description(chip, target), topology=f"1x1x{count}"
        )
    except NotImplementedError as error:  # the plugin looks for a driver when JAX starts
        raise BackendError(
            "XLA's plugin for CUDA is installed, but JAX did not load it",
            facts=[str(error)],
            hint="set JAX_PLATFORMS=cpu or JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 before Python starts",
        ) from error
    return list(described.devices)


def has_compiler() -> bool:
    """Whether XLA's plugin for CUDA is installed."""
    try:
        return any(importlib.util.find_spec(name) is not None for name in PLUGINS)
    except ModuleNotFoundError:  # no package jax_plugins at all
        return False


def description(chip: Chip, target: HardwareTarget) -> str:
    """Return XLA's GpuTargetConfigProto as text."""
    device = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_block": 48 * KIB,
        "shared_memory_per_block_optin": chip.shared - KIB,
        "shared_memory_per_core": chip.shared,
        "threads_per_core_limit": 2048,
        "core_count": chip.processors,
        "fpus_per_core": chip.lanes,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 2**16 - 1,
        "block_dim_limit_z": 2**16 - 1,
        "thread_dim_limit_x": 1024,
        "thread_dim_limit_y": 1024,
        "thread_dim_limit_z": 64,
        "memory_bandwidth": int(target.bandwidth or 0),
        "l2_cache_size": chip.l2,
        "clock_rate_ghz": chip.clock,
        "device_memory_size": target.memory,
        "registers_per_core_limit": 1 << 16,
        "registers_per_block_limit": 1 << 16,
    }
    major, minor = divmod(round(10 * target.costs["capability"]), 10)
    lines = [
        "gpu_device_info {",
        *(f"  {key}: {value}" for key, value in device.items()),
        f"  cuda_compute_capability {{ major: {major} minor: {minor} }}",
        f'  name: "{chip.label}"',
        "}",
        'platform_name: "CUDA"',
        "dnn_version_info { major: 9 minor: 10 patch: 0 }",
        f'device_description_str: "{chip.label}"',
    ]
    return "\n".join(lines) + "\n"
