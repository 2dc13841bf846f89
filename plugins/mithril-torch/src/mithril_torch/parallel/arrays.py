"""Arrays of a program on a mesh: every process holds its parts of those that are split, as ``DTensor``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from mithril.base import BackendError
from mithril_torch.parallel.layout import Split, dimensions_of
from mithril_torch.parallel.meshes import MeshBackend, axes_of_mesh, join_group


class MeshArrays:
    """The splits of a program's arguments, and conversions between complete arrays, ``DTensor`` and local parts."""

    def __init__(
        self,
        shape: tuple[int, ...],
        splits: dict[str, Split],
        backend: MeshBackend,
        kinds: frozenset[str],
    ) -> None:
        device = backend.torch_device
        join_group(device)
        self.array, self.splits = backend.array, splits
        self.axes = axes_of_mesh(shape, device.type, dimensions_of(kinds))
        self.mesh = self.axes.mesh

    def assemble(self, name: str, shape: tuple[int, ...], read: Callable[[Any], Any]) -> torch.Tensor:
        """Build a parameter whose local part is ``read(index)`` of this process's region."""
        index = []
        for n, axis in zip(shape, self.splits[name], strict=True):
            size = n // self.axes.size(axis)
            start = self.axes.index(axis) * size if axis is not None else 0
            index.append(slice(start, start + size))
        return self.joined(self.array(read(tuple(index))), self.splits[name], shape)

    def local(self, name: str, x: Any) -> torch.Tensor:
        """Return this process's part of an argument."""
        if not isinstance(x, DTensor):
            return self.part(self.splits[name], x)
        if x.device_mesh is not self.mesh and x.device_mesh != self.mesh:  # split over a mesh of the caller
            return self.part(self.splits[name], x.full_tensor())
        placements = self.axes.placements(self.splits[name])
        if tuple(x.placements) != placements:
            x = x.redistribute(self.mesh, placements)
        local: torch.Tensor = x.to_local()
        return local

    def part(self, split: Split, x: torch.Tensor) -> torch.Tensor:
        for k, axis in enumerate(split):
            if axis is not None:
                x = x.chunk(self.axes.size(axis), k)[self.axes.index(axis)]
        return x

    def joined(self, local: torch.Tensor, split: Split, shape: Sequence[int]) -> torch.Tensor:
        """Return the array with this local part; one that is not split is a plain tensor."""
        if not any(split):
            return local
        stride = tuple(prod(shape[k + 1 :]) for k in range(len(shape)))
        return DTensor.from_local(
            local, self.mesh, self.axes.placements(split), run_check=False, shape=torch.Size(shape), stride=stride
        )


def connection_error(error: Exception) -> BackendError:
    """Return a readable error for a failed collective; PyTorch itself reports only addresses and ports."""
    return BackendError(
        "a collective failed: another process of this program has exited",
        facts=[str(error).splitlines()[0], f"this is process {dist.get_rank()} of {dist.get_world_size()}"],
        hint="read the output of that process for the reason",
    )
