"""Products: fully connected layers, products of batches, rows of embeddings."""

from __future__ import annotations

from mithril import ops
from mithril.graph import UnsupportedError
from mithril_tflite.table import Stored, Weight, operator


@operator
def FULLY_CONNECTED(x, weight: Weight, bias: Weight = None, *, weights_format, keep_num_dims):
    if weights_format:
        raise UnsupportedError(
            "the weights of FULLY_CONNECTED are shuffled for one processor",
            facts=["accepted: the format DEFAULT"],
            hint="convert the model again; current converters do not shuffle",
        )
    if x.ndim != 2 and not keep_num_dims:
        x = ops.reshape(x, shape=(-1, weight.shape[1]))
    return ops.linear(x, weight, bias)


@operator
def BATCH_MATMUL(a: Weight, b: Weight, *, adj_x, adj_y):
    return ops.matmul(_transposed(a) if adj_x else a, _transposed(b) if adj_y else b)


def _transposed(x):
    return ops.transpose(x, perm=(*range(x.ndim - 2), x.ndim - 1, x.ndim - 2))


@operator
def EMBEDDING_LOOKUP(indices: Stored, weight: Weight):
    return ops.take(weight, indices, axis=0)
