"""Scores of classes and targets: transformations, the second class of binary models, labels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from mithril import ops
from mithril.graph import OperationError, dtype as as_dtype
from mithril_onnx.operators.common import int64
from mithril_onnx.table import operator
from mithril_onnx.values import Strings

DOMAIN = "ai.onnx.ml"
TRANSFORMS = ("NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO", "PROBIT")  # TreeEnsemble refers to them by position
ZERO = 1e-7  # SOFTMAX_ZERO leaves scores below it at zero


def learned(function: Any = None, **options: Any) -> Any:
    return operator(function, domain=DOMAIN, **options)


def as_float(x: Any) -> Any:
    """Return x as floats; integers and booleans become float32, as in the standard."""
    return x if as_dtype(x.dtype).is_float else ops.cast(x, dtype="float32")


def as_matrix(x: Any) -> Any:
    """Return x with two axes; a vector is one row."""
    return ops.reshape(x, shape=(1, x.shape[0])) if x.ndim == 1 else x


def transformed(scores: Any, transform: str) -> Any:
    """Return scores after the attribute ``post_transform``."""
    if transform not in TRANSFORMS:
        raise OperationError(f"post_transform is '{transform}'", facts=[f"expected: {', '.join(TRANSFORMS)}"])
    if transform == "LOGISTIC":
        return ops.sigmoid(scores)
    if transform == "PROBIT":
        return ops.erfinv(scores * 2.0 - 1.0) * math.sqrt(2.0)
    if transform == "SOFTMAX":
        return ops.softmax(scores, axis=-1)
    if transform == "SOFTMAX_ZERO":
        largest = ops.max(scores, axis=-1, keepdims=True)
        powers = ops.where(ops.greater(ops.abs(scores), ZERO), ops.exp(scores - largest), scores * ops.exp(-largest))
        return powers / ops.sum(powers, axis=-1, keepdims=True)
    return scores


def labels_of(classes: Any, names: Sequence[str] | None, numbers: Sequence[int] | None) -> Any:
    """Return the labels of class indices: integers, or a stand-in for labels that are strings."""
    if names:
        return Strings("the labels", names)
    table = np.asarray(numbers, np.int64)
    if np.array_equal(table, np.arange(table.size)):
        return int64(classes)
    return ops.take(table, classes, axis=0)
