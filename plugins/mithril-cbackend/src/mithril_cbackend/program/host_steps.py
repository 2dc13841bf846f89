"""Steps of a program that run as Python functions of NumPy arrays, called back from the driver.

The driver can call only functions of the C library, by name. ``bsearch`` over one element calls its comparison function
once with its key pointer, here the address of a list of array addresses.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from mithril.backend import host_function
from mithril.graph import Node
from mithril_cbackend.graph.foreign import plugin_lowering
from mithril_cbackend.lowering.element.element_reader import shape_of

CALLER = "bsearch"
Callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


class HostStep:
    """A node as a C function pointer; its first exception is stored in ``failures`` until the program returns."""

    def __init__(self, node: Node, failures: list[BaseException]) -> None:
        self.node = node
        self.failures = failures
        self.is_fallback = plugin_lowering(node) is None
        self.function: Callable[..., Any] = host_function(node, plugin_lowering(node))
        self.callback = Callback(self._run)

    @property
    def address(self) -> int:
        """The address of the C function."""
        return ctypes.cast(self.callback, ctypes.c_void_p).value or 0

    def _run(self, addresses: int, _: int) -> int:
        if self.failures:
            return 0
        try:
            values = [v for v in (*self.node.operands, *self.node.results) if v is not None]
            words = (ctypes.c_int64 * len(values)).from_address(addresses)
            arrays = iter([_array(word, v) for word, v in zip(words, values, strict=True)])
            operands = [None if v is None else next(arrays) for v in self.node.operands]
            for x in operands:
                if x is not None:
                    x.flags.writeable = False
            for out, result in zip(arrays, self.function(*operands), strict=True):
                out[...] = result
        except BaseException as error:  # an exception cannot pass through machine code
            self.failures.append(error)
        return 0


def _array(address: int, value: Any) -> np.ndarray[Any, Any]:
    shape, dtype = shape_of(value), value.dtype.numpy
    size = math.prod(shape) * dtype.itemsize
    if size == 0:
        return np.zeros(shape, dtype)
    return np.frombuffer((ctypes.c_char * size).from_address(address), dtype).reshape(shape)
