"""Checkpoints of several processes: a folder of parts that counts when ``commit.json`` names it.

Every process writes one safetensors file with the parts that it holds, under a name that contains the id of the save.
When all files are complete, ``commit.json`` is replaced. A process that dies before leaves the previous checkpoint
intact, and parts of two saves are never read together. The format does not depend on the mesh or the engine.
"""

from __future__ import annotations

import json
import os
import secrets
import threading
import zlib
from collections.abc import Mapping
from functools import partial
from typing import Any, BinaryIO

import ml_dtypes  # noqa: F401  # teaches NumPy bfloat16
import numpy as np

from mithril.base import BackendError, InputError, MithrilError
from mithril.runtime import CompiledModel
from mithril_parallel.processes import World, current_world, named
from mithril_parallel.sharding.storage import Folder, folder_of, read_bytes, write_bytes
from mithril_parallel.sharding.tensor_parts import Array, Part, PartedTensor, in_memory

COMMIT = "commit.json"
FORMAT = "mithril-sharded-2"
CODES = {"bfloat16": "BF16", "bool": "BOOL", "complex64": "C64"}  # dtypes of safetensors
CODES |= {f"float{n}": f"F{n}" for n in (64, 32, 16)}
CODES |= {f"{sign}int{n}": f"{code}{n}" for n in (64, 32, 16, 8) for sign, code in (("", "I"), ("u", "U"))}


class DamagedError(InputError):
    """A checkpoint is incomplete or its bytes have changed; an older one may be intact."""


# -- public functions ------------------------------------------------------------------------------------------------
def save_sharded(folder: str | os.PathLike[str], arrays: Mapping[str, Any]) -> None:
    """Write arrays (parameters, optimizer state); all processes must call it, and each writes its parts.

    A part that several devices hold is written once. The previous contents count until all processes have finished.
    """
    begin_save(folder, arrays, {}, current_world()).finish()


def load_sharded(folder: str | os.PathLike[str], compiled: CompiledModel) -> dict[str, Any]:
    """Load a compiled model's parameters, split for its latest program, regardless of the mesh that saved them."""
    if not compiled.programs:
        raise InputError("this model has no program yet", hint="pass shapes={...} to ml.compile, or evaluate it once")
    program = compiled.programs[-1]
    tensors = Reader(folder).tensors
    missing = [n for n in program.interface.params if n not in tensors]
    if missing:
        raise InputError(
            f"'{os.fspath(folder)}' lacks parameters of this model", facts=[f"missing: {', '.join(missing[:8])}"]
        )
    assemble = getattr(getattr(program.executable, "call", None), "assemble", None)
    params = {}
    for name, t in program.interface.params.items():
        tensor = tensors[name]
        if tensor.shape != t.shape:
            raise InputError(f"parameter '{name}' has shape {list(tensor.shape)}, expected {list(t.shape)}")
        array = assemble(name, t.shape, tensor.read) if assemble is not None else None
        params[name] = array if array is not None else compiled.backend.array(tensor.read(), t.dtype)
    return params


# -- saving ----------------------------------------------------------------------------------------------------------
class Save:
    """A save in progress: the arrays are copied, and a thread writes them. ``finish`` waits and raises its error."""

    def __init__(
        self, path: str | os.PathLike[str], tensors: Mapping[str, PartedTensor], commit: dict[str, Any]
    ) -> None:
        self.folder = folder_of(path)
        self.tensors, self.commit = tensors, commit
        self.error: MithrilError | None = None
        self.thread: threading.Thread | None = None

    def start(self, world: World, *, shared: bool) -> Save:
        self.thread = threading.Thread(target=self.write, args=(world, shared), name="mithril save")
        self.thread.start()
        return self

    def write(self, world: World, shared: bool) -> None:
        """Write the parts of this process, and the commit when all processes have written theirs."""
        key, stem = f"save/{self.commit['id']}", self.commit["id"]
        purpose = f"the commit of '{self.folder}'"
        try:
            try:
                answer: dict[str, Any] = {"crc": write_part(self.folder, part_name(world.rank, world.size, stem), self)}
            except MithrilError as error:
                answer = {"error": str(error)}
            answers = world.gather(key, answer, purpose)
            failed = [k for k, a in enumerate(answers) if "error" in a]
            if failed:  # only now is it certain that no process commits
                self.folder.remove(part_name(world.rank, world.size, stem))
                facts = [f"process {k}: {answers[k]['error']}" for k in failed]
                raise BackendError(f"{named(failed)} could not write '{self.folder}'", facts=facts)
            self.commit["shared"] = shared
            self.commit["parts"] = {part_name(k, world.size, stem): a["crc"] for k, a in enumerate(answers)}
            if world.rank == 0 or not shared:
                write_bytes(self.folder, COMMIT, json.dumps(self.commit).encode())
                for name in self.folder.names():
                    if name.startswith("part-") and name not in self.commit["parts"]:
                        self.folder.remove(name)
            world.gather(f"{key}/committed", None, purpose)
        except MithrilError as error:
            self.error = error
        finally:
            self.tensors = {}

    def finish(self) -> None:
        """Wait until the checkpoint is committed; raise if a process could not write it."""
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        if self.error is not None:
            raise self.error


def begin_save(
    path: str | os.PathLike[str],
    arrays: Mapping[str, Any],
    metadata: Mapping[str, Any],
    world: World,
    *,
    asynchronous: bool = False,
    shared: bool | None = None,
) -> Save:
    """Copy the arrays to the host and write them, in a thread if ``asynchronous``; ``shared`` as by ``is_shared``."""
    token, shared = secrets.token_hex(8), is_shared(path, world) if shared is None else shared
    commit = {"format": FORMAT, "id": world.from_first(token, "the start of a save"), "metadata": dict(metadata)}
    tensors = {n: in_memory(n, x, world.rank, replicas=not shared) for n, x in arrays.items()}
    save = Save(path, tensors, commit)
    if asynchronous:
        return save.start(world, shared=shared)
    save.write(world, shared)
    return save


def is_shared(path: str | os.PathLike[str], world: World) -> bool:
    """Whether all processes see the files that one of them writes there: not on disks of single nodes."""
    if world.size == 1:
        return True
    folder = folder_of(path)
    probe = world.from_first(f".probe-{secrets.token_hex(8)}", "the folder of checkpoints")
    if world.rank == 0:
        write_bytes(folder, probe, b"")
    world.barrier("the folder of checkpoints")
    seen: list[bool] = world.exchange(folder.exists(probe), "the folder of checkpoints")
    if world.rank == 0:
        folder.remove(probe)
    return all(seen)


def part_name(rank: int, size: int, token: str) -> str:
    return f"part-{rank:05}-of-{size:05}-{token}.safetensors"


def write_part(folder: Folder, name: str, save: Save) -> int:
    """Write the parts of this process; return the checksum of the header, which contains those of the parts."""
    header: dict[str, Any] = {}
    index: dict[str, Any] = {}
    offset = 0
    for tensor in save.tensors.values():
        parts = []
        for part in tensor.parts:
            data = part.load()
            shape = list(data.shape)
            place = {"dtype": CODES[data.dtype.name], "shape": shape, "data_offsets": [offset, offset + data.nbytes]}
            header[f"{tensor.name}@{','.join(map(str, part.start))}"] = place
            parts.append([list(part.start), shape, offset, zlib.crc32(_bytes(data))])
            offset += data.nbytes
        index[tensor.name] = {"shape": list(tensor.shape), "dtype": tensor.dtype.name, "parts": parts}
    header["__metadata__"] = {"format": FORMAT, "id": save.commit["id"], "index": json.dumps(index)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)

    def fill(file: BinaryIO) -> None:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in save.tensors.values():
            for part in tensor.parts:
                file.write(_bytes(part.load()))

    folder.write(name, fill)
    return zlib.crc32(text)


def _bytes(data: Array) -> memoryview:
    return np.asarray(data, order="C").reshape(-1).view(np.uint8).data


# -- reading ---------------------------------------------------------------------------------------------------------
class Reader:
    """The tensors of a committed folder; only files and parts that overlap a requested region are read."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.folder = folder_of(path)
        self.commit = read_commit(self.folder)
        self.metadata: dict[str, Any] = self.commit["metadata"]
        self.tensors: dict[str, PartedTensor] = {}
        self._last: tuple[Any, Array] = ((), np.empty(0))  # devices next to each other read the same part
        for name, crc in self.commit["parts"].items():
            if self.folder.exists(name):
                self._read_header(name, crc)
            elif self.commit.get("shared"):  # on disks of nodes the parts of others are absent
                raise DamagedError(
                    f"'{self.folder}' does not contain a complete checkpoint", facts=[f"'{name}' is missing"]
                )
        if not self.tensors and self.commit["parts"]:
            raise DamagedError(
                f"'{self.folder}' does not contain a complete checkpoint", facts=["all parts are missing"]
            )

    def _read_header(self, name: str, crc: int) -> None:
        with self.folder.open(name) as file:
            size = int.from_bytes(file.read(8), "little")
            text = file.read(size) if size < 1 << 32 else b""
        if zlib.crc32(text) != crc:
            raise DamagedError(f"'{self.folder}/{name}' is damaged", facts=["the checksum of its header is wrong"])
        for tensor, entry in json.loads(json.loads(text)["__metadata__"]["index"]).items():
            shape, dtype = tuple(entry["shape"]), np.dtype(entry["dtype"])
            old = self.tensors.get(tensor, PartedTensor(tensor, shape, dtype, ()))
            starts = {part.start for part in old.parts}  # processes of one node may have written the same part
            new = [
                Part(
                    tuple(start), tuple(n), partial(self._part, name, tensor, 8 + size + offset, tuple(n), dtype, check)
                )
                for start, n, offset, check in entry["parts"]
                if tuple(start) not in starts
            ]
            self.tensors[tensor] = PartedTensor(tensor, shape, dtype, (*old.parts, *new))

    def verify(self, rank: int, size: int) -> None:
        """Read the parts that this process has to check, so that all processes together check all."""
        for tensor in self.tensors.values():
            for part in tensor.parts[rank::size] if self.commit.get("shared") else tensor.parts:
                part.load()

    def _part(
        self, name: str, tensor: str, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any], checksum: int
    ) -> Array:
        if self._last[0] == (name, offset):
            return self._last[1]
        with self.folder.open(name) as file:
            file.seek(offset)
            raw = file.read(int(np.prod(shape, dtype=np.int64)) * dtype.itemsize)
        if zlib.crc32(raw) != checksum:
            raise DamagedError(f"'{self.folder}/{name}' is damaged", facts=[f"the checksum of '{tensor}' is wrong"])
        array = np.frombuffer(raw, dtype).reshape(shape)
        self._last = (name, offset), array
        return array


def read_commit(folder: Folder) -> dict[str, Any]:
    """Return the commit of a folder; raise if it is not a committed checkpoint."""
    if not folder.exists(COMMIT):
        state = "a save that did not finish" if any(n.startswith("part-") for n in folder.names()) else "no parts"
        raise DamagedError(f"'{folder}' does not contain a complete checkpoint", facts=[f"it contains {state}"])
    try:
        commit: dict[str, Any] = json.loads(read_bytes(folder, COMMIT))
    except ValueError as error:
        raise DamagedError(f"'{folder}/{COMMIT}' is damaged", facts=[str(error)]) from None
    if commit.get("format") != FORMAT:
        raise InputError(f"'{folder}' has the format {commit.get('format')!r}, expected {FORMAT!r}")
    return commit
