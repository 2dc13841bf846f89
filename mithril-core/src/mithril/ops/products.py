"""Products: matmul, general contractions, and einsum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mithril.graph import (
    Ints,
    Shape,
    ShapeError,
    Size,
    TensorType,
    broadcast,
    composite,
    expect_equal,
    ints,
    numeric,
    op,
    product,
    sample,
)
from mithril.ops.basic import to_float32
from mithril.ops.reduction import sum
from mithril.ops.shape import broadcast_to, reshape, transpose


# -- matmul -------------------------------------------------------------------------------------------------------
def _matmul_shape(a: Shape, b: Shape) -> Shape:
    if not a or not b:
        raise ShapeError("matmul requires operands of rank 1 or more", hint="multiply scalars with *")
    rows = a[:-1] if len(a) == 1 else a[-2:-1]
    columns = () if len(b) == 1 else b[-1:]
    expect_equal("the inner sizes of a matrix product", a[-1], b[-1] if len(b) == 1 else b[-2])
    batch = broadcast(a[:-2], b[:-2])
    return (*batch, *(rows if len(a) > 1 else ()), *columns)


def _matmul_flops(types: Sequence[TensorType | None], results: Sequence[TensorType], _: Mapping[str, Any]) -> Size:
    assert types[0] is not None
    return product(results[0].shape) * types[0].shape[-1] * 2


MATMULS = (
    sample((3, 4), (4, 5)),
    sample((2, 3, 4), (2, 4, 5), label="batched"),
    sample((2, 1, 3, 4), (5, 4, 2), label="broadcast"),
    sample((4,), (4, 5), label="vector-matrix"),
    sample((2, 3, 4), (4,), label="matrix-vector"),
    sample((4,), (4,), label="vectors"),
    sample((2, 0), (0, 3), label="empty"),
    sample(ints((3, 4), -3, 3), ints((4, 2), -3, 3), label="int"),
)


@op(
    shape=_matmul_shape,
    dtype=numeric,
    flops=_matmul_flops,
    promotes="same",
    samples=MATMULS,
    axes="... m? k, ... k n? -> ... m? n? | k sum",
    linear="a | b",
)
def matmul(a, b):
    """Matrix product as in NumPy: vectors are rows or columns, leading axes broadcast."""
    return np.matmul(to_float32(a), to_float32(b))


@matmul.vjp
def _(g, y, a, b):
    """Use products for both gradients; a weight shared by a batch has one product over all rows."""
    left, right = _matrix(a, row=True), _matrix(b, row=False)
    cotangent = g
    if len(b.shape) == 1:
        cotangent = reshape(cotangent, shape=(*cotangent.shape, 1))
    if len(a.shape) == 1:
        shape = cotangent.shape
        cotangent = reshape(cotangent, shape=(*shape[:-1], 1, shape[-1]))
    if len(right.shape) == 2 and len(left.shape) > 2:
        rows = product(left.shape[:-1])
        flat = reshape(left, shape=(rows, left.shape[-1]))
        gb = matmul(_transpose_last_two(flat), reshape(cotangent, shape=(rows, cotangent.shape[-1])))
    else:
        gb = unbroadcast(matmul(_transpose_last_two(left), cotangent), right.shape)
    ga = unbroadcast(matmul(cotangent, _transpose_last_two(right)), left.shape)
    return reshape(ga, shape=a.shape), reshape(gb, shape=b.shape)


@matmul.vmap
def _(rows, has_rows, a, b):
    """Reshape mapped vectors to matrices if both operands are mapped."""
    vectors = [x.ndim - mapped == 1 for x, mapped in zip((a, b), has_rows, strict=True)]
    if not all(has_rows) or not any(vectors):
        return NotImplemented
    rank = max(a.ndim, b.ndim, 3)
    left = reshape(a, shape=(rows, *[1] * (rank - 2), a.shape[-1])) if vectors[0] else a
    right = reshape(b, shape=(rows, *[1] * (rank - 3), b.shape[-1], 1)) if vectors[1] else b
    y = matmul(left, right)
    lead = y.shape[:-2]
    return reshape(
        y, shape=(*lead, *(y.shape[-2:-1] if not vectors[0] else ()), *(y.shape[-1:] if not vectors[1] else ()))
    )


def _matrix(x: Any, row: bool) -> Any:
    if len(x.shape) > 1:
        return x
    return reshape(x, shape=(1, *x.shape) if row else (*x.shape, 1))


def _transpose_last_two(x: Any) -> Any:
    rank = len(x.shape)
    return transpose(x, perm=(*range(rank - 2), rank - 1, rank - 2))


def unbroadcast(g: Any, shape: Shape) -> Any:
    """Sum over the axes along which an operand of this shape was broadcast."""
    extra = len(g.shape) - len(shape)
    if extra:
        g = sum(g, axis=tuple(range(extra)))
    axes = tuple(k for k, (d, n) in enumerate(zip(shape, g.shape, strict=True)) if d == 1 and n != 1)
    return sum(g, axis=axes, keepdims=True) if axes else g


# -- dot ----------------------------------------------------------------------------------------------------------
def _free_axes(rank: int, *used: Ints) -> tuple[int, ...]:
    excluded = {k for axes in used for k in axes}
    return tuple(k for k in range(rank) if k not in excluded)


def _dot_form(types: Sequence[TensorType | None], attributes: dict[str, Any]) -> dict[str, Any]:
    for name, t in zip(("a", "b"), types, strict=True):
        assert t is not None
        for kind in ("contract", "batch"):
            axes = attributes[f"{kind}_{name}"]
            if any(not -t.rank <= k < t.rank for k in axes):
                raise ShapeError(
                    f"dot: {kind}_{name}={axes} contains an axis that operand '{name}' does not have", facts=[str(t)]
                )
            attributes[f"{kind}_{name}"] = tuple(k % t.rank for k in axes)
        pairs = attributes[f"contract_{name}"] + attributes[f"batch_{name}"]
        if len(set(pairs)) != len(pairs):
            raise ShapeError(f"dot: duplicate axis of operand '{name}'", facts=[f"axes: {pairs}"])
    return attributes


def _dot_shape(a: Shape, b: Shape, *, contract_a: Ints, contract_b: Ints, batch_a: Ints, batch_b: Ints) -> Shape:
    for kind, left, right in (("contract", contract_a, contract_b), ("batch", batch_a, batch_b)):
        if len(left) != len(right):
            raise ShapeError(f"dot: {kind}_a has {len(left)} axes, but {kind}_b has {len(right)}")
    for i, j in zip(contract_a, contract_b, strict=True):
        expect_equal("contracted axes", a[i], b[j])
    batch = tuple(expect_equal("batch axes", a[i], b[j]) for i, j in zip(batch_a, batch_b, strict=True))
    rows = tuple(a[k] for k in _free_axes(len(a), contract_a, batch_a))
    return (*batch, *rows, *(b[k] for k in _free_axes(len(b), contract_b, batch_b)))


def _dot_axes(shapes: Sequence[Shape | None], attributes: Mapping[str, Any], results: Sequence[Shape]) -> str:
    """Return the axes string of a contraction."""
    names = []
    for side, shape in zip("ab", shapes, strict=True):
        batch, inner = attributes[f"batch_{side}"], attributes[f"contract_{side}"]
        axes = {k: f"batch_{i}" for i, k in enumerate(batch)} | {k: f"inner_{i}" for i, k in enumerate(inner)}
        names.append([axes.get(k, f"{side}_{k}") for k in range(len(shape or ()))])
    result = [f"batch_{i}" for i in range(len(attributes["batch_a"]))]
    result += [n for side, axes in zip("ab", names, strict=True) for n in axes if n.startswith(f"{side}_")]
    inner = " ".join(f"inner_{i}" for i in range(len(attributes["contract_a"])))
    terms = f"{' '.join(names[0])}, {' '.join(names[1])} -> {' '.join(result)}"
    return f"{terms} | {inner} sum" if inner else terms


def _dot_flops(
    types: Sequence[TensorType | None], results: Sequence[TensorType], attributes: Mapping[str, Any]
) -> Size:
    assert types[0] is not None
    return product(results[0].shape) * product(types[0].shape[k] for k in attributes["contract_a"]) * 2


@op(
    shape=_dot_shape,
    dtype=numeric,
    canonical=_dot_form,
    flops=_dot_flops,
    promotes="same",
    samples=[
        sample((3, 4), (5, 4), contract_a=(1,), contract_b=(1,)),
        sample((2, 3, 4), (4, 2, 5), contract_a=(2,), contract_b=(0,), batch_a=(0,), batch_b=(1,), label="batch"),
        sample((2, 3, 4), (4, 3), contract_a=(1, 2), contract_b=(1, 0), label="two"),
        sample((3,), (2,), contract_a=(), contract_b=(), label="outer"),
    ],
    axes=_dot_axes,
    linear="a | b",
    precision="low",
)
def dot(a, b, *, contract_a: Ints, contract_b: Ints, batch_a: Ints = (), batch_b: Ints = ()):
    """General contraction: sums over the contracted axes; the result has batch axes, free axes of a, free axes of b."""
    free_a, free_b = _free_axes(a.ndim, contract_a, batch_a), _free_axes(b.ndim, contract_b, batch_b)
    left = np.transpose(to_float32(a), (*batch_a, *free_a, *contract_a))
    right = np.transpose(to_float32(b), (*batch_b, *contract_b, *free_b))
    batch = tuple(a.shape[k] for k in batch_a)
    rows, columns = tuple(a.shape[k] for k in free_a), tuple(b.shape[k] for k in free_b)
    inner = int(np.prod([a.shape[k] for k in contract_a], dtype=np.int64))
    m, n = int(np.prod(rows, dtype=np.int64)), int(np.prod(columns, dtype=np.int64))
    y = np.matmul(left.reshape((*batch, m, inner)), right.reshape((*batch, inner, n)))
    return y.reshape((*batch, *rows, *columns))


@dot.vjp
def _(g, y, a, b, *, contract_a, contract_b, batch_a, batch_b):
    free_a, free_b = _free_axes(len(a.shape), contract_a, batch_a), _free_axes(len(b.shape), contract_b, batch_b)
    n, p, q = len(batch_a), len(free_a), len(free_b)
    batch = tuple(range(n))
    ga = dot(g, b, contract_a=tuple(range(n + p, n + p + q)), contract_b=free_b, batch_a=batch, batch_b=batch_b)
    gb = dot(g, a, contract_a=tuple(range(n, n + p)), contract_b=free_a, batch_a=batch, batch_b=batch_a)
    # ga and gb have batch axes, free axes, then the contracted axes in the order of the other operand
    order_a = (*batch_a, *free_a, *(contract_a[contract_b.index(k)] for k in sorted(contract_b)))
    order_b = (*batch_b, *free_b, *(contract_b[contract_a.index(k)] for k in sorted(contract_a)))
    return _reordered(ga, order_a), _reordered(gb, order_b)


@dot.vmap
def _(rows, has_rows, a, b, **attributes):
    """Treat the rows of both operands as a batch axis, the rows of one operand as its first free axis."""
    shifted = {n: tuple(k + has_rows[n.endswith("_b")] for k in axes) for n, axes in attributes.items()}
    if all(has_rows):
        shifted |= {n: (0, *shifted[n]) for n in ("batch_a", "batch_b")}
        return dot(a, b, **shifted)
    place = len(shifted["batch_a"])
    if has_rows[1]:
        place = a.ndim - len(shifted["contract_a"])
    y = dot(a, b, **shifted)
    return transpose(y, perm=(place, *(k for k in range(y.ndim) if k != place)))


def _reordered(x: Any, order: tuple[int, ...]) -> Any:
    """Transpose x so that its axis k becomes axis ``order[k]``."""
    return transpose(x, perm=tuple(order.index(k) for k in range(len(order))))


# -- einsum -------------------------------------------------------------------------------------------------------
@composite(
    promotes="same",
    samples=[
        sample((3, 4), (4, 5), equation="ij,jk->ik"),
        sample((2, 3, 4), (2, 5, 4), equation="bij,bkj->bik", label="batch"),
        sample((3, 3), equation="ii->i", label="diagonal"),
        sample((3, 3), equation="ii", label="trace"),
        sample((2, 3, 4), equation="...i->...", label="ellipsis"),
        sample((3, 4), (4,), (3,), equation="ij,j,i->", label="three"),
        sample((3, 4), equation="ij->ji", label="transpose"),
        sample((2, 3), (1, 3), equation="ij,ij->ij", label="broadcast"),
    ],
    precision="low",
)
def einsum(*xs, equation: str):
    """Einsum: sums over letters missing in the result, which follows ``->``; ``...`` matches any leading axes."""
    from mithril.ops.einsum_equation import contract

    return contract(xs, equation, dot, sum, transpose, reshape, broadcast_to)
