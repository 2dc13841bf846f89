"""Field offsets of NumPy array objects, to read addresses without calling NumPy.

The offsets are part of NumPy's ABI. They are checked on import; if they do not hold, addresses are queried from NumPy.
"""

# A file of its own: a program from the cache reads addresses, and must not import TVM for it.

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

# Bytes from the beginning of the object.
CLASS, DATA, RANK, DIMENSIONS, DTYPE, FLAGS = 8, 16, 24, 32, 56, 64
SIZE = 72
IN_C_ORDER = 1  # a flag

_long, _int = ctypes.c_int64.from_address, ctypes.c_int32.from_address


def _holds() -> bool:
    # Offsets of CPython on 64-bit machines; a build with free threading or of another implementation
    # has other ones.
    if object.__basicsize__ != DATA or sys.implementation.name != "cpython" or ctypes.sizeof(ctypes.c_void_p) != 8:
        return False
    # The layout is tested on arrays that differ in each field, since NumPy does not promise it.
    probes: list[np.ndarray[Any, Any]] = [
        np.zeros(3),
        np.zeros((2, 5), np.int8)[1:, :3],
        np.zeros((), np.float32),
        np.zeros((4, 2, 3)).T,
    ]
    return all(map(_layout_matches, probes))


def _layout_matches(x: np.ndarray[Any, Any]) -> bool:
    address = id(x)
    dimensions = _long(address + DIMENSIONS).value
    return (
        _long(address + CLASS).value == id(np.ndarray)
        and _long(address + DATA).value == x.ctypes.data
        and _int(address + RANK).value == x.ndim
        and all(_long(dimensions + 8 * k).value == n for k, n in enumerate(x.shape))
        and _long(address + DTYPE).value == id(x.dtype)
        and bool(_int(address + FLAGS).value & IN_C_ORDER) == x.flags.c_contiguous
    )


KNOWN = _holds()


def _read(x: np.ndarray[Any, Any]) -> int:
    return _long(id(x) + DATA).value


def _query(x: np.ndarray[Any, Any]) -> int:
    return x.ctypes.data


address_of: Callable[[np.ndarray[Any, Any]], int] = _read if KNOWN else _query  # reading is 10x faster
