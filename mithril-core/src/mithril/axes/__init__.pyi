"""Axes and traits of nodes, derived from the declarations of their operations."""

from mithril.axes.calls import (
    axes_of as axes_of,
    call_axes as call_axes,
    flops as flops,
    operand_types as operand_types,
)
from mithril.axes.op_axes import (
    Factors as Factors,
    OpAxes as OpAxes,
    Role as Role,
    unknown_axes as unknown_axes,
)
from mithril.axes.traits import (
    is_addition as is_addition,
    is_cheap as is_cheap,
    is_expensive as is_expensive,
    is_fold as is_fold,
    is_layout as is_layout,
    is_matrix_transpose as is_matrix_transpose,
    is_permutation as is_permutation,
    is_product as is_product,
    is_source as is_source,
    is_unchanged as is_unchanged,
    is_view as is_view,
    is_windowed_product as is_windowed_product,
    linear_in as linear_in,
    precision as precision,
    reads_rows as reads_rows,
    sample_nodes as sample_nodes,
)
