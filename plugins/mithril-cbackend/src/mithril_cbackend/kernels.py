"""The public names for plugins that write kernels of this backend: ``mithril_lowerings("c")``.

``KernelBuilder`` has the parameters of a kernel and a ``Reader`` of elements, ``tir`` the expressions and statements.
"""

from __future__ import annotations

from typing import Protocol

from mithril_cbackend import tir
from mithril_cbackend.lowering.element.element_reader import Index, Reader, operand, shape_of
from mithril_cbackend.lowering.element.kernel import Kernel
from mithril_cbackend.lowering.element.kernel_builder import KernelBuilder, Machine
from mithril_cbackend.tir import Function

__all__ = [
    "Function",
    "Index",
    "Kernel",
    "KernelBuilder",
    "KernelWriter",
    "Machine",
    "Reader",
    "operand",
    "shape_of",
    "tir",
]


class KernelWriter(Protocol):
    """A writer of a kernel: returns the function called ``name`` that computes the node ``kernel.anchor``."""

    def __call__(self, kernel: Kernel, name: str, machine: Machine) -> Function: ...
