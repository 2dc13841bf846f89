"""Rows of the lowering table for TPUs, whose memory and vector units favor other programs than a CPU."""

from __future__ import annotations

from mithril.backend import Lowerings
from mithril_jax import helpers
from mithril_jax.lowering import is_wide


def with_tpu_rows(base: Lowerings) -> Lowerings:
    """Return the table with the rows of TPUs."""
    table = base.extend()
    table.helper(helpers.max_pool_grad_by_element, op="max_pool_grad", when=lambda node: not is_wide(node))
    return table
