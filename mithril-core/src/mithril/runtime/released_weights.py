"""Weights whose owner gives them up: moved to a temporary file one by one, and mapped."""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import tempfile
from collections.abc import MutableMapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from mithril.backend import ALIGNMENT, to_numpy
from mithril.base import OptionError
from mithril.system import Store


def moved_to_file(params: MutableMapping[str, Any], folder: str | None) -> dict[str, np.ndarray[Any, Any]]:
    """Move arrays out of a mapping to a file without a name, and return them as read-only views of it."""
    target = Store(folder).folder
    places: dict[str, tuple[int, Any, tuple[int, ...]]] = {}
    size = 0
    for name in params:
        array = to_numpy(params[name])
        places[name] = size, array.dtype, array.shape
        size += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
    try:
        target.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=target) as file:
            _reserve(file, target, max(size, 1))  # an empty file cannot be mapped
            view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            for name, (start, _, _) in places.items():
                file.seek(start)
                file.write(np.asarray(to_numpy(params[name]), order="C").reshape(-1).view(np.uint8).data)
                del params[name]
    except OSError as error:
        raise OptionError(
            f"release=True cannot store weights in '{target}': {error.strerror or error}",
            hint="pass cache_dir= with a folder that has enough space",
        ) from None
    return {
        name: np.frombuffer(view, dtype, int(np.prod(shape)), start).reshape(shape)
        for name, (start, dtype, shape) in places.items()
    }


def _reserve(file: IO[bytes], folder: Path, size: int) -> None:
    """Give a file its size and its space, so that a full disk is noticed before the first array is deleted."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file.fileno(), 0, size)
    elif shutil.disk_usage(folder).free < size:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    else:
        file.truncate(size)
