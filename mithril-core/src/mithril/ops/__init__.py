"""Every operation, declared once; a file per family.

``from mithril.ops import exp, matmul`` gives operations by name; calling one with graph values appends a node, with
NumPy arrays computes the meaning.
"""

from __future__ import annotations

from typing import Any

from mithril.ir import Op, binary, composite, op, unary
from mithril.ops import (  # noqa: F401
    activations,
    attention_ops,
    basic,
    convolution,
    creation,
    dynamic_slices,
    elementwise,
    indexing,
    losses,
    nn,
    norms,
    padding,
    pool,
    products,
    python_indexing,
    quantization,
    random,
    reduction,
    shape,
    slicing,
    sorting,
)
from mithril.ops.control_flow import BOUNDED, PLACES, cond, if_op, scan, scan_op, while_loop, while_op
from mithril.ops.creation import size_value
from mithril.ops.elementwise import CENTRAL, TAIL
from mithril.ops.nn import ACTIVATIONS
from mithril.ops.python_indexing import getitem
from mithril.ops.random import threefry
from mithril.ops.row_independence import first_mixed
from mithril.ops.shape import spread

__all__ = [
    "ACTIVATIONS",
    "BOUNDED",
    "CENTRAL",
    "PLACES",
    "TAIL",
    "Op",
    "binary",
    "composite",
    "cond",
    "first_mixed",
    "getitem",
    "if_op",
    "op",
    "scan",
    "scan_op",
    "size_value",
    "spread",
    "threefry",
    "unary",
    "while_loop",
    "while_op",
]


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    from mithril.base import OperationError, operation

    try:
        return operation(name)
    except OperationError as error:
        raise AttributeError(str(error)) from None


def __dir__() -> list[str]:
    """Operations by name, those of installed plugins included."""
    from mithril.base import operations

    return sorted({*globals(), *operations()})
