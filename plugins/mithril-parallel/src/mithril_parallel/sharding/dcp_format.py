"""Tensors in parts as a checkpoint of ``torch.distributed.checkpoint`` (DCP); no process group of PyTorch is needed.

The processes exchange their plans by the key-value store of the engine, so that programs of JAX write this format too.
"""

from __future__ import annotations

import base64
import io
import json
import os
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import numpy as np

from mithril_parallel.processes import World
from mithril_parallel.sharding.storage import damaged, library
from mithril_parallel.sharding.tensor_parts import Array, Latest, Part, PartedTensor, checksum, part_key

METADATA = "mithril"  # name of the progress of training among the tensors


@dataclass(frozen=True)
class _Modules:
    """The modules of PyTorch that this format needs."""

    torch: Any
    dcp: Any
    metadata: Any
    planner: Any
    default_planner: Any


def import_modules() -> _Modules:
    home = "torch.distributed.checkpoint"
    modules = (library(f"{home}{name}", "torch") for name in ("", ".metadata", ".planner", ".default_planner"))
    return _Modules(library("torch", "torch"), *modules)


def _storage(path: str, kind: str) -> Any:
    """Return DCP's own reader or writer of a folder; an object store is opened by fsspec."""
    if "://" in path:
        return getattr(import_module("torch.distributed.checkpoint._fsspec_filesystem"), f"Fsspec{kind}")(path)
    return getattr(import_modules().dcp, f"FileSystem{kind}")(path)


class DcpWriter:
    """A save in this format. Every process writes the parts of ``tensors``, each loaded when its turn comes."""

    def __init__(self, path: str, tensors: Mapping[str, PartedTensor], metadata: Mapping[str, Any], world: World):
        self.world, self.modules = world, import_modules()
        self.parts = [(tensor, part) for tensor in tensors.values() for part in tensor.parts]
        self.metadata = dict(metadata)
        self.checksums: dict[str, int] = {}  # DCP itself has none
        self.storage = _storage(path, "Writer")

    def write(self) -> Any:
        """Write the parts of this process; return its plan and results for ``complete``."""
        items, index = self._items(), self.modules.metadata.MetadataIndex
        # DCP keeps the latest tensor of every name until the file is complete: numbers under one name replace them
        numbered = [replace(item, index=index("", index=k)) for k, item in enumerate(items)]
        self.storage.set_up_storage_writer(self.world.rank == 0)
        plan = self.storage.prepare_local_plan(self.modules.planner.SavePlan(numbered))
        plan = self.storage.prepare_global_plan([plan] * self.world.size)[self.world.rank]
        results = [replace(r, index=items[r.index.index].index) for r in self.storage.write_data(plan, self).wait()]
        self.parts = []
        return {"plan": base64.b64encode(pickle.dumps((items, results))).decode(), "checksums": self.checksums}

    def complete(self, answers: Sequence[Any]) -> None:
        """Write the file that names the parts of all processes."""
        pairs = [pickle.loads(base64.b64decode(answer["plan"])) for answer in answers]
        plans = [self.modules.planner.SavePlan(items) for items, _ in pairs]
        _, metadata = self.modules.default_planner.create_default_global_save_plan(plans)
        self.storage.finish(metadata, [results for _, results in pairs])

    def _items(self) -> list[Any]:
        m, planner, size = self.modules.metadata, self.modules.planner, self.modules.torch.Size
        items = []
        for tensor, part in self.parts:
            properties = m.TensorProperties(dtype=self._dtype(tensor))
            chunk = m.ChunkStorageMetadata(size(part.start), size(part.size))
            data = planner.TensorWriteData(chunk, properties, size(tensor.shape))
            index = m.MetadataIndex(tensor.name, size(part.start))
            items.append(planner.WriteItem(index, planner.WriteItemType.SHARD, tensor_data=data))
        if self.world.rank == 0:
            progress = planner.BytesIOWriteData(nbytes=0)
            index = m.MetadataIndex(METADATA)
            items.append(planner.WriteItem(index, planner.WriteItemType.BYTE_IO, bytes_io_data=progress))
        return items

    def resolve_data(self, item: Any) -> Any:
        """Return the elements of a part; DCP calls this when it writes the part."""
        if item.type is self.modules.planner.WriteItemType.BYTE_IO:
            file = io.BytesIO()
            self.modules.torch.save(json.dumps(self.metadata), file)
            return file
        tensor, part = self.parts[item.index.index]
        array = np.asarray(part.load(), order="C")
        self.checksums[part_key(tensor.name, part.start)] = checksum(array)
        return _tensor(self.modules.torch, array)

    def _dtype(self, tensor: PartedTensor) -> Any:
        return _tensor(self.modules.torch, np.empty(0, tensor.dtype)).dtype


def _tensor(torch: Any, x: Array) -> Any:
    if x.dtype.name == "bfloat16":  # which PyTorch does not read from NumPy
        return torch.from_numpy(x.view(np.uint16).copy()).view(torch.bfloat16)
    return torch.from_numpy(x if x.flags.writeable else x.copy())


def _numpy(torch: Any, x: Any) -> Array:
    import ml_dtypes

    array: Array = x.view(torch.uint16).numpy().view(ml_dtypes.bfloat16) if x.dtype is torch.bfloat16 else x.numpy()
    return array


class _Chunk:
    """A planner that loads one part."""

    def __init__(self, torch: Any) -> None:
        self.torch = torch
        self.content: Any = None

    def load_bytes(self, item: Any, value: Any) -> None:
        self.content = self.torch.load(value, weights_only=True)

    def resolve_tensor(self, item: Any) -> Any:
        self.content = self.torch.empty(tuple(item.lengths), dtype=self.dtype)
        return self.content

    def commit_tensor(self, item: Any, tensor: Any) -> None:
        """Do nothing: the tensor has been filled."""

    dtype: Any = None


def read(path: str | os.PathLike[str]) -> tuple[dict[str, PartedTensor], dict[str, Any]]:
    """Return the tensors, whose parts are read when they are needed, and the progress of training."""
    modules, text = import_modules(), os.fspath(path)
    with damaged(text):
        reader = _storage(text, "Reader")
        entries = reader.read_metadata()
        reader.set_up_storage_reader(entries, True)

    def load(index: Any, kind: Any, lengths: Any, dtype: Any) -> Any:
        zeros = modules.torch.Size([0] * len(lengths))
        chunk = _Chunk(modules.torch)
        chunk.dtype = dtype
        item = modules.planner.ReadItem(kind, index, zeros, index, zeros, lengths)
        with damaged(text):
            reader.read_data(modules.planner.LoadPlan([item]), chunk)
        return chunk.content

    latest = Latest()

    def part(name: str, offsets: Any, sizes: Any) -> Array:
        dtype = entries.state_dict_metadata[name].properties.dtype
        index = modules.metadata.MetadataIndex(name, offsets)
        kind = modules.planner.LoadItemType.TENSOR
        return latest.get((name, offsets), lambda: _numpy(modules.torch, load(index, kind, sizes, dtype)))

    tensors, metadata = {}, {}
    for name, entry in entries.state_dict_metadata.items():
        if hasattr(entry, "size"):
            dtype = _numpy(modules.torch, modules.torch.empty(0, dtype=entry.properties.dtype)).dtype
            parts = [
                Part(tuple(c.offsets), tuple(c.sizes), lambda c=c, n=name: part(n, c.offsets, c.sizes))  # type: ignore[misc]
                for c in entry.chunks
            ]
            tensors[name] = PartedTensor(name, tuple(entry.size), dtype, parts)
        elif name == METADATA:
            index = modules.metadata.MetadataIndex(name)
            metadata = json.loads(load(index, modules.planner.LoadItemType.BYTE_IO, modules.torch.Size([]), None))
    return tensors, metadata
