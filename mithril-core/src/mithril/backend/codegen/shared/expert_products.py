"""Products of mixtures of experts in NumPy: rows are grouped by their expert, and each group is one product."""
# mypy: ignore-errors

import numpy as np

from mithril.backend.codegen.shared.dialect import needs


def rows_of_experts(experts, count):
    """Return the number and the positions of the rows of each expert that has rows."""
    order = np.argsort(experts, kind="stable")
    ends = np.searchsorted(experts[order], np.arange(count + 1))
    groups = ((e, order[ends[e] : ends[e + 1]]) for e in range(count))
    return [(e, positions) for e, positions in groups if positions.size]


def summable(x):
    """Upcast 16-bit floats to float32, in which they are summed."""
    return x.astype(np.float32) if x.dtype.itemsize == 2 and x.dtype.kind not in "iu" else x


@needs(rows_of_experts, summable)
def expert_matmul(x, w, experts):
    """Return the product of each row with the weight of its expert."""
    lead, shape = x.shape[:-1], np.broadcast_shapes(x.shape[:-1], experts.shape)
    rows = x.reshape(int(np.prod(lead)), x.shape[-1])
    numbers = np.broadcast_to(np.arange(len(rows)).reshape(lead), shape).reshape(-1)
    y = np.zeros((numbers.size, w.shape[2]), x.dtype)
    for e, positions in rows_of_experts(np.broadcast_to(experts, shape).reshape(-1), w.shape[0]):
        y[positions] = summable(rows[numbers[positions]]) @ summable(w[e])
    return y.reshape(*shape, w.shape[2])


@needs(rows_of_experts, summable)
def expert_weight_grad(x, g, experts, count):
    """Return for each expert the sum of the outer products of its rows."""
    rows, cotangents = x.reshape(experts.size, x.shape[-1]), g.reshape(experts.size, g.shape[-1])
    y = np.zeros((count, x.shape[-1], g.shape[-1]), x.dtype)
    for e, positions in rows_of_experts(experts.reshape(-1), count):
        y[e] = summable(rows[positions]).T @ summable(cotangents[positions])
    return y
