"""The mesh of a program: its shape from the options, its processes and their groups."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from math import gcd, lcm, prod
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from mithril.backend import BuildOptions
from mithril.graph import BackendError, OptionError
from mithril.system import launched_task, shared_attempt
from mithril_torch.parallel.launcher import launch_others
from mithril_torch.parallel.layout import AXES, MeshAxes, check_kinds, kinds_of
from mithril_torch.parallel.schedules import ONE_STAGE, num_stages

_current: list[MeshAxes] = []  # of the program that runs


class MeshBackend(Protocol):
    """The part of ``TorchBackend`` that programs on meshes use."""

    torch_device: torch.device
    device_mesh: tuple[int, ...] | None
    cudnn_benchmark: bool | None
    enable_amp: bool | None

    def array(self, data: Any, /) -> torch.Tensor: ...


def parse_mesh(device_mesh: int | Sequence[int]) -> tuple[int, ...]:
    """Normalize ``device_mesh`` to a (data, model, pipeline) tuple, possibly shortened."""
    sizes = (device_mesh,) if isinstance(device_mesh, int) else tuple(device_mesh)
    if not 1 <= len(sizes) <= len(AXES) or any(not isinstance(n, int) or n < 1 for n in sizes):
        raise OptionError(
            f"device_mesh={device_mesh!r} is not a valid mesh of devices",
            facts=["(4,) splits batches; (2, 4) batches over 2 and weights over 4 devices; (1, 1, 4) layers over 4"],
        )
    return sizes


def launched_world_size() -> int | None:
    """Return the number of processes that ``torchrun`` or another launcher started, or None without a launcher."""
    if dist.is_available() and dist.is_initialized():
        return int(dist.get_world_size())
    task = launched_task()
    return None if task is None else task.size


def mesh_for(backend: MeshBackend, options: BuildOptions) -> tuple[int, ...] | None:
    """Return the mesh selected by the backend and the options together, or None for a single device."""
    settings = options.settings
    mesh, kinds, stages = backend.device_mesh, kinds_of(settings.get("parallelism")), settings.get("pipeline_stages")
    if mesh is None:
        count = launched_world_size() or stages
        if not kinds and stages is None:
            return None
        if count is None:
            names = " and ".join(f"'{kind}'" for kind in sorted(kinds))
            options.decisions.record(
                "ignored", f"parallelism={names} requires the number of devices: TorchBackend(device_mesh=(4,))"
            )
            return None
        mesh = (count,)
    mesh = (*mesh, 1, 1)[:3]
    if "pipeline" in kinds or stages is not None:
        mesh = _with_stages(mesh, stages, settings["pipeline_schedule"])
    check_kinds(kinds, mesh)
    return mesh


def _with_stages(mesh: tuple[int, ...], stages: int | None, schedule: str) -> tuple[int, ...]:
    if mesh[2] == 1 and mesh[1] > 1:
        raise OptionError(
            f"device_mesh={mesh[:2]} does not tell how many of its devices are stages",
            facts=["its second number divides weights, positions or parameters; the third one is that of stages"],
            hint=f"use device_mesh=({mesh[0]}, {mesh[1]}, {stages or 2}), or device_mesh=({prod(mesh)},)",
        )
    if mesh[2] == 1:  # the mesh specifies the number of devices only
        devices = prod(mesh)
        count = stages or devices
        if schedule not in ONE_STAGE:
            count = min(count, devices)
        if devices % count:
            raise OptionError(
                f"{devices} devices cannot be divided into {count} stages",
                hint=f"set pipeline_stages={gcd(devices, count)}, or device_mesh=({lcm(devices, count)},)",
            )
        mesh = (devices // count, 1, count)
    num_stages(schedule, mesh[2], stages)
    return mesh


def require_processes(mesh: tuple[int, ...]) -> None:
    """Start the processes of the mesh unless a launcher has; raise BackendError if their number differs."""
    count = launched_world_size()
    if count is None:
        launch_others(prod(mesh))
    elif count != prod(mesh):
        raise BackendError(
            f"device_mesh={mesh} requires {prod(mesh)} processes, got {count}",
            hint=f"use torchrun --nproc-per-node {prod(mesh)}, or a mesh of {count} devices",
        )


def join_group(device: torch.device) -> None:
    """Create the group of the processes unless the program has done so."""
    if not dist.is_initialized():
        if (task := launched_task()) is not None:
            os.environ.update(task.torch_environment())
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", **_store_of_attempt())


def _store_of_attempt() -> dict[str, Any]:
    """Return the store of this attempt of the job, and the place of this process.

    The store of torchrun's agent (PyTorch 2.13) keeps the addresses of processes that have ended.
    """
    store, rank, size = next(dist.rendezvous("env://"))
    prefixed = dist.PrefixStore("mithril", store)

    def read(key: str) -> str | None:
        return prefixed.get(key).decode() if prefixed.check([key]) else None

    attempt = shared_attempt(rank, size, prefixed.set, read, store.timeout.total_seconds())
    return {"store": dist.PrefixStore(attempt, store), "rank": rank, "world_size": size}


@cache
def axes_of_mesh(shape: tuple[int, ...], device: str, names: tuple[str, ...]) -> MeshAxes:
    """Return the axes of the mesh of all processes, created once because creation is collective."""
    return MeshAxes(init_device_mesh(device, shape, mesh_dim_names=names))


@cache
def all_processes(device: str) -> DeviceMesh:
    """Return the mesh of one axis of all processes, created once because creation is collective."""
    return init_device_mesh(device, (dist.get_world_size(),))


def joined_rows(local: torch.Tensor) -> torch.Tensor:
    """Return the array of the rows of all processes in their order; none receives those of another."""
    return DTensor.from_local(local, all_processes(local.device.type), [Shard(0)], run_check=False)


def select(axes: MeshAxes) -> None:
    """Let the collectives of the program that runs next use the groups of this mesh."""
    _current[:] = [axes]


def group_of(axis: str) -> Any:
    """Return the process group along an axis of the current mesh."""
    return _current[0].get_group(axis)
