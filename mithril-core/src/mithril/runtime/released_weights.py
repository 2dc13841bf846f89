"""Weights whose owner gives them up: moved to a temporary file one by one, and mapped."""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import MutableMapping
from typing import Any

import numpy as np

from mithril.backend import ALIGNMENT, to_numpy
from mithril.base import OptionError
from mithril.system import Store


def moved_to_file(params: MutableMapping[str, Any], folder: str | None) -> dict[str, np.ndarray[Any, Any]]:
    """Move arrays out of a mapping to a file without a name, and return them as read-only views of it."""
    target = Store(folder).folder
    try:
        target.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=target) as file:
            places = {}
            for name in list(params):
                array = np.asarray(to_numpy(params[name]), order="C")
                file.write(bytes(-file.tell() % ALIGNMENT))
                places[name] = file.tell(), array.dtype, array.shape
                file.write(array.reshape(-1).view(np.uint8).data)
                del params[name], array
            file.write(bytes(1))  # an empty file cannot be mapped
            file.flush()
            view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise OptionError(
            f"release=True cannot store weights in '{target}': {error.strerror or error}",
            hint="pass cache_dir= with a folder that has enough space",
        ) from None
    return {
        name: np.frombuffer(view, dtype, int(np.prod(shape)), start).reshape(shape)
        for name, (start, dtype, shape) in places.items()
    }
