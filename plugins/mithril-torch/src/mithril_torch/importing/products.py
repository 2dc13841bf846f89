"""ATen operators that multiply matrices, and attention."""

from __future__ import annotations

from typing import Any

import numpy as np

from mithril import ops
from mithril.graph import equal
from mithril_importing import special_functions as special
from mithril_importing.arrays import broadcast, reshape
from mithril_torch.importing.reductions import vector_norm
from mithril_torch.importing.table import cast, line, row


@row("matmul", "mm", "bmm", "mv", "dot")
def matmul(a: Any, b: Any) -> Any:
    return ops.matmul(a, b)


@row("addbmm")
def addbmm(bias: Any, a: Any, b: Any, beta: Any = 1, alpha: Any = 1) -> Any:
    return _sum_of_products(bias, ops.sum(ops.matmul(a, b), axis=(0,)), beta, alpha)


@row("addr")
def addr(bias: Any, a: Any, b: Any, beta: Any = 1, alpha: Any = 1) -> Any:
    return _sum_of_products(bias, outer(a, b), beta, alpha)


@row("addmm", "addmv", "baddbmm")
def addmm(bias: Any, a: Any, b: Any, beta: Any = 1, alpha: Any = 1) -> Any:
    return _sum_of_products(bias, ops.matmul(a, b), beta, alpha)


def _sum_of_products(bias: Any, y: Any, beta: Any, alpha: Any) -> Any:
    """Return beta * bias + alpha * y, of the shape of y; a bias times 0 is not read."""
    y = y if alpha == 1 else ops.mul(y, alpha)
    return y if beta == 0 else ops.add(y, bias if beta == 1 else ops.mul(bias, beta))


@row("_pdist_forward")
def pairwise_distances(x: Any, p: float = 2.0) -> Any:
    """Return the distances of all pairs of rows."""
    first, second = np.triu_indices(x.shape[0], 1)
    rows = (ops.take(x, k.astype(np.int32), axis=0) for k in (first, second))
    return vector_norm(ops.sub(*rows), p, [-1])


@row("linear")
def linear(x: Any, weight: Any, bias: Any = None) -> Any:
    if len(x.shape) == 1:
        return reshape(ops.linear(reshape(x, (1, x.shape[0])), weight, bias), (weight.shape[0],))
    return ops.linear(x, weight, bias)


@row("bilinear", "_trilinear_bilinear")
def bilinear(a: Any, b: Any, weight: Any, bias: Any = None) -> Any:
    y = ops.einsum(a, weight, b, equation="...i,oij,...j->...o")
    return y if bias is None else ops.add(y, bias)


@row("einsum")
def einsum(equation: str, tensors: Any, path: Any = None) -> Any:
    return ops.einsum(*tensors, equation=equation.replace(" ", ""))


@row("outer")
def outer(a: Any, b: Any) -> Any:
    return ops.mul(reshape(a, (-1, 1)), reshape(b, (1, -1)))


@row("_cdist_forward")
def cdist(a: Any, b: Any, p: float, mode: Any = None) -> Any:
    """Return the distance of each row of ``a`` to each row of ``b``, in the p-norm."""
    d = ops.sub(reshape(a, (*a.shape[:-1], 1, a.shape[-1])), reshape(b, (*b.shape[:-2], 1, *b.shape[-2:])))
    return vector_norm(d, p, (-1,))


@row("_euclidean_dist")
def euclidean_distance(a: Any, b: Any) -> Any:
    """Return the distances of many rows, by a product of matrices."""
    last = len(b.shape) - 1
    columns = ops.transpose(b, perm=(*range(last - 1), last, last - 1))
    squares = ops.add(
        ops.sum(ops.square(a), axis=-1, keepdims=True), ops.sum(ops.square(columns), axis=-2, keepdims=True)
    )
    return special.root_of_squares(ops.maximum(ops.sub(squares, ops.mul(ops.matmul(a, columns), 2.0)), 0.0))


@row("scaled_dot_product_attention")
def attention(
    q: Any,
    k: Any,
    v: Any,
    mask: Any = None,
    dropout: float = 0.0,
    causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    layer: Any = None,
) -> Any:
    """Attend; a query whose keys are all masked gets zeros, and a causal mask begins at the first key."""
    q, k, v = _equal_batches(q, k, v)
    lead, rank = q.shape[:-2], len(q.shape)
    if causal:
        if mask is None and equal(q.shape[-2], k.shape[-2]) is True:
            mask = None
        else:
            rows, columns = line(q.shape[-2], "int32"), line(k.shape[-2], "int32")
            mask = ops.greater_equal(reshape(rows, (-1, 1)), reshape(columns, (1, -1)))
            causal = False
    if rank != 4:
        q, k, v = (_four_axes(x) for x in (q, k, v))
        if mask is not None and len(mask.shape) > 2:
            mask = _four_axes(mask)
    if mask is None:
        y = _attend(q, k, v, None, dropout, causal, scale, layer)
    else:
        mask, dead = _without_dead_rows(mask, str(q.dtype))
        y = _attend(q, k, v, mask, dropout, causal, scale, layer)
        y = y if dead is None else ops.where(dead, 0.0, y)
    return y if rank == 4 else reshape(y, (*lead, *y.shape[2:]))


def _equal_batches(*xs: Any) -> list[Any]:
    """Return tensors of the same rank, with the axes before that of heads broadcast to each other."""
    rank = max(len(x.shape) for x in xs)
    xs = tuple(reshape(x, (*[1] * (rank - len(x.shape)), *x.shape)) for x in xs)
    batch = []
    for sizes in zip(*(x.shape[:-3] for x in xs), strict=True):
        batch.append(next((n for n in sizes if not (type(n) is int and n == 1)), 1))
    return [broadcast(x, (*batch, *x.shape[len(batch) :])) for x in xs]


def _four_axes(x: Any) -> Any:
    lead = x.shape[:-2]
    if len(lead) < 2:
        return reshape(x, (*[1] * (2 - len(lead)), *x.shape))
    batch = lead[0]
    for n in lead[1:-1]:
        batch = batch * n
    return reshape(x, (batch, lead[-1], *x.shape[-2:]))


def _without_dead_rows(mask: Any, dtype: str) -> tuple[Any, Any]:
    """Return the mask with all keys allowed for queries that have none, and the mask of these queries."""
    is_bool = str(mask.dtype) == "bool"
    mask = mask if is_bool else cast(mask, dtype)
    allowed = mask if is_bool else ops.greater(mask, float("-inf"))
    dead = ops.logical_not(ops.any(allowed, axis=(-1,), keepdims=True))
    if isinstance(dead, (np.ndarray, np.generic)) and not np.any(dead):
        return mask, None
    return (ops.logical_or(mask, dead) if is_bool else ops.where(dead, 0.0, mask)), dead


def _attend(q: Any, k: Any, v: Any, mask: Any, dropout: float, causal: bool, scale: Any, layer: Any) -> Any:
    if not (dropout and layer.training):
        return ops.attention(q, k, v, mask, causal=causal, scale=scale)
    groups = q.shape[1] // k.shape[1] if isinstance(q.shape[1], int) else 1
    if groups != 1:
        k, v = (ops.repeat(x, repeats=groups, axis=1) for x in (k, v))
    scores = ops.mul(ops.matmul(q, ops.transpose(k, perm=(0, 1, 3, 2))), scale or q.shape[-1] ** -0.5)
    if causal:
        rows, columns = line(q.shape[2], "int32"), line(k.shape[2], "int32")
        mask = ops.greater_equal(reshape(rows, (-1, 1)), reshape(columns, (1, -1)))
    if mask is not None:
        is_bool = str(mask.dtype) == "bool"
        scores = ops.where(mask, scores, float("-inf")) if is_bool else ops.add(scores, mask)
    weights = ops.dropout(ops.softmax(scores, axis=-1), layer.key(), p=float(dropout))
    return ops.matmul(weights, v)
