"""``ml.save_sharded`` and ``ml.load_sharded``: every process writes the parts it holds, and reads those it needs.

A folder contains for each process a safetensors file of parts, named by their offsets, and a JSON file with the shapes
and dtypes of their tensors. The format is independent of the mesh: another mesh reads other regions of the tensors.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  # teaches NumPy bfloat16
import numpy as np

from mithril.backend import to_numpy
from mithril.base import InputError, dtype as as_dtype
from mithril.runtime import CompiledModel, save_file
from mithril.system import files

Index = tuple[slice, ...]


def save_sharded(folder: str | os.PathLike[str], arrays: Mapping[str, Any]) -> None:
    """Write arrays (parameters, optimizer state); all processes must call it, and each writes its parts.

    A part that several devices hold is written once.
    """
    rank, count = _process()
    tensors: dict[str, np.ndarray[Any, Any]] = {}
    entries: dict[str, Any] = {}
    for name, x in arrays.items():
        starts = []
        for start, data in _pieces(x, rank):
            tensors[_key(name, start)] = data
            starts.append([list(start), list(data.shape)])
        dtype = as_dtype(str(x.dtype).removeprefix("torch."))
        entries[name] = {"shape": list(x.shape), "dtype": dtype.name, "parts": starts}
    out = Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    stem = f"part-{rank:05}-of-{count:05}"
    save_file(tensors, out / f"{stem}.safetensors", {"format": "mithril sharded"})
    files.write(out / f"{stem}.json", json.dumps(entries))  # last: its existence marks the parts as complete


def load_sharded(folder: str | os.PathLike[str], compiled: CompiledModel) -> dict[str, Any]:
    """Load a compiled model's parameters, split for its latest program, regardless of the mesh that saved them."""
    if not compiled.programs:
        raise InputError("this model has no program yet", hint="pass shapes={...} to ml.compile, or evaluate it once")
    program = compiled.programs[-1]
    reader = Reader(folder)
    missing = [n for n in program.interface.params if n not in reader.shapes]
    if missing:
        raise InputError(
            f"'{os.fspath(folder)}' lacks parameters of this model", facts=[f"missing: {', '.join(missing[:8])}"]
        )
    assemble = getattr(getattr(program.executable, "call", None), "assemble", None)
    params = {}
    for name, t in program.interface.params.items():
        if reader.shapes[name] != t.shape:
            raise InputError(f"parameter '{name}' has shape {list(reader.shapes[name])}, expected {list(t.shape)}")
        array = assemble(name, t.shape, partial(reader.read, name)) if assemble is not None else None
        params[name] = array if array is not None else compiled.backend.array(reader.read(name), t.dtype)
    return params


class Reader:
    """The tensors of a folder; ``read`` accesses only the files and rows that overlap the requested region."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        index_files = sorted(self.folder.glob("part-*.json"))
        counts = {path.stem.rpartition("-")[2] for path in index_files}
        if len(counts) > 1:
            raise InputError(
                f"'{self.folder}' contains several checkpoints",
                facts=[f"of {', '.join(str(int(n)) for n in sorted(counts))} processes"],
                hint="save each checkpoint to a separate folder",
            )
        if not counts or len(index_files) != int(next(iter(counts))):
            raise InputError(
                f"'{self.folder}' does not contain a complete checkpoint",
                facts=[
                    f"parts of {len(index_files)} process(es)" + (f", expected {int(min(counts))}" if counts else "")
                ],
            )
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, Any] = {}
        self.parts: dict[str, list[tuple[Path, tuple[int, ...], tuple[int, ...]]]] = {}
        for path in index_files:
            for name, entry in json.loads(path.read_text()).items():
                self.shapes[name] = tuple(entry["shape"])
                self.dtypes[name] = as_dtype(entry["dtype"]).numpy
                parts = self.parts.setdefault(name, [])
                parts += [(path.with_suffix(".safetensors"), tuple(a), tuple(n)) for a, n in entry["parts"]]

    def read(self, name: str, index: Index | None = None) -> np.ndarray[Any, Any]:
        """Return a region of a tensor, or the complete tensor without an index."""
        from safetensors import safe_open

        shape = self.shapes[name]
        bounds = [s.indices(n)[:2] for s, n in zip(index or (slice(None),) * len(shape), shape, strict=True)]
        out = np.empty([b - a for a, b in bounds], self.dtypes[name])
        filled = 0
        for path, start, size in self.parts[name]:
            lows = [max(a, s) for (a, _), s in zip(bounds, start, strict=True)]
            highs = [min(b, s + n) for (_, b), s, n in zip(bounds, start, size, strict=True)]
            if any(low >= high for low, high in zip(lows, highs, strict=True)) and out.size:
                continue
            with safe_open(path, "np") as file:
                region = tuple(slice(a - s, b - s) for a, b, s in zip(lows, highs, start, strict=True))
                key = _key(name, start)
                piece = file.get_slice(key)[region] if region else file.get_tensor(key)
            # scalars are stored as one element, hence the reshape
            out[tuple(slice(a - z, b - z) for a, b, (z, _) in zip(lows, highs, bounds, strict=True))] = piece.reshape(
                [b - a for a, b in zip(lows, highs, strict=True)]
            )
            filled += piece.size
        if filled < out.size:
            raise InputError(f"'{self.folder}' lacks parts of '{name}'")
        return out


def _key(name: str, start: Sequence[int]) -> str:
    return f"{name}@{','.join(map(str, start))}"


def _pieces(x: Any, rank: int) -> Iterator[tuple[tuple[int, ...], np.ndarray[Any, Any]]]:
    """Yield the offset and the elements of each part that this process has to write."""
    if hasattr(x, "addressable_shards"):  # a jax.Array
        for shard in x.addressable_shards:
            if shard.replica_id == 0:
                yield tuple(s.start or 0 for s in shard.index), np.asarray(shard.data)
    elif hasattr(x, "to_local") and hasattr(x, "device_mesh"):  # a DTensor of PyTorch
        start = _offsets(x)
        if start is not None:
            yield start, to_numpy(x.to_local())
    elif rank == 0:
        yield (0,) * len(x.shape), to_numpy(x)


def _offsets(x: Any) -> tuple[int, ...] | None:
    """Return the offset of a DTensor's local part; None if another process writes the same part."""
    start, left = [0] * len(x.shape), list(x.shape)
    for k, placement in enumerate(x.placements):
        rank, n = x.device_mesh.get_local_rank(k), x.device_mesh.size(k)
        if not placement.is_shard():
            if rank:
                return None
            continue
        if left[placement.dim] % n:
            raise InputError(f"a tensor of shape {list(x.shape)} cannot be split evenly over {n} processes")
        left[placement.dim] //= n
        start[placement.dim] += rank * left[placement.dim]
    return tuple(start)


def _process() -> tuple[int, int]:
    """Return this process's rank and the number of processes, from torch.distributed or jax.distributed."""
    torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
    if torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    if jax is not None and jax.distributed.is_initialized():
        return jax.process_index(), jax.process_count()
    return 0, 1
