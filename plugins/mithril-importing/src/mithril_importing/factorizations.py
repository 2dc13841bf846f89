"""Factorizations of matrices that ``mithril.ops`` lacks, as loops over columns."""

from __future__ import annotations

from typing import Any

import numpy as np

from mithril import ops
from mithril.graph import Builder, UnsupportedError, Value

EXPONENTIAL_TERMS, EXPONENTIAL_SQUARES = 16, 40  # of a matrix of norm 1/2, and how often it is squared at most


def _value(x: Any) -> Value:
    return x if isinstance(x, Value) else Builder.current().constant(np.asarray(x))


def sizes_of_matrix(x: Any) -> tuple[int, int]:
    n, m = x.shape[-2:]
    if not (isinstance(n, int) and isinstance(m, int)):
        raise UnsupportedError(f"a factorization requires static sizes, got {list(x.shape)}")
    return n, m


def swapped(x: Any) -> Any:
    rank = len(x.shape)
    return ops.transpose(x, perm=(*range(rank - 2), rank - 1, rank - 2))


def eigh(x: Any) -> Any:
    """Return eigenvalues and eigenvectors, also of matrices without rows."""
    return ops.eigh(x) if sizes_of_matrix(x)[0] else (ops.sum(x, axis=(-1,)), x)


def svd(x: Any) -> Any:
    """Return the reduced factors, also of matrices without elements."""
    n, m = sizes_of_matrix(x)
    if n and m:
        return ops.svd(x)
    kind, lead = str(x.dtype), tuple(x.shape[:-2])
    sizes = ((*lead, n, 0), (*lead, 0), (*lead, 0, m))
    return tuple(ops.full(shape=size, value=0.0, dtype=kind) for size in sizes)


def _picked(x: Any, mask: Any, axis: int) -> Any:
    return ops.sum(ops.where(mask, x, 0.0), axis=(axis,), keepdims=True)


def _exchanged(lines: Any, a: Any, b: Any) -> Any:
    return ops.where(ops.equal(lines, a), b, ops.where(ops.equal(lines, b), a, lines))


def lu(x: Any) -> tuple[Any, Any, Any]:
    """Return both factors in one matrix, the row exchanged with each column's diagonal, and the order of the rows."""
    n, m = sizes_of_matrix(x)
    x = _value(x)
    lead, steps = tuple(x.shape[:-2]), min(n, m)
    lines, rows, columns = np.arange(n, dtype=np.int32), np.arange(n)[:, None], np.arange(m)[None]
    order = ops.broadcast_to(_value(lines), shape=(*lead, n))

    def step(state: Any, j: Any) -> Any:
        a, order = state
        in_column, in_row = ops.equal(columns.astype(np.int32), j), ops.equal(rows.astype(np.int32), j)
        sizes = ops.abs(ops.sum(ops.where(in_column, a, 0.0), axis=(-1,)))
        pivot = ops.argmax(ops.where(ops.greater_equal(lines, j), sizes, -1.0), axis=-1, keepdims=True)
        exchanged = _exchanged(lines, j, pivot)
        a = ops.take_along_axis(a, ops.broadcast_to(ops.unsqueeze(exchanged, axis=-1), shape=(*lead, n, m)), axis=-2)
        order = ops.take_along_axis(order, exchanged, axis=-1)
        column, row = _picked(a, in_column, -1), _picked(a, in_row, -2)
        diagonal = _picked(row, in_column, -1)
        below = ops.greater(rows.astype(np.int32), j)
        factor = ops.div(column, ops.where(ops.equal(diagonal, 0.0), 1.0, diagonal))
        right = ops.greater(columns.astype(np.int32), j)
        a = ops.where(ops.logical_and(below, right), ops.sub(a, ops.mul(factor, row)), a)
        a = ops.where(ops.logical_and(below, in_column), factor, a)
        return (a, order), ops.squeeze(pivot, axis=(-1,))

    if not steps:
        return x, ops.full(shape=(*lead, 0), value=0, dtype="int32"), order
    (a, order), pivots = ops.scan(step, (x, order), np.arange(steps, dtype=np.int32))
    rank = len(lead)
    return a, ops.transpose(pivots, perm=(*range(1, rank + 1), 0)), order


def order_of(pivots: Any, rows: int) -> Any:
    """Return the order of rows after the exchanges."""
    pivots = _value(pivots)
    lead, rank = tuple(pivots.shape[:-1]), len(pivots.shape) - 1
    lines = np.arange(rows, dtype=np.int32)
    start = ops.broadcast_to(_value(lines), shape=(*lead, rows))
    if pivots.shape[-1] == 0:
        return start

    def step(order: Any, element: Any) -> Any:
        j, pivot = element
        exchanged = _exchanged(lines, j, ops.unsqueeze(pivot, axis=-1))
        return ops.take_along_axis(order, exchanged, axis=-1), None

    steps = np.arange(pivots.shape[-1], dtype=np.int32)
    return ops.scan(step, start, (steps, ops.transpose(pivots, perm=(rank, *range(rank)))))[0]


def triangles(packed: Any) -> tuple[Any, Any]:
    """Return the lower factor, with a diagonal of ones, and the upper one."""
    n, m = sizes_of_matrix(packed)
    k = min(n, m)
    lower = ops.tril(packed[..., :k], k=-1)
    ones = np.eye(n, k, dtype=str(packed.dtype))
    return ops.add(lower, ones), ops.triu(packed[..., :k, :])


def permutation(order: Any, kind: str) -> Any:
    """Return the matrix whose product with the ordered rows is the original."""
    n = order.shape[-1]
    is_one = ops.equal(ops.unsqueeze(order, axis=-2), np.arange(n, dtype=np.int32)[:, None])
    return ops.cast(is_one, dtype=kind)


def ordered_rows(x: Any, order: Any) -> Any:
    """Return the rows of a matrix in this order."""
    lead = tuple(np.broadcast_shapes(x.shape[:-2], order.shape[:-1]))
    n, m = x.shape[-2:]
    index = ops.broadcast_to(ops.unsqueeze(order, axis=-1), shape=(*lead, n, m))
    return ops.take_along_axis(ops.broadcast_to(x, shape=(*lead, n, m)), index, axis=-2)


def householder_qr(x: Any) -> tuple[Any, Any]:
    """Return r with the vectors of the reflections below it, and their factors, as LAPACK's geqrf."""
    n, m = sizes_of_matrix(x)
    factors = []
    for j in range(min(n, m)):
        column = x[..., j:, j]
        alpha, rest = column[..., :1], column[..., 1:]
        tail = ops.sum(ops.square(rest), axis=(-1,), keepdims=True)
        nothing = ops.equal(tail, 0.0)
        size = ops.sqrt(ops.add(ops.square(alpha), ops.where(nothing, 1.0, tail)))
        beta = ops.where(ops.less(alpha, 0.0), size, ops.neg(size))
        beta = ops.where(nothing, alpha, beta)
        tau = ops.where(nothing, 0.0, ops.div(ops.sub(beta, alpha), ops.where(nothing, 1.0, beta)))
        scale = ops.where(nothing, 1.0, ops.sub(alpha, beta))
        vector = ops.concat(ops.add(ops.mul(alpha, 0.0), 1.0), ops.div(rest, scale), axis=-1)
        right = x[..., j:, j + 1 :]
        dots = ops.sum(ops.mul(ops.unsqueeze(vector, axis=-1), right), axis=(-2,), keepdims=True)
        outer = ops.mul(ops.unsqueeze(ops.mul(vector, tau), axis=-1), dots)
        stored = ops.unsqueeze(ops.concat(beta, vector[..., 1:], axis=-1), axis=-1)
        below = ops.concat(stored, ops.sub(right, outer), axis=-1) if j + 1 < m else stored
        below = ops.concat(x[..., j:, :j], below, axis=-1) if j else below
        x = ops.concat(x[..., :j, :], below, axis=-2) if j else below
        factors.append(tau)
    if not factors:
        return x, x[..., :0, 0] if m else ops.sum(x, axis=(-1,))[..., :0]
    return x, ops.concat(*factors, axis=-1) if len(factors) > 1 else factors[0]


def reflected(x: Any, vectors: Any, factors: Any, *, transposed: bool = False) -> Any:
    """Return the product of all reflections, or of them in reverse order, with a matrix."""
    n, count = vectors.shape[-2], factors.shape[-1]
    for j in range(count) if transposed else reversed(range(count)):
        lower = vectors[..., j + 1 :, j]
        one = ops.add(ops.mul(vectors[..., j : j + 1, j], 0.0), 1.0)
        parts = [ops.mul(vectors[..., :j, j], 0.0)] if j else []
        parts += [one] + ([lower] if j + 1 < n else [])
        v = ops.unsqueeze(ops.concat(*parts, axis=-1) if len(parts) > 1 else parts[0], axis=-1)
        tau = ops.unsqueeze(factors[..., j : j + 1], axis=-1)
        x = ops.sub(x, ops.mul(ops.mul(tau, v), ops.sum(ops.mul(v, x), axis=(-2,), keepdims=True)))
    return x


def pseudoinverse(x: Any, absolute: Any, relative: Any) -> Any:
    """Return the pseudoinverse without singular values below a bound; its derivative is that of constant rank."""
    fixed = ops.stop_gradient(x)
    u, s, vh = ops.svd(fixed)
    bound = ops.maximum(absolute, ops.mul(relative, ops.max(s, axis=(-1,), keepdims=True)))
    large = ops.greater(s, bound)
    inverse = ops.where(large, ops.reciprocal(ops.where(large, s, 1.0)), 0.0)
    p = ops.matmul(ops.mul(swapped(vh), ops.unsqueeze(inverse, axis=-2)), swapped(u))
    change = ops.sub(x, fixed)
    n, m = sizes_of_matrix(x)
    kind = str(p.dtype)
    left = ops.sub(np.eye(n, dtype=kind), ops.matmul(fixed, p))
    right = ops.sub(np.eye(m, dtype=kind), ops.matmul(p, fixed))
    y = ops.sub(p, ops.matmul(ops.matmul(p, change), p))
    y = ops.add(y, ops.matmul(ops.matmul(ops.matmul(p, swapped(p)), swapped(change)), left))
    return ops.add(y, ops.matmul(ops.matmul(right, swapped(change)), ops.matmul(swapped(p), p)))


def matrix_exponential(x: Any) -> Any:
    """Return the exponential by a Taylor series of the matrix divided by a power of two, squared again."""
    n, _ = sizes_of_matrix(x)
    x = _value(x)
    norm = ops.max(ops.sum(ops.abs(ops.stop_gradient(x)), axis=(-1,), keepdims=True), axis=(-2,), keepdims=True)
    count = ops.minimum(
        ops.maximum(ops.ceil(ops.log2(ops.maximum(norm, 1e-30))) + 1.0, 0.0), float(EXPONENTIAL_SQUARES)
    )
    small = ops.mul(x, ops.pow(2.0, ops.neg(count)))
    unit = np.eye(n, dtype=str(x.dtype))
    y = ops.add(ops.mul(x, 0.0), unit)
    for k in range(EXPONENTIAL_TERMS, 0, -1):  # Horner's scheme
        y = ops.add(ops.div(ops.matmul(small, y), float(k)), unit)

    def step(y: Any, k: Any) -> Any:
        return ops.where(ops.less(k, count), ops.matmul(y, y), y), None

    return ops.scan(step, y, np.arange(EXPONENTIAL_SQUARES).astype(str(x.dtype)))[0]
