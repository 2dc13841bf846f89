"""Random numbers: each call draws from a key of the model."""

from __future__ import annotations

import numpy as np

from mithril import ops
from mithril_onnx.table import operator
from mithril_onnx.tensors import dtype_of_code


def _draw(kind, context, shape, dtype, a, b):
    key = context.importer.weights.key()
    if kind == "normal":
        return ops.cast(ops.normal(key, shape=shape) * b + a, dtype=dtype)
    return ops.cast(ops.uniform(key, shape=shape, low=a, high=b), dtype=dtype)


@operator(folds=False)
def RandomNormal(*, shape, dtype=1, mean=0.0, scale=1.0, seed=None, context):
    return _draw("normal", context, tuple(shape), dtype_of_code(dtype), mean, scale)


@operator(folds=False)
def RandomNormalLike(x, *, dtype=None, mean=0.0, scale=1.0, seed=None, context):
    return _draw("normal", context, x.shape, dtype_of_code(dtype) if dtype else x.dtype, mean, scale)


@operator(folds=False)
def RandomUniform(*, shape, dtype=1, low=0.0, high=1.0, seed=None, context):
    return _draw("uniform", context, tuple(shape), dtype_of_code(dtype), low, high)


@operator(folds=False)
def RandomUniformLike(x, *, dtype=None, low=0.0, high=1.0, seed=None, context):
    return _draw("uniform", context, x.shape, dtype_of_code(dtype) if dtype else x.dtype, low, high)


@operator(folds=False)
def Bernoulli(x, *, dtype=None, seed=None, context):
    draws = ops.uniform(context.importer.weights.key(), shape=x.shape)
    return ops.cast(ops.less(draws, ops.cast(x, dtype="float32")), dtype=dtype_of_code(dtype) if dtype else x.dtype)


@operator(folds=False)
def Multinomial(x, *, dtype=6, sample_size=1, seed=None, context):
    """Draw by the largest of Gumbel numbers added to the logits."""
    draws = ops.uniform(context.importer.weights.key(), shape=(x.shape[0], sample_size, x.shape[1]), low=1e-20)
    gumbel = -ops.log(-ops.log(draws))
    return ops.cast(ops.argmax(ops.unsqueeze(x, axis=(1,)) + gumbel, axis=-1), dtype=dtype_of_code(dtype))


_ = np
