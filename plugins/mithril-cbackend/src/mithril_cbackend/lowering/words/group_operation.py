"""The operation ``c.group_product``: rows times a matrix of 4-bit codes in panels."""

from __future__ import annotations

from typing import Any

import numpy as np

from mithril.base import float32
from mithril.ir import op
from mithril_cbackend.lowering.words.group_panels import Panels, unpacked


def _shape(x: Any, panels: Any, table: Any, *, columns: int, **_: Any) -> Any:
    return (*x[:-1], columns)


def _float32(dtypes: Any, attributes: Any) -> Any:
    return float32


@op(name="c.group_product", shape=_shape, dtype=_float32, opaque=True, no_axes="it exists in programs of this backend")
def group_product(x, panels, table, *, columns: int, group: int, has_offsets: bool = False, is_half: bool = True):  # type: ignore[no-untyped-def]
    """x times the transposed matrix of 4-bit codes in panels, with float32 sums."""
    weights = unpacked(Panels(panels, columns, group, has_offsets, is_half), table)
    return x.astype(np.float32) @ weights.T
