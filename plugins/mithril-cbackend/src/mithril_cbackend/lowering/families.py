"""The families of kernels: importing a family registers its operations in ``LOWERINGS``."""

from mithril_cbackend.lowering.conv import byte_convolution, direct_convolution
from mithril_cbackend.lowering.element import scatter
from mithril_cbackend.lowering.element.kernel import LOWERINGS
from mithril_cbackend.lowering.matmul import expert_products, group_products, group_rows, matmul
from mithril_cbackend.lowering.pool import byte_pooling, pooling
from mithril_cbackend.lowering.rows import cumulative, reductions

FAMILIES = (
    byte_convolution,
    byte_pooling,
    cumulative,
    direct_convolution,
    expert_products,
    group_products,
    group_rows,
    matmul,
    pooling,
    reductions,
    scatter,
)

__all__ = ["FAMILIES", "LOWERINGS"]
