"""Checkpoints of Orbax and of ``torch.distributed.checkpoint``, written from folders in parts and read into them.

A folder in parts depends on neither the mesh nor the engine. Several processes share the conversion: each reads and
writes some parts. Only Orbax writes from arrays of JAX: one process then holds all of their parts.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

from mithril.base import InputError
from mithril_parallel.processes import World, current_world
from mithril_parallel.sharding import dcp_format, orbax_format
from mithril_parallel.sharding.checkpoint import Reader, begin_save, write_by
from mithril_parallel.sharding.tensor_parts import PartedTensor

PathLike = str | os.PathLike[str]


def export_checkpoint(folder: PathLike, path: PathLike, format: Literal["orbax", "dcp"]) -> None:
    """Write a folder in parts as a new checkpoint of Orbax or of ``torch.distributed.checkpoint``.

    All processes must call it.
    """
    reader, world = Reader(folder), current_world()
    if format not in ("orbax", "dcp"):
        raise InputError(f"format={format!r}, expected 'orbax' or 'dcp'")
    target = Path(path).absolute()
    if world.from_first(target.exists(), "the path of an exported checkpoint"):
        raise InputError(f"'{path}' exists already", hint="export to a new path")
    writer: orbax_format.OrbaxWriter | dcp_format.DcpWriter
    if format == "orbax":
        writer = orbax_format.OrbaxWriter(str(target), orbax_format.in_jax(reader.tensors), reader.metadata, world)
    else:
        writer = dcp_format.DcpWriter(str(target), _shared_out(reader.tensors, world), reader.metadata, world)
    token = world.from_first(secrets.token_hex(8), "the start of an export")
    write_by(writer, world, f"export/{token}", f"the export to '{path}'")


def import_checkpoint(path: PathLike, folder: PathLike) -> None:
    """Write a checkpoint of Orbax or of ``torch.distributed.checkpoint`` as a folder in parts.

    The names of nested arrays are joined by dots. All processes must call it.
    """
    source = Path(path).absolute()
    if (source / ".metadata").exists():
        tensors, metadata = dcp_format.read(source)
    elif any((source / name).exists() for name in ("_CHECKPOINT_METADATA", "_METADATA", orbax_format.ARRAYS)):
        tensors, metadata = orbax_format.read(source)
    else:
        raise InputError(
            f"'{path}' is a checkpoint neither of Orbax nor of torch.distributed.checkpoint",
            hint="pass the folder that contains '_CHECKPOINT_METADATA' or '.metadata'; "
            "ml.load_sharded reads folders of ml.save_sharded",
        )
    world = current_world()
    begin_save(folder, _shared_out(tensors, world), metadata, world).finish()


def _shared_out(tensors: Mapping[str, PartedTensor], world: World) -> dict[str, PartedTensor]:
    """Return the parts that this process converts."""
    return {n: replace(t, parts=t.parts[world.rank :: world.size]) for n, t in tensors.items()}
