"""Axes and traits of nodes, derived from the declarations of their operations."""

from mithril.base.lazy_exports import lazy_exports

HOMES = {
    "calls": ("axes_of", "call_axes", "flops", "operand_types"),
    "op_axes": ("Factors", "OpAxes", "Role", "unknown_axes"),
    "traits": (
        *("is_addition", "is_cheap", "is_expensive", "is_fold", "is_layout", "is_matrix_transpose", "is_permutation"),
        *("is_product", "is_source", "is_unchanged", "is_view", "is_windowed_product", "linear_in", "precision"),
        *("reads_rows", "sample_nodes"),
    ),
}
__all__, __getattr__, __dir__ = lazy_exports(__name__, HOMES)
