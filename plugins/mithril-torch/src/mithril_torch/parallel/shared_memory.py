"""Memory shared by local processes: the full arguments and results of a program at fixed offsets."""

from __future__ import annotations

import mmap
import os
import tempfile
from math import prod
from pathlib import Path

import torch

from mithril_torch.parallel.worker import Spec

ALIGNED = 64
_FOLDER = "/dev/shm"  # file system in memory, where available


class Block:
    """A block of shared memory; ``arrays`` are views: arguments by name, results as ``"result <name>"``."""

    def __init__(self, file: int, spec: Spec) -> None:
        offsets, total = _offsets(spec)
        self.memory = mmap.mmap(file, total)
        self.arrays: dict[str, torch.Tensor] = {}
        for name, (offset, shape, dtype) in offsets.items():
            count = prod(shape)
            flattened = (
                torch.frombuffer(self.memory, dtype=dtype, count=count, offset=offset)
                if count
                else torch.empty(0, dtype=dtype)
            )
            self.arrays[name] = flattened.view(shape)

    @classmethod
    def create(cls, spec: Spec) -> tuple[Block, Path]:
        """Allocate a block and return it with its file, which can be deleted once all workers have opened it."""
        file, path = tempfile.mkstemp(prefix="mithril-", dir=_FOLDER if os.path.isdir(_FOLDER) else None)
        os.ftruncate(file, _offsets(spec)[1])
        try:
            return cls(file, spec), Path(path)
        finally:
            os.close(file)

    @classmethod
    def open(cls, path: str, spec: Spec) -> Block:
        """Open a block that another process created."""
        file = os.open(path, os.O_RDWR)
        try:
            return cls(file, spec)
        finally:
            os.close(file)


def _offsets(spec: Spec) -> tuple[dict[str, tuple[int, tuple[int, ...], torch.dtype]], int]:
    offsets = {}
    offset = 0
    for name, (shape, kind) in spec.types.items():
        dtype = getattr(torch, kind)
        offsets[name] = (offset, shape, dtype)
        offset += -(-prod(shape) * dtype.itemsize // ALIGNED) * ALIGNED
    return offsets, max(offset, ALIGNED)
