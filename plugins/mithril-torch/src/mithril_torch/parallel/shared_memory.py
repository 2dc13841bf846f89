"""Memory that the processes of one machine share: the arguments and results of a program, whole, at fixed places."""

from __future__ import annotations

import mmap
import os
import tempfile
from math import prod
from pathlib import Path

import torch

from mithril_torch.parallel.worker import Spec

ALIGNED = 64
_FOLDER = "/dev/shm"  # memory, where there is such a thing


class Block:
    """``arrays`` are views of the memory: arguments by name, results as ``"result <name>"``."""

    def __init__(self, file: int, spec: Spec) -> None:
        places, total = _places(spec)
        self.memory = mmap.mmap(file, total)
        self.arrays: dict[str, torch.Tensor] = {}
        for name, (at, shape, dtype) in places.items():
            count = prod(shape)
            flat = (
                torch.frombuffer(self.memory, dtype=dtype, count=count, offset=at)
                if count
                else torch.empty(0, dtype=dtype)
            )
            self.arrays[name] = flat.view(shape)

    @classmethod
    def create(cls, spec: Spec) -> tuple[Block, Path]:
        """New memory and the file it has a name by, which is no longer needed once everybody has opened it."""
        file, path = tempfile.mkstemp(prefix="mithril-", dir=_FOLDER if os.path.isdir(_FOLDER) else None)
        os.ftruncate(file, _places(spec)[1])
        try:
            return cls(file, spec), Path(path)
        finally:
            os.close(file)

    @classmethod
    def open(cls, path: str, spec: Spec) -> Block:
        """The memory that another process created."""
        file = os.open(path, os.O_RDWR)
        try:
            return cls(file, spec)
        finally:
            os.close(file)


def _places(spec: Spec) -> tuple[dict[str, tuple[int, tuple[int, ...], torch.dtype]], int]:
    places = {}
    at = 0
    for name, (shape, kind) in spec.types.items():
        dtype = getattr(torch, kind)
        places[name] = (at, shape, dtype)
        at += -(-prod(shape) * dtype.itemsize // ALIGNED) * ALIGNED
    return places, max(at, ALIGNED)
