"""Checkpoints on disk: one safetensors file of complete arrays, or a folder of parts; the list of a folder's."""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mithril.compiler import load_file
from mithril.graph import InputError
from mithril.system import files
from mithril_parallel.processes import World
from mithril_parallel.sharding.checkpoint import COMMIT, Reader, is_part, read_commit
from mithril_parallel.sharding.storage import DamagedError, Folder, LocalFolder, folder_of, parsed
from mithril_parallel.sharding.tensor_parts import PartedTensor

FORMAT = "mithril-training-1"
NAME = re.compile(r"step-(\d+)(\.safetensors)?")
Tensors = Mapping[str, np.ndarray[Any, Any] | PartedTensor]


@dataclass(frozen=True)
class Candidate:
    """A complete checkpoint in a folder; ``id`` distinguishes two saves of the same step."""

    step: int
    id: str
    path: str


def write(
    path: str | os.PathLike[str], tensors: Mapping[str, np.ndarray[Any, Any]], progress: Mapping[str, Any]
) -> None:
    """Write a checkpoint atomically: a killed process or a power failure leaves the old file unchanged."""
    from safetensors.numpy import save

    target = Path(path)
    arrays = {n: np.array(a, order="C") for n, a in tensors.items()}
    sums = {n: zlib.crc32(a.tobytes()) for n, a in arrays.items()}
    data = save(arrays, {"format": FORMAT, "about": json.dumps(progress), "checksums": json.dumps(sums)})
    LocalFolder(target.parent).write(target.name, lambda file: file.write(data))


def read(path: str | os.PathLike[str]) -> tuple[Tensors, dict[str, Any]]:
    """Read the tensors and the progress of training; those of a folder are read when they are needed."""
    if is_folder(path):
        reader = Reader(path)
        return reader.tensors, reader.metadata
    from safetensors import safe_open

    text = os.fspath(path)
    try:
        tensors = load_file(path)
    except InputError as error:
        if os.path.exists(path):
            raise DamagedError(str(error).partition("\n")[0]) from None
        raise
    with safe_open(path, "numpy") as file:
        header = file.metadata() or {}
    if header.get("format") != FORMAT:
        raise InputError(
            f"'{text}' is not a training checkpoint",
            facts=[f"its format is {header.get('format', 'not said')}, expected {FORMAT}"],
            hint="compiled.load(path) reads files of parameters alone",
        )
    for name, checksum in parsed(header.get("checksums", "{}"), "the checksums").items():
        if zlib.crc32(tensors[name].tobytes()) != checksum:
            raise DamagedError(f"'{text}' is damaged", facts=[f"the checksum of '{name}' is wrong"])
    return tensors, parsed(header["about"], "the progress")


def verify(path: str, world: World) -> None:
    """Raise DamagedError if a folder lacks parts or their bytes have changed; a file is checked when it is read."""
    if is_folder(path):
        Reader(path).verify(world.rank, world.size)


def is_folder(path: str | os.PathLike[str]) -> bool:
    """Whether the path is a folder of parts, not a file."""
    return folder_of(path).exists(COMMIT) or not os.fspath(path).endswith(".safetensors")


def candidates(folder: str | os.PathLike[str]) -> list[Candidate]:
    """Return the complete checkpoints of a folder, the latest first."""
    root, checkpoints = folder_of(folder), []
    for name in root.names():
        if match := NAME.fullmatch(name):
            if match[2] and _is_other(root, name):
                continue
            try:
                identity = match[1] if match[2] else read_commit(root / name)["id"]
            except InputError:
                continue  # a save that did not finish
            checkpoints.append(Candidate(int(match[1]), identity, f"{os.fspath(folder)}/{name}"))
    return sorted(checkpoints, key=lambda c: (-c.step, c.id))


def _is_other(root: Folder, name: str) -> bool:
    """Whether an intact file is not a checkpoint, such as parameters that the user saved under the name of one."""
    try:
        with root.open(name) as file:
            size, end = int.from_bytes(file.read(8), "little"), file.seek(0, os.SEEK_END)
            file.seek(8)
            text = file.read(size) if size <= end else b""  # a damaged length must not allocate more than the file has
        return bool(json.loads(text).get("__metadata__", {}).get("format") != FORMAT)
    except (InputError, ValueError, AttributeError):
        return False  # damaged, not readable, or removed by another process: who resumes must hear of it


def remove(candidate: Candidate) -> None:
    """Remove a checkpoint; of a folder first its commit, so that it never counts without its parts."""
    root, _, name = candidate.path.rpartition("/")
    if not name.endswith(".safetensors"):
        folder = folder_of(candidate.path)
        folder.remove(COMMIT)
        for part in filter(_is_saved, folder.names()):
            folder.remove(part)
        if folder.names():  # files of the user
            return
    folder_of(root).remove(name)


def remove_unfinished(folder: str | os.PathLike[str]) -> None:
    """Remove the files and folders of saves that did not finish; no process may be saving."""
    root = folder_of(folder)
    for name in root.names():
        is_file = files.PART.fullmatch(name) and name.startswith((".step-", ".best."))
        is_folder = name == "best" or (NAME.fullmatch(name) and not name.endswith(".safetensors"))
        if is_file or (is_folder and _is_unfinished(root / name)):
            root.remove(name)


def _is_unfinished(folder: Folder) -> bool:
    """Whether a folder has parts and no commit; one that contains anything else belongs to the user."""
    names = folder.names()
    return bool(names) and all(map(_is_saved, names))


def _is_saved(name: str) -> bool:
    """Whether a save writes files or folders with such a name to a folder of parts, other than the commit."""
    return is_part(name) or files.PART.fullmatch(name) is not None


def is_checkpoint(path: str) -> bool:
    """Whether the path is one checkpoint, not a folder of several."""
    root, _, name = path.rstrip("/").rpartition("/")
    return folder_of(path).exists(COMMIT) or (path.endswith(".safetensors") and folder_of(root or ".").exists(name))


def exists(path: str) -> bool:
    root, _, name = path.rstrip("/").rpartition("/")
    return folder_of(root or "/").exists(name)
