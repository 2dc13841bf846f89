"""Arrays of a program on a mesh: every process holds its parts of those that are split, as ``DTensor``.

The parameters of a stage, and their optimizer values, belong to the processes of this stage: they are a ``DTensor`` on
the mesh of these, of which other processes hold no element.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from mithril.graph import BackendError
from mithril_torch.parallel.layout import PIPELINE, Split, dimensions_of
from mithril_torch.parallel.meshes import MeshBackend, all_processes, axes_of_mesh, join_group


class MeshArrays:
    """The splits of a program's arguments, and conversions between complete arrays, ``DTensor`` and local parts."""

    def __init__(
        self,
        shape: tuple[int, ...],
        splits: dict[str, Split],
        backend: MeshBackend,
        kinds: frozenset[str],
    ) -> None:
        self.device = device = backend.torch_device
        join_group(device)
        self.array, self.splits = backend.array, splits
        self.axes = axes_of_mesh(shape, device.type, dimensions_of(kinds))
        self.sums: frozenset[str] = frozenset()  # arguments of which each process has its own sum
        self.owners: dict[str, int] = {}  # the position along the pipeline of arguments of one stage

    def assemble(self, name: str, shape: tuple[int, ...], read: Callable[[Any], Any]) -> torch.Tensor:
        """Build a parameter whose local part is ``read(index)`` of this process's region."""
        if not self.is_here(name):
            return self.joined(self.array(read((slice(0),) * len(shape))), self.splits[name], shape, self.owners[name])
        index = []
        for n, axis in zip(shape, self.splits[name], strict=True):
            size = n // self.axes.size(axis)
            start = self.axes.index(axis) * size if axis is not None else 0
            index.append(slice(start, start + size))
        return self.joined(self.array(read(tuple(index))), self.splits[name], shape, self.owners.get(name))

    def is_here(self, name: str) -> bool:
        """Whether this process has a part of an argument."""
        position = self.axes.index(PIPELINE)
        return self.owners.get(name, position) == position

    def local(self, name: str, x: Any) -> torch.Tensor:
        """Return this process's part of an argument."""
        if name in self.sums:
            return self._own_sum(x)
        mesh = self.axes.storage_of(self.owners.get(name))
        if isinstance(x, DTensor) and x.device_mesh is all_processes(self.device.type):
            x = self._rows(x)
        if isinstance(x, DTensor) and x.device_mesh is not mesh and x.device_mesh != mesh:
            x = complete(x)  # of a mesh of the caller, or of another stage
        if not isinstance(x, DTensor):
            return self.part(self.splits[name], x) if self.is_here(name) else x.new_empty(0)
        placements = self.axes.placements(self.splits[name], mesh)
        if tuple(x.placements) != placements:
            x = x.redistribute(mesh, placements)
        local: torch.Tensor = x.to_local()
        return local

    def _own_sum(self, x: Any) -> torch.Tensor:
        """Return this process's sum, of which the mean over the processes counts; a complete array is one of each."""
        if isinstance(x, DTensor) and x.device_mesh == self.axes.mesh and any(p.is_partial() for p in x.placements):
            return x.to_local()
        return (complete(x) if isinstance(x, DTensor) else x).clone()

    def joined_sum(self, local: torch.Tensor) -> torch.Tensor:
        """Return the array of which each process has a sum."""
        places = [Partial("avg") if n > 1 else Replicate() for n in self.axes.mesh.shape]
        return DTensor.from_local(local, self.axes.mesh, places, run_check=False)

    def _rows(self, x: DTensor) -> DTensor:
        """Return rows of all processes as an array on this mesh, which numbers the processes in the same order."""
        places = [Shard(0) if n > 1 else Replicate() for n in self.axes.mesh.shape]
        return DTensor.from_local(
            x.to_local(), self.axes.mesh, places, run_check=False, shape=x.shape, stride=x.stride()
        )

    def part(self, split: Split, x: torch.Tensor) -> torch.Tensor:
        for k, axis in enumerate(split):
            if axis is not None:
                x = x.chunk(self.axes.size(axis), k)[self.axes.index(axis)]
        return x

    def joined(self, local: torch.Tensor, split: Split, shape: Sequence[int], owner: int | None) -> torch.Tensor:
        """Return the array with this local part; one that all processes have is a plain tensor."""
        if owner is None and not any(split):
            return local
        stride = tuple(prod(shape[k + 1 :]) for k in range(len(shape)))
        mesh = self.axes.storage_of(owner)
        return DTensor.from_local(
            local, mesh, self.axes.placements(split, mesh), run_check=False, shape=torch.Size(shape), stride=stride
        )


def complete(x: DTensor) -> torch.Tensor:
    """Return all elements of an array; all processes must call it."""
    try:
        return _gathered(x)
    except RuntimeError as error:
        if is_connection_error(error):
            raise connection_error(error) from error
        raise


def _gathered(x: DTensor) -> torch.Tensor:
    # Collectives lack uint32, the dtype of keys.
    if x.dtype == torch.uint32:
        words, shape = x.to_local().view(torch.int32), {"shape": x.shape, "stride": x.stride()}
        signed = DTensor.from_local(words, x.device_mesh, x.placements, run_check=False, **shape)
        return _gathered(signed).view(torch.uint32)
    full: torch.Tensor = x.full_tensor()
    if x.device_mesh.size() < dist.get_world_size():  # of one stage
        full = full if full.numel() else full.new_empty(x.shape)
        dist.broadcast(full, int(x.device_mesh.mesh.flatten()[0]))
    return full


def is_connection_error(error: Exception) -> bool:
    """Whether a collective failed because another process has ended."""
    return isinstance(error, dist.DistError) or "gloo" in str(error)


def connection_error(error: Exception) -> BackendError:
    """Return a readable error for a failed collective; PyTorch itself reports only addresses and ports."""
    return BackendError(
        "a collective failed: another process of this program has exited",
        facts=[str(error).splitlines()[0], f"this is process {dist.get_rank()} of {dist.get_world_size()}"],
        hint="read the output of that process for the reason",
    )
