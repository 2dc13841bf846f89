"""Checkpoints in the format of Orbax, in any folder and from any engine: every part is one compressed chunk of Zarr.

Orbax itself writes only arrays of JAX, and only to file systems. Here TensorStore encodes one chunk at a time in
memory, and the folder stores it: an object store needs no driver but that of fsspec.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

from mithril.graph import InputError, UnsupportedError
from mithril_parallel.processes import World
from mithril_parallel.sharding.storage import Folder, damaged, library, parsed, read_bytes, write_bytes
from mithril_parallel.sharding.tensor_parts import Array, Part, PartedTensor, checksum, part_key

METADATA = "mithril"  # name of the item with the progress of training
ARRAYS = "state"  # name of the item with the arrays
HANDLERS = {
    ARRAYS: "orbax.checkpoint._src.handlers.standard_checkpoint_handler.StandardCheckpointHandler",
    METADATA: "orbax.checkpoint._src.handlers.json_checkpoint_handler.JsonCheckpointHandler",
}
HEADER = ".zarray"
Shape = tuple[int, ...]


# -- writing ---------------------------------------------------------------------------------------------------------
class ZarrWriter:
    """A save in this format. Every process writes the parts of ``tensors``, each loaded when its turn comes."""

    def __init__(self, folder: Folder, tensors: Mapping[str, PartedTensor], metadata: Mapping[str, Any], world: World):
        library("tensorstore", "orbax-checkpoint")
        self.folder, self.tensors, self.metadata, self.world = folder, dict(tensors), dict(metadata), world
        local = {n: [p.size for p in t.parts] or [(0,) * len(t.shape)] for n, t in tensors.items()}
        largest = world.exchange({n: _largest(sizes) for n, sizes in local.items()}, "the sizes of parts")
        names = set(local).union(*largest)
        if any(s.keys() != names for s in largest):
            facts = [f"process {k} lacks {', '.join(sorted(names - s.keys())[:8])}" for k, s in enumerate(largest)]
            facts = [fact for fact, s in zip(facts, largest, strict=True) if s.keys() != names]
            raise InputError(
                "Orbax needs the same names of arrays in all processes", facts=facts, hint="leave out format='orbax'"
            )
        self.chunks = {n: _largest([(1,) * len(t.shape), *(s[n] for s in largest)]) for n, t in self.tensors.items()}

    def write(self) -> Any:
        """Write the parts of this process; return their checksums, which Orbax itself lacks."""
        checksums = {}
        for name, tensor in self.tensors.items():
            _check_grid(tensor, self.chunks[name])
            for part in tensor.parts:
                if 0 in part.size:
                    continue
                data = part.load()
                checksums[part_key(name, part.start)] = checksum(data)
                write_bytes(self.folder / ARRAYS, *_encoded(tensor, self.chunks[name], part.start, data))
        self.tensors = {n: replace(t, parts=()) for n, t in self.tensors.items()}
        return {"checksums": checksums}

    def complete(self, answers: Sequence[Any]) -> None:
        """Write the headers of all arrays and the names that Orbax expects."""
        arrays, now = self.folder / ARRAYS, time.time_ns()
        for name, tensor in self.tensors.items():
            write_bytes(arrays, f"{name}/{HEADER}", _new(tensor, self.chunks[name]).kvstore[HEADER])
        value = {"value_type": "np.ndarray", "skip_deserialize": False}
        tree = {str((n,)): {"key_metadata": [{"key": n, "key_type": 2}], "value_metadata": value} for n in self.tensors}
        options = {"use_ocdbt": False, "use_zarr3": False, "store_array_data_equal_to_fill_value": True}
        _write_json(arrays, "_METADATA", {"tree_metadata": tree, **options, "custom_metadata": None})
        _write_json(self.folder / METADATA, "metadata", self.metadata)
        times = {"init_timestamp_nsecs": now, "commit_timestamp_nsecs": now}
        rest: dict[str, Any] = {"metrics": {}, "performance_metrics": {}, "custom_metadata": {}}
        _write_json(self.folder, "_CHECKPOINT_METADATA", {"item_handlers": HANDLERS, **times, **rest})


def gridded(tensor: PartedTensor, world: World) -> PartedTensor:
    """Return the parts of a regular grid that this process has to write; processes of the past may have had others."""
    chunk = _largest([(1,) * len(tensor.shape), *(p.size for p in tensor.parts)])
    starts = list(product(*(range(0, n, c) for n, c in zip(tensor.shape, chunk, strict=True))))
    return replace(tensor, parts=[_cell(tensor, start, chunk) for start in starts[world.rank :: world.size]])


def _cell(tensor: PartedTensor, start: Shape, chunk: Shape) -> Part:
    size = tuple(min(c, n - a) for a, c, n in zip(start, chunk, tensor.shape, strict=True))
    return Part(start, size, partial(tensor.read, region(start, size)))


def _largest(sizes: Sequence[Sequence[int]]) -> Shape:
    return tuple(max(lengths) for lengths in zip(*sizes, strict=True))


def _check_grid(tensor: PartedTensor, chunk: Shape) -> None:
    for part in tensor.parts:
        for start, size, c, n in zip(part.start, part.size, chunk, tensor.shape, strict=True):
            if size and (start % c or size not in (c, n - start)):
                raise UnsupportedError(
                    f"the parts of '{tensor.name}' have different sizes, but Orbax stores equal ones",
                    facts=[f"part at {list(part.start)} of size {list(part.size)}, others of size {list(chunk)}"],
                    hint='use format="dcp", or ml.export_checkpoint(folder, path, "orbax") afterwards',
                )


def _new(tensor: PartedTensor, chunk: Shape) -> Any:
    """Create an array of TensorStore in a memory of its own."""
    tensorstore = library("tensorstore", "orbax-checkpoint")
    spec = {
        "driver": "zarr",
        "kvstore": "memory://",
        "dtype": tensor.dtype.name,
        "store_data_equal_to_fill_value": True,
        "metadata": {"shape": tensor.shape, "chunks": chunk, "compressor": {"id": "zstd", "level": 1}},
    }
    return tensorstore.open(spec, create=True, context=tensorstore.Context()).result()


def _encoded(tensor: PartedTensor, chunk: Shape, start: Shape, data: Array) -> tuple[str, bytes]:
    """Return the name and the content of the file of a chunk."""
    array = _new(tensor, chunk)
    array[region(start, data.shape)].write(data).result()
    (key,) = (key.decode() for key in array.kvstore.list().result() if key != HEADER.encode())
    content: bytes = array.kvstore[key]
    return f"{tensor.name}/{key}", content


def _write_json(folder: Folder, name: str, content: Mapping[str, Any]) -> None:
    write_bytes(folder, name, json.dumps(content).encode())


# -- reading ---------------------------------------------------------------------------------------------------------
class Chunks:
    """An array of a folder, which is read chunk by chunk as one of TensorStore is.

    With ``omits_fill`` a chunk without a file has the array's fill value everywhere; otherwise it was lost.
    """

    def __init__(self, folder: Folder, name: str, *, omits_fill: bool) -> None:
        self.folder, self.name, self.omits_fill = folder, name, omits_fill
        self.header = read_bytes(folder, f"{name}/{HEADER}")
        array, entries = self._open({}), parsed(self.header, "its header")
        self.shape, self.chunk, self.dtype = array.shape, tuple(entries["chunks"]), array.dtype.numpy_dtype
        self.separator: str = entries.get("dimension_separator", ".")

    def read(self, start: Shape, size: Shape) -> Array:
        """Return the elements of the chunk at this offset."""
        key = self.separator.join(str(a // c) for a, c in zip(start, self.chunk, strict=True)) or "0"
        with damaged(self.folder):
            is_fill = self.omits_fill and not self.folder.exists(f"{self.name}/{key}")
            files = {} if is_fill else {key: read_bytes(self.folder, f"{self.name}/{key}")}
            array: Array = self._open(files)[region(start, size)].read().result()
            return array

    def _open(self, files: Mapping[str, bytes]) -> Any:
        tensorstore = library("tensorstore", "orbax-checkpoint")
        context = tensorstore.Context()
        store = tensorstore.KvStore.open("memory://", context=context).result()
        for name, content in {HEADER: self.header, **files}.items():
            store[name] = content
        return tensorstore.open({"driver": "zarr", "kvstore": "memory://"}, read=True, context=context).result()


def region(start: Shape, size: Sequence[int]) -> tuple[slice, ...]:
    """Return the slices from an offset."""
    return tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))
