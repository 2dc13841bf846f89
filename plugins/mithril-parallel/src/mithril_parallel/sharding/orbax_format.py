"""Checkpoints of Orbax: arrays of JAX are written by Orbax itself, and read by region through TensorStore.

Reading needs neither JAX devices nor complete arrays, so that programs of PyTorch read them too.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from typing import Any

from mithril.base import UnsupportedError
from mithril_parallel.processes import World
from mithril_parallel.sharding.storage import damaged, library
from mithril_parallel.sharding.tensor_parts import Array, Part, PartedTensor, checksum, local_parts, part_key

METADATA = "mithril"  # name of the item with the progress of training
ARRAYS = "state"  # name of the item with the arrays


class OrbaxWriter:
    """A save by Orbax, which copies the arrays before the constructor returns and writes them in threads of its own."""

    def __init__(self, path: str, arrays: Mapping[str, Any], metadata: Mapping[str, Any], world: World):
        ocp = library("orbax.checkpoint", "orbax-checkpoint")
        jax = library("jax", "jax")
        if world.size != jax.process_count():
            raise UnsupportedError(
                "Orbax writes arrays of JAX, but these processes are not those of jax.distributed",
                hint='use format="dcp", or export_checkpoint(..., "orbax") in one process afterwards',
            )
        handler = ocp.CompositeCheckpointHandler()
        self.checkpointer = ocp.AsyncCheckpointer(handler, timeout_secs=max(1, int(world.timeout)))
        items = {ARRAYS: ocp.args.StandardSave(dict(arrays)), METADATA: ocp.args.JsonSave(dict(metadata))}
        if "://" not in path:
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


def in_jax(tensors: Mapping[str, PartedTensor]) -> dict[str, Any]:
    """Return the tensors as arrays of JAX over the devices of all processes, each of which reads its parts."""
    jax = library("jax", "jax")
    mesh = jax.sharding.Mesh(jax.devices(), ("parts",))

    def array(tensor: PartedTensor) -> Any:
        fits = [k for k, n in enumerate(tensor.shape) if n and n % mesh.size == 0]
        axis = max(fits, key=lambda k: tensor.shape[k], default=None)
        spec = jax.sharding.PartitionSpec(*("parts" if k == axis else None for k in range(len(tensor.shape))))
        sharding = jax.sharding.NamedSharding(mesh, spec)
        return jax.make_array_from_callback(tensor.shape, sharding, tensor.read)

    return {name: array(tensor) for name, tensor in tensors.items()}


def read(path: str | os.PathLike[str]) -> tuple[dict[str, PartedTensor], dict[str, Any]]:
    """Return the tensors, whose parts are read when they are needed, and the progress of training.

    The names of nested arrays are joined by dots.
    """
    root = Path(path).absolute()
    metadata: dict[str, Any] = {}
    if (root / METADATA).exists():
        with damaged(root):
            metadata = json.loads((root / METADATA / "metadata").read_text())
    folder = root / ARRAYS if (root / ARRAYS).exists() else root
    with damaged(folder):
        contents = json.loads((folder / "_METADATA").read_text())
        names = [
            ".".join(str(key["key"]) for key in entry["key_metadata"])
            for entry in contents["tree_metadata"].values()
            if not entry["value_metadata"]["skip_deserialize"]
        ]
    stores = {name: _open(folder, name, contents) for name in names}

    @lru_cache(maxsize=1)  # devices next to each other read the same part
    def load(name: str, start: tuple[int, ...], size: tuple[int, ...]) -> Array:
        with damaged(folder):
            region = tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))
            array: Array = stores[name][region].read().result()
            return array

    return {name: _tensor(name, store, load) for name, store in stores.items()}, metadata


def _open(folder: Path, name: str, contents: Mapping[str, Any]) -> Any:
    """Return the array of TensorStore with this name."""
    tensorstore = library("tensorstore", "orbax-checkpoint")
    files = {"driver": "file", "path": f"{folder}/{name}/"}
    if contents.get("use_ocdbt", True):
        files = {"driver": "ocdbt", "base": f"file://{folder}/", "path": f"{name}/"}
    with damaged(folder):
        driver = "zarr3" if contents.get("use_zarr3") else "zarr"
        return tensorstore.open({"driver": driver, "kvstore": files}, read=True).result()


def _tensor(name: str, store: Any, load: Callable[..., Array]) -> PartedTensor:
    shape, chunk = tuple(store.shape), tuple(store.chunk_layout.read_chunk.shape or ())
    parts = []
    for start in product(*(range(0, n, c) for n, c in zip(shape, chunk, strict=True))):
        size = tuple(min(c, n - a) for a, c, n in zip(start, chunk, shape, strict=True))
        parts.append(Part(start, size, partial(load, name, start, size)))
    return PartedTensor(name, shape, store.dtype.numpy_dtype, parts)
