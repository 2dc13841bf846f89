"""Operations, each declared once, with one file per family.

``from mithril.ops import exp, matmul`` imports operations by name. Called with graph values, an operation appends a
node; called with NumPy arrays, it computes the reference result.
"""

from __future__ import annotations

from typing import Any

from mithril.graph import Op, binary, composite, op, unary
from mithril.ops import (  # noqa: F401
    activations,
    alignment,
    along_axis,
    attention_ops,
    basic,
    boxes,
    convolution,
    counting,
    creation,
    cumulative,
    dynamic_slices,
    elementwise,
    error_functions,
    expert_products,
    imbalance_losses,
    indexing,
    linalg,
    losses,
    nn,
    norms,
    padding,
    pair_losses,
    pool,
    products,
    python_indexing,
    quantization,
    random,
    reduction,
    resizing,
    sampling,
    scatter_reductions,
    shape,
    slicing,
    sorting,
    sparse,
    spectral,
)
from mithril.ops.control_flow import BOUNDED, PLACES, cond, if_op, scan, scan_op, while_loop, while_op
from mithril.ops.creation import size_value
from mithril.ops.derived_gradients import BY_KERNEL, BodyGradient
from mithril.ops.draws import Draws
from mithril.ops.elementwise import CENTRAL, TAIL
from mithril.ops.error_functions import scaled_erfc
from mithril.ops.expert_products import sum_of_shares, used_experts
from mithril.ops.folding import FOLD_LIMIT, is_foldable
from mithril.ops.nn import ACTIVATIONS, ANY_ACTIVATION
from mithril.ops.python_indexing import getitem
from mithril.ops.random import threefry
from mithril.ops.region_results import with_read_results, without_unread_parts
from mithril.ops.regions import Body, Region, as_tuple, close, name_outputs
from mithril.ops.row_independence import first_row_mixing_node
from mithril.ops.shape import spread
from mithril.ops.sparse import consistent_places

__all__ = [
    "ACTIVATIONS",
    "ANY_ACTIVATION",
    "BOUNDED",
    "BY_KERNEL",
    "CENTRAL",
    "FOLD_LIMIT",
    "PLACES",
    "TAIL",
    "Body",
    "BodyGradient",
    "Draws",
    "Op",
    "Region",
    "as_tuple",
    "binary",
    "close",
    "composite",
    "cond",
    "consistent_places",
    "first_row_mixing_node",
    "getitem",
    "if_op",
    "is_foldable",
    "name_outputs",
    "op",
    "scaled_erfc",
    "scan",
    "scan_op",
    "size_value",
    "spread",
    "sum_of_shares",
    "threefry",
    "unary",
    "used_experts",
    "while_loop",
    "while_op",
    "with_read_results",
    "without_unread_parts",
]


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    from mithril.graph import OperationError, operation

    try:
        return operation(name)
    except OperationError as error:
        raise AttributeError(str(error)) from None


def __dir__() -> list[str]:
    """Return the names of all operations, including those of installed plugins."""
    from mithril.graph import operations

    return sorted({*__all__, *operations()})
