"""Checkpoints: one safetensors file with all carried arrays, and the progress of training in its header."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mithril.base import InputError
from mithril.runtime import load_file
from mithril.system import files

FORMAT = "mithril-training-1"


def write(
    path: str | os.PathLike[str], tensors: Mapping[str, np.ndarray[Any, Any]], progress: Mapping[str, Any]
) -> Path:
    """Write a checkpoint atomically: a killed process or a power failure leaves the old file unchanged."""
    from safetensors.numpy import save_file

    target = Path(path)
    with files.parts(target, "checkpoint") as folder:
        part = folder / "part"
        header = {"format": FORMAT, "about": json.dumps(progress)}
        save_file({n: np.array(a, order="C") for n, a in tensors.items()}, part, header)
        with open(part, "rb+") as file:
            os.fsync(file.fileno())
        files.move(part, target)
    _sync_folder(target.parent)
    return target


def _sync_folder(folder: Path) -> None:
    """Make the renaming durable, if the platform supports it."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read(path: str | os.PathLike[str]) -> tuple[dict[str, np.ndarray[Any, Any]], dict[str, Any]]:
    """Read the tensors and the progress of training."""
    from safetensors import safe_open

    tensors = load_file(path)
    with safe_open(path, "numpy") as file:
        header = file.metadata() or {}
    if header.get("format") != FORMAT:
        raise InputError(
            f"'{os.fspath(path)}' is not a training checkpoint",
            facts=[f"its format is {header.get('format', 'not said')}, expected {FORMAT}"],
            hint="compiled.load(path) reads files of parameters alone",
        )
    return tensors, json.loads(header["about"])


def remove_old_checkpoints(folder: str | os.PathLike[str]) -> None:
    """Remove partial files that killed processes left behind."""
    for part in Path(folder).glob(".*.safetensors.*.part"):
        part.unlink(missing_ok=True)


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """Return the latest checkpoint in a directory, by the step in its name, or None."""
    paths = sorted(Path(folder).glob("step-*.safetensors"), key=lambda p: int(p.stem.split("-")[1]))
    return paths[-1] if paths else None
