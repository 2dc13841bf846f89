"""Every operation, declared once; a file per family.

``from mithril.ops import exp, matmul`` gives operations by name; calling one with graph values appends a node, with
NumPy arrays computes the meaning.
"""

from __future__ import annotations

from typing import Any

from mithril.ir.core import Op
from mithril.ir.declare import binary, composite, op, unary
from mithril.ops import (  # noqa: F401
    activations,
    attention_ops,
    basic,
    convolution,
    dynamic_slices,
    elementwise,
    indexing,
    losses,
    nn,
    norms,
    pool,
    products,
    quantization,
    random,
    reduction,
    shape,
    slicing,
    sorting,
)
from mithril.ops.control_flow import cond, scan, while_loop

__all__ = ["Op", "binary", "composite", "cond", "op", "scan", "unary", "while_loop"]


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    from mithril.base.errors import OperationError
    from mithril.base.registry import operation

    try:
        return operation(name)
    except OperationError as error:
        raise AttributeError(str(error)) from None


def __dir__() -> list[str]:
    """Operations by name, those of installed plugins included."""
    from mithril.base.registry import operations

    return sorted({*globals(), *operations()})
