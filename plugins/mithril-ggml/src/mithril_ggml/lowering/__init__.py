"""Lowering of operations to steps: a table by operation; operations without a row run their NumPy reference."""

from __future__ import annotations

from mithril_ggml.lowering import (
    control_flow as control_flow,
    conv_pool as conv_pool,
    elementwise as elementwise,
    indexing as indexing,
    norms as norms,
    products as products,
    reductions as reductions,
    shapes as shapes,
    ternary as ternary,
)
from mithril_ggml.lowering.table import (
    emit as emit,
    falls_back as falls_back,
    lowers as lowers,
    plugin_lowering as plugin_lowering,
)
