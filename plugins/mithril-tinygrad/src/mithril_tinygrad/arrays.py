"""Arrays: realized tensors of tinygrad on the CPU, each with a buffer of its own."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from tinygrad import Tensor, dtypes
from tinygrad.device import Buffer
from tinygrad.helpers import getenv
from tinygrad.uop.ops import UOp

from mithril.graph import BackendError

DEVICE = "CPU"


@cache
def clang() -> tuple[str, Any]:
    """Let tinygrad find a clang, that of ziglang where none is installed; return its path and the folder to keep."""
    setting, folder, zig = os.environ.get("CC", ""), None, find_spec("ziglang")
    path = shutil.which(setting if "clang" in setting else "clang")
    if path is None and zig is not None and zig.origin is not None:
        folder = tempfile.TemporaryDirectory(prefix="mithril-tinygrad-")
        script = Path(folder.name, "clang")
        script.write_text(f'#!/bin/sh\nexec "{Path(zig.origin).with_name("zig")}" clang "$@"\n')
        script.chmod(0o755)
        path = str(script)
    if path is None:
        raise BackendError(
            "tinygrad compiles for the CPU with clang, which is not installed",
            hint='apt install clang, or pip install "mithril-tinygrad[clang]", which has it from ziglang',
        )
    with patch.dict(os.environ, CC=path):  # tinygrad 0.14 keeps the first value that it reads
        getenv.cache_clear()
        getenv("CC", "clang")
    return path, folder


def empty(shape: Sequence[int], dtype: Any) -> Tensor:
    """Return a tensor with a new buffer; ``Tensor.empty`` takes twice as long and allocates later."""
    if 0 in shape:
        return Tensor.empty(*shape, dtype=dtype, device=DEVICE)
    return Tensor(UOp.from_buffer(Buffer(DEVICE, math.prod(shape), dtype, preallocate=True)).reshape(tuple(shape)))


def of_numpy(array: Any) -> Tensor:
    """Return a copy as a tensor."""
    array = np.asarray(array, order="C")
    result = empty(array.shape, getattr(dtypes, array.dtype.name))
    if array.size:
        result.uop.buffer.as_memoryview(force_zero_copy=True)[:] = array.reshape(-1).view(np.uint8).data
    return result


def copied(x: Tensor) -> Tensor:
    """Return a copy in a buffer of its own."""
    return empty(x.shape, x.dtype).assign(x).realize() if 0 not in x.shape else x


def in_buffer(x: Tensor) -> Tensor:
    """Return a tensor that is all of a buffer: ``x``, or its copy."""
    return x if x.uop.is_realized and x.uop.has_buffer_identity() else copied(x)
