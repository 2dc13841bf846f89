"""How each operation becomes steps: a table by name; what has no row runs as its own NumPy declaration."""

from __future__ import annotations

from mithril_ggml.lowering import (  # each adds its rows to the table
    control as control,
    elementwise as elementwise,
    indexing as indexing,
    norms as norms,
    products as products,
    reductions as reductions,
    shapes as shapes,
    ternary as ternary,
    windows as windows,
)
from mithril_ggml.lowering.table import emit as emit, lowers as lowers
