"""Tensors in parts: those that a process holds in its memory, and those of a file, read by region."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from mithril.backend import to_numpy
from mithril.graph import InputError

Array = np.ndarray[Any, Any]
Index = tuple[slice, ...]


@dataclass(frozen=True)
class Part:
    """A region of a tensor: its offset, its size, and a function that returns its elements."""

    start: tuple[int, ...]
    size: tuple[int, ...]
    load: Callable[[], Array]


@dataclass(frozen=True)
class PartedTensor:
    """A tensor whose parts are loaded when a region is read."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    parts: Sequence[Part]

    def read(self, index: Index | None = None) -> Array:
        """Return a region of the tensor, or the complete tensor without an index."""
        complete_index = (slice(None),) * len(self.shape)
        bounds = [s.indices(n)[:2] for s, n in zip(index or complete_index, self.shape, strict=True)]
        regions = [(part, *overlap) for part in self.parts if (overlap := _overlap(part, bounds)) is not None]
        shape = [b - a for a, b in bounds]
        covered = sum(math.prod(s.stop - s.start for s in target) for _, _, target in regions)
        if covered < math.prod(shape):  # before a size that only the file claims is allocated
            raise InputError(f"the checkpoint lacks parts of '{self.name}'")
        out = np.empty(shape, self.dtype)
        for part, source, target in regions:
            out[target] = part.load()[source]
        return out


def _overlap(part: Part, bounds: Sequence[tuple[int, int]]) -> tuple[Index, Index] | None:
    """Return the region of a part within bounds, relative to the part and to the bounds."""
    lows = [max(a, s) for (a, _), s in zip(bounds, part.start, strict=True)]
    highs = [min(b, s + n) for (_, b), s, n in zip(bounds, part.start, part.size, strict=True)]
    if any(low >= high for low, high in zip(lows, highs, strict=True)):
        return None
    source = tuple(slice(a - s, b - s) for a, b, s in zip(lows, highs, part.start, strict=True))
    return source, tuple(slice(a - z, b - z) for a, b, (z, _) in zip(lows, highs, bounds, strict=True))


class Latest:
    """The part that was read last: devices next to each other read the same one. It is dropped before the next."""

    def __init__(self) -> None:
        self._entry: tuple[Hashable, Array | None] = (None, None)

    def get(self, key: Hashable, read: Callable[[], Array]) -> Array:
        latest, array = self._entry
        if array is None or latest != key:
            array = None
            self._entry = (None, None)
            array = read()
            self._entry = (key, array)
        return array


def part_key(name: str, start: Sequence[int]) -> str:
    """Return the name of a part: that of its tensor, and its offset."""
    return f"{name}@{','.join(map(str, start))}"


def checksum(data: Array) -> int:
    return zlib.crc32(np.asarray(data, order="C").reshape(-1).view(np.uint8).data)


def complete(x: Array | PartedTensor) -> Array:
    """Return a tensor that may be in parts as one array."""
    return x.read() if isinstance(x, PartedTensor) else x


def in_memory(name: str, x: Any, rank: int, *, replicas: bool = False) -> PartedTensor:
    """Copy the parts of an array that this process has to write; with ``replicas`` all that it holds."""
    if isinstance(x, PartedTensor):  # copied to the host before
        return PartedTensor(name, x.shape, x.dtype, x.parts)
    parts = [
        Part(start, data.shape, lambda data=data: data)  # type: ignore[misc]
        for start, data in local_parts(x, rank, replicas=replicas)
    ]
    dtype = parts[0].load().dtype if parts else _dtype(x)
    return PartedTensor(name, tuple(x.shape), dtype, parts)


def held(name: str, x: Any) -> PartedTensor:
    """Return the parts of an array that this process holds, each of which is copied to the host when it is read."""
    x = _exchanged(x)
    if not hasattr(x, "addressable_shards"):
        return in_memory(name, x, 0, replicas=True)
    parts = {
        start: Part(start, shard.data.shape, partial(np.asarray, shard.data))
        for shard in x.addressable_shards
        for start in [tuple(s.start or 0 for s in shard.index)]
    }
    return PartedTensor(name, tuple(x.shape), _dtype(x), tuple(parts.values()))


def _exchanged(x: Any) -> Any:
    """Return the complete array of one of which each device has a term, as of gradients in the middle of a step."""
    if any(p.is_partial() for p in getattr(x, "placements", ())):
        return x.full_tensor()
    sharding: Any = getattr(x, "sharding", None)
    if getattr(getattr(sharding, "spec", None), "unreduced", None):
        from jax import reshard
        from jax.sharding import NamedSharding, PartitionSpec

        return reshard(x, NamedSharding(sharding.mesh, PartitionSpec()))
    return x


def _dtype(x: Any) -> np.dtype[Any]:
    from mithril.graph import dtype as as_dtype

    return np.dtype(as_dtype(str(x.dtype).removeprefix("torch.")).numpy)


def local_parts(x: Any, rank: int, *, replicas: bool) -> Iterator[tuple[tuple[int, ...], Array]]:
    """Yield the offset and a copy of the elements of each part; without ``replicas`` one process yields each part."""
    x = _exchanged(x)
    if hasattr(x, "addressable_shards"):  # a jax.Array
        written = set()
        for shard in x.addressable_shards:
            start = tuple(s.start or 0 for s in shard.index)
            if start not in written and (replicas or shard.replica_id == 0):
                written.add(start)
                yield start, np.array(shard.data)
    elif hasattr(x, "to_local") and hasattr(x, "device_mesh"):  # a DTensor of PyTorch
        local = np.array(to_numpy(x.to_local()))
        if local.size:  # else a process of other stages
            start, is_replica = _place_of(x)
            if replicas or not is_replica:
                yield start, local
    elif replicas or rank == 0:
        array = to_numpy(x)
        yield (0,) * len(x.shape), np.array(array, order="C")


def _place_of(x: Any) -> tuple[tuple[int, ...], bool]:
    """Return the offset of a DTensor's local part, and whether another process holds the same part."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, start = compute_local_shape_and_global_offset(x.shape, x.device_mesh, x.placements)
    replicated_axes = [k for k, placement in enumerate(x.placements) if not placement.is_shard()]
    return tuple(start), any(x.device_mesh.get_local_rank(k) for k in replicated_axes)
