"""Checkpoints of several processes: a folder of parts that counts when ``commit.json`` names it.

Every process writes one safetensors file with the parts that it holds, under a name that contains the id of the save.
When all files are complete, ``commit.json`` is replaced. A process that dies before leaves the previous checkpoint
intact, and parts of two saves are never read together. The format does not depend on the mesh or the engine.
"""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import sys
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, BinaryIO, Literal, Protocol

import ml_dtypes  # noqa: F401  # teaches NumPy bfloat16
import numpy as np

from mithril.compiler import CompiledModel
from mithril.graph import BackendError, InputError, MithrilError, OptionError, dtype as as_dtype
from mithril_parallel.processes import World, current_world, named
from mithril_parallel.sharding import dcp_format, orbax_format, zarr_format
from mithril_parallel.sharding.storage import (
    DamagedError,
    Folder,
    LocalFolder,
    SaveError,
    damaged,
    folder_of,
    library,
    parsed,
    read_bytes,
    write_bytes,
)
from mithril_parallel.sharding.tensor_parts import Array, Latest, Part, PartedTensor, checksum, in_memory, part_key

COMMIT = "commit.json"
Format = Literal["parts", "orbax", "dcp"]
PART = re.compile(r"(part|orbax|dcp)-[\w.-]+")  # a name in the commit: of a file of parts, or a folder of a library
# A name that saves give, with additions by libraries to folders that are not finished. Exact, because saves remove
# files with such a name, and part-00000-<uuid>.parquet of Spark must remain.
SAVED = re.compile(r"part-\d{5,}-of-\d{5,}-[0-9a-f]{16}\.safetensors|(orbax|dcp)-[0-9a-f]{16}[\w.-]*")
FORMAT = "mithril-sharded-2"
REMEDY = "check the free space and the permissions of the folder, and save again"
CODES = {"bfloat16": "BF16", "bool": "BOOL", "complex64": "C64"}  # dtypes of safetensors
CODES |= {f"float{n}": f"F{n}" for n in (64, 32, 16)}
CODES |= {f"{sign}int{n}": f"{code}{n}" for n in (64, 32, 16, 8) for sign, code in (("", "I"), ("u", "U"))}


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
    program = compiled.program_with_params() or compiled.programs[-1]
    tensors = Reader(folder).tensors
    missing = [n for n in program.interface.params if n not in tensors]
    if missing:
        raise InputError(
            f"'{os.fspath(folder)}' lacks parameters of this model", facts=[f"missing: {', '.join(missing[:8])}"]
        )
    params = {}
    for name, t in program.interface.params.items():
        tensor = tensors[name]
        if tensor.shape != t.shape:
            raise InputError(f"parameter '{name}' has shape {list(tensor.shape)}, expected {list(t.shape)}")
        array = program.assembled(name, tensor.read)
        params[name] = array if array is not None else compiled.backend.array(tensor.read(), t.dtype)
    return params


# -- saving ----------------------------------------------------------------------------------------------------------
class Writer(Protocol):
    """The save of one format: each process writes its parts, then process 0 completes the checkpoint."""

    def write(self) -> Any: ...
    def complete(self, answers: Sequence[Any], /) -> None: ...


class PartWriter:
    """A save in the format of this module: one safetensors file per process, with checksums."""

    def __init__(self, folder: Folder, tensors: Mapping[str, PartedTensor], save_id: str, world: World) -> None:
        self.folder, self.tensors, self.save_id, self.world = folder, tensors, save_id, world

    def write(self) -> int:
        name = part_name(self.world.rank, self.world.size, self.save_id)
        try:
            return write_part(self.folder, name, self.tensors, self.save_id)
        finally:
            self.tensors = {}

    def complete(self, answers: Sequence[Any]) -> None:
        """Do nothing: the commit names the parts."""


def write_by(writer: Writer, world: World, key: str, purpose: str) -> list[Any]:
    """Write the parts of all processes and complete the checkpoint; return the answers of the processes."""
    answers = _attempts(world, key, purpose, writer.write)
    # Completing comes after all have written: a library's index must not name parts that do not
    # exist.
    _attempts(world, f"{key}/complete", purpose, partial(writer.complete, answers) if world.rank == 0 else lambda: None)
    return answers


def _attempts(world: World, key: str, purpose: str, function: Callable[[], Any]) -> list[Any]:
    """Call a function in every process and return all results; if one fails, raise in all."""
    try:
        answer: dict[str, Any] = {"result": function()}
    except MithrilError as error:
        answer = {"error": str(error)}
    except Exception as error:  # of the libraries of other formats
        answer = {"error": f"{type(error).__name__}: {error}"}
    answers = world.gather(key, answer, purpose)
    failed = [k for k, a in enumerate(answers) if "error" in a]
    if failed:
        facts = [f"process {k}: {answers[k]['error']}" for k in failed]
        raise SaveError(f"{named(failed)} could not write {purpose}", facts=facts, hint=REMEDY)
    return [a["result"] for a in answers]


class Save:
    """A save in progress: the arrays are copied, and a thread writes them. ``finish`` waits and raises its error."""

    def __init__(self, folder: Folder, writer: Writer, commit: dict[str, Any]) -> None:
        self.folder, self.writer, self.commit = folder, writer, commit
        self.error: MithrilError | None = None
        self.thread: threading.Thread | None = None

    def start(self, world: World, *, shared: bool) -> Save:
        self.thread = threading.Thread(target=self.write, args=(world, shared), name="mithril save")
        self.thread.start()
        return self

    def write(self, world: World, shared: bool) -> None:
        """Write the parts of this process, and the commit when all processes have written theirs."""
        key, purpose = f"save/{self.commit['id']}", f"the commit of '{self.folder}'"
        try:
            try:
                answers = write_by(self.writer, world, key, f"'{self.folder}'")
            except BackendError:  # only now is it certain that no process commits
                self.folder.remove(part_name(world.rank, world.size, self.commit["id"]))
                if world.rank == 0 and "library" in self.commit:
                    self._remove_all(self.commit["library"])
                raise
            self.commit["shared"] = shared
            self.commit["parts"] = {}
            if isinstance(self.writer, PartWriter):
                self.commit["parts"] = {part_name(k, world.size, self.commit["id"]): a for k, a in enumerate(answers)}
            else:
                self.commit["checksums"] = {n: c for a in answers for n, c in a["checksums"].items()}
            # On disks of single nodes each has its own commit, or a restart would find parts without one.
            commits = world.rank == 0 or not shared
            _attempts(world, f"{key}/committed", purpose, self._write_commit if commits else lambda: None)
        except MithrilError as error:
            self.error = error
        except Exception as error:  # of a store or a file system; a thread would lose it
            facts = [f"{type(error).__name__}: {error}"]
            self.error = BackendError(f"'{self.folder}' could not be saved", facts=facts, hint=REMEDY)
        finally:
            del self.writer  # and the copies of the arrays

    def _write_commit(self) -> None:
        write_bytes(self.folder, COMMIT, json.dumps(self.commit).encode())
        # After the commit: until then the parts of the previous checkpoint are the only complete ones.
        self._remove_previous()

    def _remove_all(self, prefix: str) -> None:
        """Remove the files of a library, whose unfinished folders have longer names."""
        for name in self.folder.names():
            if name.startswith(prefix):
                self.folder.remove(name)

    def _remove_previous(self) -> None:
        """Remove the parts of previous saves, which the commit does not name."""
        for name in self.folder.names():
            if is_part(name) and name not in self.commit["parts"] and name != self.commit.get("library"):
                self.folder.remove(name)

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
    format: Format = "parts",
) -> Save:
    """Copy the arrays to the host and write them, in a thread if ``asynchronous``; ``shared`` as by ``is_shared``.

    The tensors are written in the ``format`` of this module, of Orbax or of ``torch.distributed.checkpoint``.
    """
    folder = folder_of(path)
    token, shared = secrets.token_hex(8), is_shared(path, world) if shared is None else shared
    commit = {"format": FORMAT, "id": world.from_first(token, "the start of a save"), "metadata": dict(metadata)}
    if format != "parts":
        commit["library"] = f"{format}-{commit['id']}"
        if not shared:
            raise OptionError(
                f"format='{format}' needs a folder that all processes share, unlike '{folder}'",
                hint="leave out format=, or use a shared folder",
            )
    writer = _writer(format, folder, arrays, commit, world, replicas=not shared)
    save = Save(folder, writer, commit)
    if asynchronous:
        return save.start(world, shared=shared)
    save.write(world, shared)
    return save


def _writer(
    format: Format, folder: Folder, arrays: Mapping[str, Any], commit: dict[str, Any], world: World, *, replicas: bool
) -> Writer:
    """Copy the arrays, so that training can overwrite them, and return the writer of their format."""
    target = folder / commit.get("library", "")
    if format == "orbax" and isinstance(folder, LocalFolder) and orbax_format.writes(arrays):
        return orbax_format.OrbaxWriter(str(target), arrays, commit["metadata"], world)
    tensors = {n: in_memory(n, x, world.rank, replicas=replicas) for n, x in arrays.items()}
    if format == "orbax":
        return zarr_format.ZarrWriter(target, tensors, commit["metadata"], world)
    if format == "dcp":
        return dcp_format.DcpWriter(str(target), tensors, commit["metadata"], world)
    return PartWriter(folder, tensors, commit["id"], world)


def import_libraries(format: Format) -> None:
    """Import the libraries that write a format, which may take seconds; raise PluginError if one is missing."""
    if format == "dcp":
        dcp_format.import_modules()
    if format == "orbax":
        library("tensorstore", "orbax-checkpoint")
        if "jax" in sys.modules:
            library("orbax.checkpoint", "orbax-checkpoint")


def is_shared(path: str | os.PathLike[str], world: World) -> bool:
    """Whether all processes see the files that one of them writes there: not on disks of single nodes."""
    if world.size == 1:
        return True
    folder = folder_of(path)
    # A file is the only test that holds for every mount: names of file systems and hosts do not tell.
    probe = world.from_first(f".probe-{secrets.token_hex(8)}", "the folder of checkpoints")
    if world.rank == 0:
        write_bytes(folder, probe, b"")
    world.barrier("the folder of checkpoints")
    seen: list[bool] = world.exchange(folder.exists(probe), "the folder of checkpoints")
    if world.rank == 0:
        folder.remove(probe)
    return all(seen)


def is_part(name: str) -> bool:
    """Whether a save wrote the file of parts, or the folder of another library, with this name."""
    return SAVED.fullmatch(name) is not None


def part_name(rank: int, size: int, token: str) -> str:
    return f"part-{rank:05}-of-{size:05}-{token}.safetensors"


def write_part(folder: Folder, name: str, tensors: Mapping[str, PartedTensor], save_id: str) -> int:
    """Write the parts of this process; return the checksum of the header, which contains those of the parts."""
    header: dict[str, Any] = {}
    index: dict[str, Any] = {}
    offset = 0
    for tensor in tensors.values():
        parts = []
        for part in tensor.parts:
            data = part.load()
            shape = list(data.shape)
            place = {"dtype": CODES[data.dtype.name], "shape": shape, "data_offsets": [offset, offset + data.nbytes]}
            header[part_key(tensor.name, part.start)] = place
            parts.append([list(part.start), shape, offset, checksum(data)])
            offset += data.nbytes
        index[tensor.name] = {"shape": list(tensor.shape), "dtype": tensor.dtype.name, "parts": parts}
    header["__metadata__"] = {"format": FORMAT, "id": save_id, "index": json.dumps(index)}
    text = json.dumps(header).encode()
    # As the library of safetensors does: the bytes of tensors then begin at a multiple of 8.
    text += b" " * (-len(text) % 8)

    def fill(file: BinaryIO) -> None:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
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
        self._latest = Latest()
        if name := self.commit.get("library"):
            self._require(name)
            tensors, _ = read_library(f"{self.folder}/{name}")
            self.tensors = {n: replace(t, parts=[self._checked(n, p) for p in t.parts]) for n, t in tensors.items()}
        for name, crc in self.commit["parts"].items():
            if self.folder.exists(name):
                self._read_header(name, crc)
            elif self.commit.get("shared"):  # on disks of nodes the parts of others are absent
                self._require(name)
        if not self.tensors and self.commit["parts"]:
            raise DamagedError(
                f"'{self.folder}' does not contain a complete checkpoint", facts=["all parts are missing"]
            )

    def _require(self, name: str) -> None:
        if not self.folder.exists(name):
            raise DamagedError(
                f"'{self.folder}' does not contain a complete checkpoint", facts=[f"'{name}' is missing"]
            )

    def _checked(self, tensor: str, part: Part) -> Part:
        """Return the part of another library, checked by the checksum of the commit when it is read."""

        def load() -> Array:
            data = part.load()
            if checksum(data) != self.commit["checksums"].get(part_key(tensor, part.start)):
                raise DamagedError(f"'{self.folder}' is damaged", facts=[f"the checksum of '{tensor}' is wrong"])
            return data

        return replace(part, load=load)

    def _read_header(self, name: str, crc: int) -> None:
        with self.folder.open(name) as file:
            size, end = int.from_bytes(file.read(8), "little"), file.seek(0, os.SEEK_END)
            file.seek(8)
            # A damaged length must not allocate more than the file has.
            text = file.read(size) if size <= end else b""
        if zlib.crc32(text) != crc:
            raise DamagedError(f"'{self.folder}/{name}' is damaged", facts=["the checksum of its header is wrong"])
        with damaged(f"{self.folder}/{name}"):
            index = parsed(text, "its header")["__metadata__"]["index"]
            for tensor, entry in parsed(index, "its index").items():
                shape, dtype = _sizes(entry["shape"]), _dtype(entry["dtype"])
                old = self.tensors.get(tensor, PartedTensor(tensor, shape, dtype, ()))
                # Processes of one node may have written the same part.
                starts = {part.start for part in old.parts}
                new = [
                    Part(_sizes(start), tuple(n), partial(self._part, name, tensor, place, tuple(n), dtype, check))
                    for start, n, offset, check in entry["parts"]
                    for place in [_place(8 + size + offset, n, dtype, end, tensor)]
                    if tuple(start) not in starts
                ]
                self.tensors[tensor] = PartedTensor(tensor, shape, dtype, (*old.parts, *new))

    def verify(self, rank: int, size: int) -> None:
        """Read the parts that this process has to check, so that all processes together check all."""
        for tensor in self.tensors.values():
            for part in tensor.parts[rank::size] if self.commit.get("shared") else tensor.parts:
                part.load()

    def _part(
        self, name: str, tensor: str, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any], expected: int
    ) -> Array:
        def read() -> Array:
            array = np.empty(shape, dtype)
            with self.folder.open(name) as file:
                file.seek(offset)
                count = file.readinto(_bytes(array))  # type: ignore[attr-defined]
            if count != array.nbytes or checksum(array) != expected:
                raise DamagedError(f"'{self.folder}/{name}' is damaged", facts=[f"the checksum of '{tensor}' is wrong"])
            return array

        return self._latest.get((name, offset), read)


def _dtype(name: Any) -> np.dtype[Any]:
    if name not in CODES:
        raise ValueError(f"it has elements of {name!s:.60}")
    return np.dtype(as_dtype(name).numpy)


def _sizes(sizes: Any) -> tuple[int, ...]:
    if not isinstance(sizes, list) or not all(type(n) is int and n >= 0 for n in sizes):
        raise ValueError(f"{str(sizes)[:100]} is not a list of sizes")
    return tuple(sizes)


def _place(offset: int, sizes: Sequence[int], dtype: np.dtype[Any], end: int, tensor: str) -> int:
    """Return the offset of a part; raise ValueError if its bytes are not in the file, before any are allocated."""
    _sizes([offset, *sizes])
    if offset + math.prod(sizes) * dtype.itemsize > end:
        raise ValueError(f"the part {sizes} of '{tensor}' ends outside of the file of {end} bytes")
    return offset


def read_library(path: str | os.PathLike[str]) -> tuple[dict[str, PartedTensor], dict[str, Any]]:
    """Return the tensors of a folder of another library, whose files tell which one wrote it, and its progress."""
    folder = folder_of(path)
    if folder.exists(dcp_format.RECORDS):
        return dcp_format.read(path)
    if any(folder.exists(name) for name in orbax_format.NAMES):
        return orbax_format.read(path)
    raise InputError(
        f"'{path}' is a checkpoint neither of Orbax nor of torch.distributed.checkpoint",
        hint="pass the folder that contains '_CHECKPOINT_METADATA' or '.metadata'; "
        "ml.load_sharded reads folders of ml.save_sharded",
    )


def read_commit(folder: Folder) -> dict[str, Any]:
    """Return the commit of a folder; raise if it is not a committed checkpoint."""
    if not folder.exists(COMMIT):
        state = "a save that did not finish" if any(map(PART.fullmatch, folder.names())) else "no parts"
        raise DamagedError(f"'{folder}' does not contain a complete checkpoint", facts=[f"it contains {state}"])
    with damaged(f"{folder}/{COMMIT}"):
        commit: dict[str, Any] = parsed(read_bytes(folder, COMMIT), "its content")
        if commit.get("format") != FORMAT:
            raise InputError(f"'{folder}' has the format {commit.get('format')!r:.100}, expected {FORMAT!r}")
        parts, library = commit["parts"], commit.get("library")
        expected = {"id": str, "metadata": dict, "parts": dict} | (
            {"checksums": dict, "library": str} if library else {}
        )
        for name, kind in expected.items():
            if not isinstance(commit[name], kind):
                raise ValueError(f"'{name}' is a {type(commit[name]).__name__}, expected a {kind.__name__}")
        for name in [*parts, *([library] if library else [])]:
            if not PART.fullmatch(name):
                raise ValueError(f"{name[:100]!r} is not a name of a part of a checkpoint")
    return commit
