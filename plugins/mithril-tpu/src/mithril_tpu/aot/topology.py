"""The devices to compile for: TPUs of this machine, or descriptions of other TPUs."""

from __future__ import annotations

import importlib.util
import os
import re
from math import prod
from typing import Any

import jax

from mithril.graph import BackendError, OptionError
from mithril_targets.tpu import Generation, of_device

# Number of chips -> their arrangement, as the hardware is sold.
_SQUARES = {
    1: "1x1",
    2: "1x2",
    4: "2x2",
    8: "2x4",
    16: "4x4",
    32: "4x8",
    64: "8x8",
    128: "8x16",
    256: "16x16",
}
_CUBES = {
    1: "1x1x1",
    2: "2x1x1",
    4: "2x2x1",
    8: "2x2x2",
    16: "2x2x4",
    32: "2x4x4",
    64: "4x4x4",
    128: "4x4x8",
    256: "4x8x8",
    512: "8x8x8",
}

# Without a TPU, libtpu queries the cloud's metadata server for the machine type, prints warnings to stderr, creates a
# log folder, and can be loaded by only one process of the machine. Compiling for a described topology needs none of it.
_QUIET = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "TPU_LOG_DIR": "disabled",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def dims(generation: Generation, devices: int, topology: str | None = None) -> str:
    """Return the arrangement of the chips of ``devices`` devices: ``"2x4"``."""
    per_chip = generation.devices_per_chip
    if topology is not None:
        if not re.fullmatch(r"\d+x\d+" + r"x\d+" * (generation.axes - 2), topology):
            raise OptionError(
                f"'{topology}' is not a topology of {generation.name}",
                facts=[f"expected: {generation.axes} axes"],
                hint=f"set tpu_options={{'topology': '{(_SQUARES if generation.axes == 2 else _CUBES)[8]}'}}",
            )
        chip_devices = prod(int(n) for n in topology.split("x")) * per_chip
        if chip_devices != devices:
            raise OptionError(
                f"topology '{topology}' of {generation.name} has {chip_devices} devices, not {devices}",
                facts=[f"{per_chip} devices per chip"] if per_chip > 1 else [],
                hint=f"set tpu_replicas={chip_devices}",
            )
        return topology
    table = _SQUARES if generation.axes == 2 else _CUBES
    # One device of a chip with two: the compiler gets the complete chip, the program one half of it.
    chips = -(-devices // per_chip)
    if (devices > 1 and devices % per_chip) or chips not in table:
        sold = [n * per_chip for n in table]
        nearest = min(sold, key=lambda n: (abs(n - devices), n))
        raise OptionError(
            f"{generation.name} is not available with {devices} devices",
            facts=[f"available: {', '.join(map(str, sold))}"],
            hint=f"set tpu_replicas={nearest}, or pass tpu_options={{'topology': ...}}",
        )
    return table[chips]


def local_devices(generation: Generation, count: int) -> list[Any] | None:
    """Return ``count`` TPUs of this machine, which must be of this generation; None if it has no TPU."""
    if jax.default_backend() != "tpu":
        return None
    devices = jax.devices("tpu")
    local_generation = of_device(devices[0].device_kind)
    if local_generation is not None and local_generation.name != generation.name:
        raise BackendError(
            f"target_hardware='{generation.name}' conflicts with the TPUs of this machine",
            facts=[f"found {len(devices)} x {devices[0].device_kind}, which is '{local_generation.name}'"],
            hint=f"set target_hardware='{local_generation.name}'",
        )
    if len(devices) < count:
        raise BackendError(
            f"cannot use {count} TPU devices: this machine has {len(devices)}",
            facts=[f"{devices[0].device_kind}"],
            hint=f"set tpu_replicas={len(devices)}",
        )
    return list(devices[:count])


def described_devices(generation: Generation, count: int, topology: str | None = None) -> list[Any]:
    """Return ``count`` device descriptions of a topology, for libtpu's compiler only."""
    _require_compiler()
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    from jax.experimental import topologies

    layout = dims(generation, count, topology)
    extra = {"chip_config_name": generation.chip_config} if generation.chip_config else {}
    try:
        described = topologies.get_topology_desc(f"{generation.topology}:{layout}", platform="tpu", **extra)
    except Exception as error:
        raise BackendError(
            f"the TPU compiler does not know the topology '{generation.topology}:{layout}'",
            facts=[str(error).splitlines()[0]],
            hint="change the number of devices, or pass tpu_options={'topology': ...}",
        ) from error
    return list(described.devices[:count])


def has_compiler() -> bool:
    """Whether libtpu is installed."""
    return importlib.util.find_spec("libtpu") is not None or "TPU_LIBRARY_PATH" in os.environ


def _require_compiler() -> None:
    if not has_compiler():
        raise BackendError(
            "compiling for a TPU that is not on this machine requires its compiler, libtpu",
            facts=["the package 'libtpu' is not installed"],
            hint="pip install 'mithril-tpu[compiler]'",
        )
