"""Checkpoints of Orbax and of ``torch.distributed.checkpoint``, written from folders in parts and read into them.

A folder in parts depends on neither the mesh nor the engine, so that only programs without mithril need the others.
The conversion runs in one process and holds the complete arrays in its memory.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import numpy as np

from mithril.base import InputError, PluginError
from mithril_parallel.processes import World
from mithril_parallel.sharding.checkpoint import Reader, begin_save
from mithril_parallel.sharding.tensor_parts import Array

PathLike = str | os.PathLike[str]
METADATA = "mithril"  # name of the progress of training among the tensors of PyTorch, and of an item of Orbax
ARRAYS = "state"  # name of the item of Orbax


def export_checkpoint(folder: PathLike, path: PathLike, format: Literal["orbax", "dcp"]) -> None:
    """Write a folder in parts as a new checkpoint of Orbax or of ``torch.distributed.checkpoint``."""
    reader = Reader(folder)
    target = Path(path).absolute()
    if target.exists():
        raise InputError(f"'{path}' exists already", hint="export to a new path")
    arrays = {name: tensor.read() for name, tensor in reader.tensors.items()}
    write = {"orbax": _write_orbax, "dcp": _write_dcp}.get(format)
    if write is None:
        raise InputError(f"format={format!r}, expected 'orbax' or 'dcp'")
    write(target, arrays, reader.metadata)


def import_checkpoint(path: PathLike, folder: PathLike) -> None:
    """Write a checkpoint of Orbax or of ``torch.distributed.checkpoint`` as a folder in parts.

    The names of nested arrays are joined by dots.
    """
    source = Path(path).absolute()
    if (source / ".metadata").exists():
        arrays, metadata = _read_dcp(source)
    elif any((source / name).exists() for name in ("_CHECKPOINT_METADATA", "_METADATA", ARRAYS)):
        arrays, metadata = _read_orbax(source)
    else:
        raise InputError(f"'{path}' is a checkpoint neither of Orbax nor of torch.distributed.checkpoint")
    begin_save(folder, arrays, metadata, World()).finish()


def _library(name: str, package: str) -> Any:
    try:
        return import_module(name)
    except ImportError:
        raise PluginError(f"this format needs {package}", hint=f"pip install {package}") from None


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Silence the libraries: that one process saves, and that it reads complete arrays, is intended."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


# -- torch.distributed.checkpoint -------------------------------------------------------------------------------------
def _write_dcp(path: Path, arrays: Mapping[str, Array], metadata: Mapping[str, Any]) -> None:
    dcp, torch = _library("torch.distributed.checkpoint", "torch"), _library("torch", "torch")
    state: dict[str, Any] = {name: _tensor(torch, x) for name, x in arrays.items()}
    with _without_warnings():
        dcp.save({**state, METADATA: json.dumps(metadata)}, checkpoint_id=path, no_dist=True)


def _tensor(torch: Any, x: Array) -> Any:
    if x.dtype.name == "bfloat16":  # which PyTorch does not read from NumPy
        return torch.from_numpy(x.view(np.uint16).copy()).view(torch.bfloat16)
    return torch.from_numpy(x)


def _read_dcp(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    dcp, torch = _library("torch.distributed.checkpoint", "torch"), _library("torch", "torch")
    entries = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
        if hasattr(entry, "size")
    }
    if METADATA in entries:
        state[METADATA] = ""
    with _without_warnings():
        dcp.load(state, checkpoint_id=path, no_dist=True)
    text = state.pop(METADATA, "{}")
    return state, json.loads(text)


# -- Orbax ------------------------------------------------------------------------------------------------------------
def _write_orbax(path: Path, arrays: Mapping[str, Array], metadata: Mapping[str, Any]) -> None:
    ocp = _library("orbax.checkpoint", "orbax-checkpoint")
    items = {ARRAYS: ocp.args.StandardSave(dict(arrays)), METADATA: ocp.args.JsonSave(dict(metadata))}
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer, _without_warnings():
        checkpointer.save(path, args=ocp.args.Composite(**items))


def _read_orbax(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    ocp = _library("orbax.checkpoint", "orbax-checkpoint")
    metadata: dict[str, Any] = {}
    if (path / METADATA).exists():
        with ocp.Checkpointer(ocp.JsonCheckpointHandler()) as checkpointer:
            metadata = checkpointer.restore(path / METADATA)
    arrays = path / ARRAYS if (path / ARRAYS).exists() else path
    with ocp.PyTreeCheckpointer() as checkpointer:
        kinds = checkpointer.metadata(arrays).item_metadata.tree
        arguments = _mapped(kinds, lambda _: ocp.RestoreArgs(restore_type=np.ndarray))
        with _without_warnings():
            tree = checkpointer.restore(arrays, restore_args=arguments)
    return dict(_flat(tree)), metadata


def _mapped(tree: Any, function: Any) -> Any:
    if isinstance(tree, Mapping):
        return {name: _mapped(x, function) for name, x in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [_mapped(x, function) for x in tree]
    return function(tree)


def _flat(tree: Any, prefix: str = "") -> Iterator[tuple[str, Array]]:
    if isinstance(tree, Mapping):
        items = [(str(name), x) for name, x in tree.items()]
    elif isinstance(tree, (list, tuple)):
        items = [(str(k), x) for k, x in enumerate(tree)]
    else:
        yield prefix, np.asarray(tree)
        return
    for name, x in items:
        yield from _flat(x, f"{prefix}.{name}" if prefix else name)
