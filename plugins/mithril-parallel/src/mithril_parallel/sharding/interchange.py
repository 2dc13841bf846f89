"""Checkpoints of Orbax and of ``torch.distributed.checkpoint``, written from folders in parts and read into them.

A folder in parts depends on neither the mesh nor the engine. Several processes share the conversion: each reads and
writes some parts, one at a time. Paths may have a protocol of fsspec, such as ``s3://bucket/run``.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from mithril.graph import InputError
from mithril_parallel.processes import World, current_world
from mithril_parallel.sharding import dcp_format, zarr_format
from mithril_parallel.sharding.checkpoint import Reader, begin_save, read_library, write_by
from mithril_parallel.sharding.storage import folder_of
from mithril_parallel.sharding.tensor_parts import PartedTensor

PathLike = str | os.PathLike[str]


def export_checkpoint(folder: PathLike, path: PathLike, format: Literal["orbax", "dcp"]) -> None:
    """Write a folder in parts as a new checkpoint of Orbax or of ``torch.distributed.checkpoint``.

    All processes must call it.
    """
    reader, world = Reader(folder), current_world()
    if format not in ("orbax", "dcp"):
        raise InputError(f"format={format!r}, expected 'orbax' or 'dcp'")
    target = folder_of(path)
    if world.from_first(target.is_file() or bool(target.names()), "the path of an exported checkpoint"):
        raise InputError(f"'{path}' exists already", hint="export to a new path")
    writer: zarr_format.ZarrWriter | dcp_format.DcpWriter
    if format == "orbax":
        cells = {n: zarr_format.gridded(t, world) for n, t in reader.tensors.items()}
        writer = zarr_format.ZarrWriter(target, cells, reader.metadata, world)
    else:
        writer = dcp_format.DcpWriter(str(target), _shared_out(reader.tensors, world), reader.metadata, world)
    token = world.from_first(secrets.token_hex(8), "the start of an export")
    write_by(writer, world, f"export/{token}", f"the export to '{path}'")


def import_checkpoint(path: PathLike, folder: PathLike) -> None:
    """Write a checkpoint of Orbax or of ``torch.distributed.checkpoint`` as a folder in parts.

    The names of nested arrays are joined by dots. All processes must call it.
    """
    tensors, metadata = read_library(path)
    world = current_world()
    begin_save(folder, _shared_out(tensors, world), metadata, world).finish()


def _shared_out(tensors: Mapping[str, PartedTensor], world: World) -> dict[str, PartedTensor]:
    """Return the parts that this process converts."""
    return {n: replace(t, parts=t.parts[world.rank :: world.size]) for n, t in tensors.items()}
