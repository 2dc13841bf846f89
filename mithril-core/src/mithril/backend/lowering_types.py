"""Types of the functions that ``Lowering`` names; those of ``ggml`` and ``c`` are in the modules of these backends."""

from __future__ import annotations

from typing import Any, Protocol

from mithril.backend.codegen.call import Call
from mithril.ir import Node


class ArrayKernel(Protocol):
    """A kernel: parameters are named like operands and attributes; returns an array, or a tuple of all results."""

    def __call__(self, *arguments: Any, **attributes: Any) -> Any: ...


class TextWriter(Protocol):
    """A writer of Python: returns an expression, or None after writing lines that assign to ``call.results``."""

    def __call__(self, call: Call) -> str | None: ...


class Condition(Protocol):
    """A predicate of the node, for ``Lowering(when=)``."""

    def __call__(self, node: Node, /) -> bool: ...
