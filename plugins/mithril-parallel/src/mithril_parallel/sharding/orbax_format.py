"""Checkpoints of Orbax: arrays of JAX are written by Orbax itself, all are read by region through TensorStore.

Reading needs neither JAX devices nor complete arrays, so that programs of PyTorch read them too.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import Any

from mithril.graph import UnsupportedError, check_memory
from mithril.system import files
from mithril_parallel.processes import World
from mithril_parallel.sharding.storage import LocalFolder, damaged, folder_of, library, parsed, read_bytes
from mithril_parallel.sharding.tensor_parts import Array, Latest, Part, PartedTensor, checksum, local_parts, part_key
from mithril_parallel.sharding.zarr_format import ARRAYS, METADATA, Chunks, region

CELL = 1024  # bytes of memory for the description of a part
NAMES = ("_CHECKPOINT_METADATA", "_METADATA", ARRAYS)  # of files or folders, one of which is in every checkpoint


class OrbaxWriter:
    """A save by Orbax, which copies the arrays before the constructor returns and writes them in threads of its own."""

    def __init__(self, path: str, arrays: Mapping[str, Any], metadata: Mapping[str, Any], world: World):
        ocp = library("orbax.checkpoint", "orbax-checkpoint")
        hosts = library("jax", "jax").process_count()
        if hosts != world.size:  # each would write all arrays to the same place
            raise UnsupportedError(
                f"JAX runs in {hosts} processes, but {world.size} save a checkpoint of Orbax",
                hint="call jax.distributed.initialize() in every process, or leave out format='orbax'",
            )
        handler = ocp.CompositeCheckpointHandler()
        self.checkpointer = ocp.AsyncCheckpointer(handler, timeout_secs=max(1, int(world.timeout)))
        items = {ARRAYS: ocp.args.StandardSave(dict(arrays)), METADATA: ocp.args.JsonSave(dict(metadata))}
        path = os.path.abspath(path)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with _without_warnings():
            self.checkpointer.save(path, args=ocp.args.Composite(**items))
        self.checksums = {  # Orbax itself has none; the next step overwrites the arrays
            part_key(name, start): checksum(data)
            for name, x in arrays.items()
            for start, data in local_parts(x, world.rank, replicas=False)
        }

    def write(self) -> Any:
        """Wait until the parts of all processes are written; return the checksums of those of this process."""
        with self.checkpointer:
            self.checkpointer.wait_until_finished()
        return {"checksums": self.checksums}

    def complete(self, answers: Sequence[Any]) -> None:
        """Do nothing: Orbax has committed by itself."""


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Silence the warning that scalars are saved by one process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def writes(arrays: Mapping[str, Any]) -> bool:
    """Whether Orbax itself can write these arrays: some are of JAX."""
    return any(hasattr(x, "addressable_shards") for x in arrays.values())


def read(path: str | os.PathLike[str]) -> tuple[dict[str, PartedTensor], dict[str, Any]]:
    """Return the tensors, whose parts are read when they are needed, and the progress of training.

    The names of nested arrays are joined by dots.
    """
    root, metadata = folder_of(path), {}
    with damaged(root):
        if root.exists(METADATA):
            metadata = parsed(read_bytes(root / METADATA, "metadata"), "its metadata")
        folder = root / ARRAYS if root.exists(ARRAYS) else root
        contents = parsed(read_bytes(folder, "_METADATA"), "its list of arrays")
        names = [
            ".".join(str(key["key"]) for key in entry["key_metadata"])
            for entry in contents["tree_metadata"].values()
            if not entry["value_metadata"]["skip_deserialize"]
        ]
        size_of_files, memory = root.size(), 0  # compressed and absent chunks expand
    latest = Latest()

    def tensor(name: str) -> PartedTensor:
        with damaged(folder):
            if isinstance(folder, LocalFolder):
                array: _Stored | Chunks = _Stored(folder, name, contents)
            else:
                omits = not contents.get("store_array_data_equal_to_fill_value", False)
                array = Chunks(folder, name, omits_fill=omits)
        nonlocal memory
        cells = math.prod(-(-n // max(1, c)) for n, c in zip(array.shape, array.chunk, strict=True))
        memory += math.prod(array.shape) * array.dtype.itemsize + CELL * cells
        check_memory(memory, size_of_files, f"the arrays of '{root}' up to '{name}'")
        ranges = [range(0, n, c) for n, c in zip(array.shape, array.chunk, strict=True)]
        grid = product(*ranges) if cells else ()  # product copies the ranges
        parts = []
        for start in grid:
            size = tuple(min(c, n - a) for a, c, n in zip(start, array.chunk, array.shape, strict=True))
            parts.append(Part(start, size, partial(latest.get, (name, start), partial(array.read, start, size))))
        return PartedTensor(name, array.shape, array.dtype, parts)

    if not isinstance(folder, LocalFolder) and (contents.get("use_ocdbt", True) or contents.get("use_zarr3")):
        raise UnsupportedError(
            f"the checkpoint in '{folder}' was written by Orbax itself, which needs a file system",
            hint=f"copy it first: fsspec.filesystem('{str(root).partition(':')[0]}').get('{root}', 'folder', "
            "recursive=True)",
        )
    return {name: tensor(name) for name in names}, metadata


class _Stored:
    """An array of TensorStore in a file system."""

    def __init__(self, folder: LocalFolder, name: str, contents: Mapping[str, Any]) -> None:
        tensorstore, root = library("tensorstore", "orbax-checkpoint"), folder.path.absolute()
        files.inside(root, name)
        store = {"driver": "file", "path": f"{root}/{name}/"}
        if contents.get("use_ocdbt", True):
            store = {"driver": "ocdbt", "base": f"file://{root}/", "path": f"{name}/"}
        driver = "zarr3" if contents.get("use_zarr3") else "zarr"
        self.folder = folder
        self.array = tensorstore.open({"driver": driver, "kvstore": store}, read=True).result()
        self.shape, self.dtype = tuple(self.array.shape), self.array.dtype.numpy_dtype
        self.chunk = tuple(self.array.chunk_layout.read_chunk.shape or ())

    def read(self, start: tuple[int, ...], size: tuple[int, ...]) -> Array:
        with damaged(self.folder):
            array: Array = self.array[region(start, size)].read().result()
            return array
