"""Linear models and support vector machines."""

from __future__ import annotations

from typing import Any

import numpy as np

from mithril import ops
from mithril.graph import OperationError, dtype as as_dtype
from mithril_onnx.operators.learning.scores import as_float, as_matrix, labels_of, learned, transformed


@learned
def LinearRegressor(x, *, coefficients=(), intercepts=None, post_transform="NONE", targets=1):
    return transformed(_linear(x, coefficients, intercepts, targets), post_transform)


def _linear(x, coefficients, intercepts, count):
    x = as_matrix(as_float(x))
    kind = as_dtype(x.dtype).numpy
    weights = np.asarray(np.asarray(coefficients, kind).reshape(count, -1).T, order="C")
    y = ops.matmul(x, weights)
    return y if intercepts is None else y + np.asarray(intercepts, kind)


@learned
def LinearClassifier(
    x, *, classlabels_ints=None, classlabels_strings=None, coefficients, intercepts=None, multi_class=0,
    post_transform="NONE",
):  # fmt: skip
    count = len(classlabels_strings or classlabels_ints or ())
    rows = len(intercepts) if intercepts is not None else count
    if not rows:
        raise OperationError("LinearClassifier has no labels and no intercepts")
    scores = _linear(x, coefficients, intercepts, rows)
    if rows > 1:
        classes = ops.argmax(scores, axis=1)
        scores = transformed(scores, post_transform)
    else:
        classes = ops.cast(ops.greater(ops.squeeze(scores, axis=(1,)), 0.0), dtype="int64")
        if count == 2:
            second = transformed(scores, post_transform)
            scores = ops.concat(1.0 - second, second, axis=1)
    return labels_of(classes, classlabels_strings, classlabels_ints), scores


# -- support vectors ----------------------------------------------------------------------------------------------
def _kernel(x, vectors, kernel_type, params):
    """Return the kernel of each row of x with each vector."""
    gamma, constant, degree = params or (0.0, 0.0, 3.0)
    products = ops.matmul(x, np.asarray(vectors.T, order="C"))
    if kernel_type == "LINEAR":
        return products
    if kernel_type == "POLY":
        return ops.pow(products * gamma + constant, degree)
    if kernel_type == "SIGMOID":
        return ops.tanh(products * gamma + constant)
    if kernel_type == "RBF":
        differences = ops.unsqueeze(x, axis=(1,)) - vectors
        return ops.exp(ops.sum(differences * differences, axis=2) * -gamma)
    raise OperationError(f"the kernel is '{kernel_type}'", facts=["expected: LINEAR, POLY, RBF, SIGMOID"])


@learned
def SVMRegressor(
    x, *, coefficients, kernel_params=None, kernel_type="LINEAR", n_supports=0, one_class=0, post_transform="NONE", rho,
    support_vectors=None,
):  # fmt: skip
    x = as_matrix(as_float(x))
    kind = as_dtype(x.dtype).numpy
    weights = np.asarray(coefficients, kind).reshape(-1, 1)
    if n_supports:
        products = _kernel(x, np.asarray(support_vectors, kind).reshape(n_supports, -1), kernel_type, kernel_params)
    else:
        products = x
    y = ops.matmul(products, weights) + np.asarray(rho[0], kind)
    if one_class:
        return ops.where(ops.greater(y, 0.0), np.asarray(1, kind), np.asarray(-1, kind))
    return transformed(y, post_transform)


@learned
def SVMClassifier(
    x, *, classlabels_ints=None, classlabels_strings=None, coefficients, kernel_params=None, kernel_type="LINEAR",
    post_transform="NONE", prob_a=None, prob_b=None, rho, support_vectors=None, vectors_per_class=None,
):  # fmt: skip
    """Let each pair of classes vote; probabilities couple the pairs as libsvm does."""
    x = as_matrix(as_float(x))
    kind = as_dtype(x.dtype).numpy
    count = len(classlabels_strings or classlabels_ints or ())
    if not vectors_per_class:
        weights = np.asarray(coefficients, kind).reshape(count, -1)
        scores = ops.matmul(x, np.asarray(weights.T, order="C")) + np.asarray(rho[0], kind)
        classes = ops.argmax(scores, axis=1)
        return labels_of(classes, classlabels_strings, classlabels_ints), transformed(scores, post_transform)
    vectors = np.asarray(support_vectors, kind).reshape(sum(vectors_per_class), -1)
    kernels = _kernel(x, vectors, kernel_type, kernel_params)
    pairs = [(i, j) for i in range(count) for j in range(i + 1, count)]
    decisions = ops.matmul(kernels, _pair_weights(coefficients, vectors_per_class, pairs, kind)) + np.asarray(rho, kind)
    classes = ops.argmax(_votes(decisions, pairs, count), axis=1)
    if prob_a:
        pair_scores = ops.sigmoid(-(decisions * np.asarray(prob_a, kind) + np.asarray(prob_b, kind)))
        scores = _coupled(ops.clip(pair_scores, low=1e-7, high=1 - 1e-7), pairs, count)
    else:
        scores = decisions
        if count == 2:
            scores = ops.concat(-decisions, decisions, axis=1)
    return labels_of(classes, classlabels_strings, classlabels_ints), transformed(scores, post_transform)


def _pair_weights(coefficients, vectors_per_class, pairs, kind):
    """Return the weight of each support vector in the decision of each pair of classes."""
    total = sum(vectors_per_class)
    rows = np.asarray(coefficients, kind).reshape(-1, total)
    first = np.cumsum([0, *vectors_per_class])
    weights = np.zeros((total, len(pairs)), kind)
    for p, (i, j) in enumerate(pairs):
        weights[first[i] : first[i + 1], p] = rows[j - 1, first[i] : first[i + 1]]
        weights[first[j] : first[j + 1], p] = rows[i, first[j] : first[j + 1]]
    return weights


def _votes(decisions, pairs, count):
    """Return the number of pairs that each class wins."""
    wins = ops.cast(ops.greater(decisions, 0.0), dtype=decisions.dtype)
    first, second = np.zeros((2, len(pairs), count), as_dtype(decisions.dtype).numpy)
    for p, (i, j) in enumerate(pairs):
        first[p, i] = second[p, j] = 1
    return ops.matmul(wins, first) + ops.matmul(1.0 - wins, second)


def _coupled(pair_scores, pairs, count):
    """Return the probabilities of classes that agree best with those of the pairs (Wu, Lin and Weng, 2004).

    The iteration and its bound are libsvm's, for two classes as well: another bound gives other probabilities.
    """
    r: Any = [[None] * count for _ in range(count)]
    for p, (i, j) in enumerate(pairs):
        r[i][j] = ops.select(pair_scores, index=(p,), axes=(1,))
        r[j][i] = 1.0 - r[i][j]
    squares = [sum((r[j][t] * r[j][t] for j in range(count) if j != t), start=0.0) for t in range(count)]
    q = [[squares[t] if j == t else -r[j][t] * r[t][j] for j in range(count)] for t in range(count)]
    start: Any = [r[0][1] * 0.0 + 1.0 / count for _ in range(count)]
    bound = 0.005 / count
    active = ops.greater_equal(start[0], 0.0)

    def step(state):
        trip, active, p = state[0], state[1], list(state[2:])
        products = [sum((q[t][j] * p[j] for j in range(count)), start=0.0) for t in range(count)]
        total = sum((p[t] * products[t] for t in range(count)), start=0.0)
        error = ops.abs(products[0] - total)
        for t in range(1, count):
            error = ops.maximum(error, ops.abs(products[t] - total))
        active = ops.logical_and(active, ops.greater_equal(error, bound))
        new = list(p)
        for t in range(count):
            change = (total - products[t]) / q[t][t]
            new[t] = new[t] + change
            scale = 1.0 + change
            total = (total + change * (change * q[t][t] + 2.0 * products[t])) / scale / scale
            products = [(products[j] + change * q[t][j]) / scale for j in range(count)]
            new = [v / scale for v in new]
        return (trip + 1, active, *[ops.where(active, n, v) for n, v in zip(new, p, strict=True)])

    trip = ops.full(shape=(), value=0, dtype="int32")
    limit = max(100, count)
    state = ops.while_loop(
        lambda s: ops.logical_and(ops.less(s[0], limit), ops.any(s[1])), step, (trip, active, *start)
    )
    return ops.stack(*state[2:], axis=1)
