"""Tensors in parts as a checkpoint of ``torch.distributed.checkpoint`` (DCP); no process group of PyTorch is needed.

The processes exchange their plans by the key-value store of the engine, so that programs of JAX write this format too.
"""

from __future__ import annotations

import io
import json
import math
import os
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np

from mithril.graph import UnsupportedError, dtype as as_dtype
from mithril_parallel.processes import World
from mithril_parallel.sharding.dcp_metadata import Record, read_records
from mithril_parallel.sharding.storage import Folder, damaged, folder_of, library, parsed, read_bytes
from mithril_parallel.sharding.tensor_parts import Array, Latest, Part, PartedTensor, checksum, part_key

MODULES = ("", ".metadata", ".planner", ".default_planner", ".storage", ".filesystem")
RECORDS = ".metadata"  # the file that names all parts
METADATA = "mithril"  # name of the progress of training among the tensors


@dataclass(frozen=True)
class _Modules:
    """The modules of PyTorch that this format needs."""

    torch: Any
    dcp: Any
    metadata: Any
    planner: Any
    default_planner: Any
    storage: Any
    filesystem: Any


def import_modules() -> _Modules:
    home = "torch.distributed.checkpoint"
    modules = (library(f"{home}{name}", "torch") for name in MODULES)
    return _Modules(library("torch", "torch"), *modules)


def _storage(path: str) -> Any:
    """Return DCP's own writer of a folder; an object store is opened by fsspec."""
    if "://" in path:
        return import_module("torch.distributed.checkpoint._fsspec_filesystem").FsspecWriter(path)
    return import_modules().dcp.FileSystemWriter(path)


class DcpWriter:
    """A save in this format. Every process writes the parts of ``tensors``, each loaded when its turn comes."""

    def __init__(self, path: str, tensors: Mapping[str, PartedTensor], metadata: Mapping[str, Any], world: World):
        self.world, self.modules = world, import_modules()
        self.parts = [(tensor, part) for tensor in tensors.values() for part in tensor.parts]
        self.metadata = dict(metadata)
        self.checksums: dict[str, int] = {}  # DCP itself has none
        self.storage = _storage(path)

    def write(self) -> Any:
        """Write the parts of this process; return its plan and results for ``complete``."""
        rows = [
            {"name": tensor.name, "shape": list(tensor.shape), "dtype": tensor.dtype.name}
            | {"start": list(part.start), "size": list(part.size)}
            for tensor, part in self.parts
        ]
        rows += [{"name": METADATA}] if self.world.rank == 0 else []
        # DCP keeps the latest tensor of every name until the file is complete: numbers under one name replace them
        index = self.modules.metadata.MetadataIndex
        numbered = [replace(self._item(row), index=index("", index=k)) for k, row in enumerate(rows)]
        self.storage.set_up_storage_writer(self.world.rank == 0)
        plan = self.storage.prepare_local_plan(self.modules.planner.SavePlan(numbered))
        plan = self.storage.prepare_global_plan([plan] * self.world.size)[self.world.rank]
        for result in self.storage.write_data(plan, self).wait():
            place = result.storage_data
            rows[result.index.index] |= {
                "bytes": result.size_in_bytes,
                "place": [place.relative_path, place.offset, place.length],
            }
        self.parts = []
        return {"plan": rows, "checksums": self.checksums}

    def complete(self, answers: Sequence[Any]) -> None:
        """Write the file that names the parts of all processes."""
        m, plans, results = self.modules, [], []
        for answer in answers:
            items = [self._item(row) for row in answer["plan"]]
            plans.append(m.planner.SavePlan(items))
            results.append(
                [
                    m.storage.WriteResult(item.index, row["bytes"], m.filesystem._StorageInfo(*row["place"]))
                    for item, row in zip(items, answer["plan"], strict=True)
                ]
            )
        _, metadata = m.default_planner.create_default_global_save_plan(plans)
        self.storage.finish(metadata, results)

    def _item(self, row: Mapping[str, Any]) -> Any:
        """Return DCP's description of a part, or of the progress of training."""
        m, planner, size = self.modules.metadata, self.modules.planner, self.modules.torch.Size
        if "size" not in row:
            progress = planner.BytesIOWriteData(nbytes=0)
            kind = planner.WriteItemType.BYTE_IO
            return planner.WriteItem(m.MetadataIndex(row["name"]), kind, bytes_io_data=progress)
        dtype = _tensor(self.modules.torch, np.empty(0, as_dtype(row["dtype"]).numpy)).dtype
        chunk = m.ChunkStorageMetadata(size(row["start"]), size(row["size"]))
        data = planner.TensorWriteData(chunk, m.TensorProperties(dtype=dtype), size(row["shape"]))
        index = m.MetadataIndex(row["name"], size(row["start"]))
        return planner.WriteItem(index, planner.WriteItemType.SHARD, tensor_data=data)

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


def _tensor(torch: Any, x: Array) -> Any:
    if x.dtype.name == "bfloat16":  # which PyTorch does not read from NumPy
        return torch.from_numpy(x.view(np.uint16).copy()).view(torch.bfloat16)
    return torch.from_numpy(x if x.flags.writeable else x.copy())


def _numpy(torch: Any, x: Any) -> Array:
    import ml_dtypes

    array: Array = x.view(torch.uint16).numpy().view(ml_dtypes.bfloat16) if x.dtype is torch.bfloat16 else x.numpy()
    return array


def read(path: str | os.PathLike[str]) -> tuple[dict[str, PartedTensor], dict[str, Any]]:
    """Return the tensors, whose parts are read when they are needed, and the progress of training."""
    folder, latest = folder_of(path), Latest()
    with damaged(folder):
        records = read_records(read_bytes(folder, RECORDS))
        entries, places = records.get("state_dict_metadata", dict), records.get("storage_data", dict)
        tensors = {
            name: _tensor_of(folder, name, entry, places, latest)
            for name, entry in entries.items()
            if entry.kind == "TensorStorageMetadata"
        }
        progress = parsed(_load(folder, places[METADATA, None]), "its metadata") if METADATA in entries else {}
    return tensors, progress


def _tensor_of(folder: Folder, name: str, entry: Record, places: Mapping[Any, Record], latest: Latest) -> PartedTensor:
    dtype = np.dtype(as_dtype(entry.get("properties", Record).state[0].text).numpy)
    parts = []
    for chunk in entry.get("chunks", list):
        start, size = chunk.sizes("offsets"), chunk.sizes("sizes")
        load = partial(_part, folder, name, places[name, start], size, dtype)
        parts.append(Part(start, size, partial(latest.get, (name, start), load)))
    return PartedTensor(name, entry.sizes("size"), dtype, parts)


def _part(folder: Folder, name: str, place: Record, size: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    with damaged(folder):
        if math.prod(size) * dtype.itemsize > place.get("length", int):
            raise ValueError(f"the part {list(size)} of '{name}' is larger than its bytes in the file")
        x = _load(folder, place)
        array = _numpy(import_modules().torch, x)
        if array.shape != size or array.dtype != dtype:
            raise ValueError(f"a part of '{name}' is {array.dtype} {list(array.shape)}, expected {dtype} {list(size)}")
        return array


def _load(folder: Folder, place: Record) -> Any:
    """Return the tensor or the text that a part of a file holds, by the reader of PyTorch for tensors alone."""
    if place.state.get("transform_descriptors"):
        raise UnsupportedError(
            f"the checkpoint in '{folder}' is compressed by an extension of DCP", hint="save it without extensions"
        )
    offset, length = place.get("offset", int), place.get("length", int)
    with folder.open(place.get("relative_path", str)) as file:
        if not 0 <= offset <= offset + length <= file.seek(0, os.SEEK_END):
            raise ValueError(f"bytes {offset} to {offset + length} are outside of '{place.state['relative_path']}'")
        file.seek(offset)
        content = io.BytesIO(file.read(length))
    # Older forms of torch.save claim sizes that nothing bounds.
    with zipfile.ZipFile(content) as archive:
        if any(info.compress_type != zipfile.ZIP_STORED for info in archive.infolist()):
            raise ValueError("its content is compressed")
    content.seek(0)
    return import_modules().torch.load(content, map_location="cpu", weights_only=True)
