"""Attention and rotary position embedding."""

from __future__ import annotations

import math
from typing import Any

from mithril.graph import ShapeError, bools, composite, exactly, mod, sample
from mithril.ops.activations import softmax
from mithril.ops.basic import downcast, dtype_of, upcast
from mithril.ops.creation import iota
from mithril.ops.elementwise import greater_equal, neg, where
from mithril.ops.products import matmul, unbroadcast
from mithril.ops.reduction import sum
from mithril.ops.shape import concat, reshape, stack, transpose
from mithril.ops.slicing import split

INF = float("inf")
# With ``causal`` the first query may attend to the first key only, which this mask excludes.
UNSEEN = exactly(False, True, True, True, True, False, True, True, True, dtype="bool", shape=(1, 1, 3, 3))
SAMPLES = (
    sample((2, 3, 4, 5), (2, 3, 6, 5), (2, 3, 6, 5)),
    sample((1, 2, 4, 3), (1, 2, 4, 3), (1, 2, 4, 3), causal=True, label="causal"),
    sample((1, 4, 2, 3), (1, 2, 5, 3), (1, 2, 5, 3), causal=True, scale=0.5, label="grouped"),
    sample((1, 2, 3, 4), (1, 2, 3, 4), (1, 2, 3, 4), (1, 1, 3, 3), label="additive"),
    sample((1, 2, 3, 4), (1, 2, 5, 4), (1, 2, 5, 2), bools((1, 2, 3, 5)), label="mask", gradient=False),
    sample(*[(1, 2, 3, 4)] * 3, UNSEEN, causal=True, label="causal mask", gradient=False),
)


def _flops(types: Any, results: Any, attributes: Any) -> Any:
    b, h, n, d = types[0].shape
    m, e = types[1].shape[2], types[2].shape[3]
    return b * h * n * m * (2 * d + 2 * e + 17)


@composite(promotes="float", promoted=("q", "k", "v"), flops=_flops, tolerance=4.0, samples=SAMPLES, precision="low")
def attention(q, k, v, mask=None, *, causal: bool = False, scale: float | None = None):
    """Scaled dot-product attention of [batch, heads, positions, size]; several query heads can share a key head.

    ``mask`` broadcasts to [batch, heads, queries, keys]: bool (True attends) or added to the scores. With ``causal``
    the queries are aligned with the last positions of the keys.
    """
    _check(q, k, v)
    p = _weights(q, k, mask, causal, scale)
    y = matmul(p, _grouped(upcast(v), p))
    return downcast(reshape(y, shape=(*q.shape[:3], v.shape[3])), q)


def _check(q: Any, k: Any, v: Any) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if len(x.shape) != 4:
            raise ShapeError(f"'{name}' has rank {len(x.shape)}, expected [batch, heads, positions, size]")
    for description, a, b in (
        ("batch sizes of q and k", q.shape[0], k.shape[0]),
        ("sizes of q and k", q.shape[3], k.shape[3]),
        ("heads of k and v", k.shape[1], v.shape[1]),
        ("positions of k and v", k.shape[2], v.shape[2]),
    ):
        # Symbolic sizes are compared by the guards of the products.
        if type(a) is int and type(b) is int and a != b:
            raise ShapeError(f"the {description} differ: {a} and {b}")
    if mod(q.shape[1], k.shape[1]) != 0:
        raise ShapeError(
            f"{q.shape[1]} query heads cannot share {k.shape[1]} key heads evenly",
            hint=f"use a multiple of {k.shape[1]} query heads",
        )


def _grouped(x: Any, p: Any) -> Any:
    """Insert an axis for the query heads that share a key head: [batch, key heads, 1, positions, size]."""
    return reshape(x, shape=(x.shape[0], x.shape[1], 1, *x.shape[2:])) if len(p.shape) == 5 else x


def _split_heads(x: Any, heads: Any) -> Any:
    """Reshape [batch, heads, ...] to [batch, key heads, query heads per key head, ...] if key heads are shared."""
    return x if x.shape[1] == heads else reshape(x, shape=(x.shape[0], heads, x.shape[1] // heads, *x.shape[2:]))


def _factor(q: Any, scale: float | None) -> float:
    return scale if scale is not None else 1.0 / math.sqrt(q.shape[3])


def _weights(q: Any, k: Any, mask: Any, causal: bool, scale: float | None) -> Any:
    """Return the attention weights: [..., queries, keys]."""
    shared = _split_heads(upcast(q), k.shape[1])
    keys = transpose(upcast(k), perm=(0, 1, 3, 2))
    # The queries are scaled, not the scores: they are fewer elements wherever keys outnumber the size
    # of a head.
    scores = matmul(shared * _factor(q, scale), _grouped(keys, shared))
    if mask is not None:
        full = mask if len(mask.shape) == 4 else reshape(mask, shape=(*[1] * (4 - len(mask.shape)), *mask.shape))
        if len(scores.shape) == 5:
            h = full.shape[1]
            heads = (1, 1) if type(h) is int and h == 1 else (k.shape[1], h // k.shape[1])
            full = reshape(full, shape=(full.shape[0], *heads, *full.shape[2:]))
        scores = where(full, scores, -INF) if dtype_of(full).is_bool else scores + downcast(full, scores)
    if causal:
        n, m = q.shape[2], k.shape[2]
        rows, columns = iota(shape=(n, m), axis=0), iota(shape=(n, m), axis=1)
        ahead = m - n  # the queries are the last positions of the keys
        last = rows if type(ahead) is int and ahead == 0 else rows + _size(ahead)
        scores = where(greater_equal(last, columns), scores, -INF)
    return softmax(scores, axis=-1)


def _size(n: Any) -> Any:
    from mithril.ops.creation import size_value

    return n if type(n) is int else size_value(value=n)


@attention.vjp
def _(g, y, q, k, v, mask, *, causal, scale):
    cotangents = attention_grad(g, y, q, k, v, mask, causal=causal, scale=scale)
    if mask is None or not mask.dtype.is_float:
        return *cotangents, None
    _, s = _weights_and_cotangent(g, y, q, k, v, mask, causal, scale)
    gm = unbroadcast(reshape(s, shape=(*q.shape[:3], k.shape[2])), mask.shape)
    return *cotangents, downcast(gm, mask)


def _grad_flops(types: Any, results: Any, attributes: Any) -> Any:
    return _flops(types[2:], results, attributes) * 2.5


@composite(
    promotes="float",
    promoted=("g", "y", "q", "k", "v"),
    results=("q_grad", "k_grad", "v_grad"),
    flops=_grad_flops,
    tolerance=4.0,
    samples=(
        sample(*[(2, 3, 4, 5)] * 3, *[(2, 3, 6, 5)] * 2),
        sample(*[(1, 2, 4, 3)] * 5, causal=True, label="causal"),
        sample(*[(1, 4, 2, 3)] * 3, *[(1, 2, 5, 3)] * 2, causal=True, scale=0.5, label="grouped"),
        sample(*[(1, 2, 3, 4)] * 5, (1, 1, 3, 3), label="additive"),
    ),
    precision="low",
)
def attention_grad(g, y, q, k, v, mask=None, *, causal: bool = False, scale: float | None = None):
    """Cotangents of queries, keys and values of ``attention`` for the cotangent ``g`` of its result ``y``."""
    p, s = _weights_and_cotangent(g, y, q, k, v, mask, causal, scale)
    c, shared, factor = _split_heads(upcast(g), k.shape[1]), _split_heads(upcast(q), k.shape[1]), _factor(q, scale)
    gq = reshape(matmul(s, _grouped(upcast(k), p)) * factor, shape=q.shape)
    swap = _last_swapped(len(p.shape))
    gk = matmul(transpose(s, perm=swap), shared * factor)
    gv = matmul(transpose(p, perm=swap), c)
    if len(p.shape) == 5:
        gk, gv = sum(gk, axis=2), sum(gv, axis=2)
    return downcast(gq, q), downcast(gk, k), downcast(gv, v)


def _weights_and_cotangent(g: Any, y: Any, q: Any, k: Any, v: Any, mask: Any, causal: bool, scale: Any) -> Any:
    """Compute the weights again, as kernels do not save them, and the cotangent of the scores.

    CSE merges the two copies of the weights if attention is decomposed.
    """
    p = _weights(q, k, mask, causal, scale)
    c = _split_heads(upcast(g), k.shape[1])
    t = matmul(c, transpose(_grouped(upcast(v), p), perm=_last_swapped(len(p.shape))))
    # sum(p * t) over keys equals sum(g * y) over sizes
    return p, p * (t - sum(c * _split_heads(upcast(y), k.shape[1]), axis=-1, keepdims=True))


def _last_swapped(rank: int) -> tuple[int, ...]:
    return (*range(rank - 2), rank - 1, rank - 2)


# -- rotary positions ---------------------------------------------------------------------------------------------
ROTARY = (
    sample((2, 3, 4, 6), (4, 3), (4, 3)),
    sample((2, 4, 6), (4, 3), (4, 3), interleaved=True, label="interleaved"),
)


@composite(promotes="same", flops=6, samples=ROTARY)
def rotary_embedding(x, cos, sin, *, interleaved: bool = False):
    """Rotation of pairs along the last axis by angles whose cosine and sine are [positions, size / 2].

    A pair consists of the k-th element of each half, or with ``interleaved`` of the elements 2k and 2k+1.
    """
    return _rotated(x, cos, sin, interleaved)


def _rotated(x: Any, cos: Any, sin: Any, interleaved: bool) -> Any:
    half = x.shape[-1] // 2
    if interleaved:
        pairs = reshape(x, shape=(*x.shape[:-1], half, 2))
        a, b = (reshape(p, shape=(*x.shape[:-1], half)) for p in split(pairs, sizes=(1, 1), axis=-1))
        rotated = stack(a * cos - b * sin, b * cos + a * sin, axis=-1)
        return reshape(rotated, shape=tuple(x.shape))
    a, b = split(x, sizes=(half, half), axis=-1)
    return concat(a * cos - b * sin, b * cos + a * sin, axis=-1)


@rotary_embedding.vjp
def _(g, y, x, cos, sin, *, interleaved):
    """Rotate the cotangent back; cosine and sine have gradients as well."""
    half = x.shape[-1] // 2
    gx = _rotated(g, cos, neg(sin), interleaved)
    if interleaved:
        shape = (*x.shape[:-1], half, 2)
        (a, b), (u, w) = (
            [reshape(p, shape=(*x.shape[:-1], half)) for p in split(reshape(z, shape=shape), sizes=(1, 1), axis=-1)]
            for z in (x, g)
        )
    else:
        (a, b), (u, w) = (split(z, sizes=(half, half), axis=-1) for z in (x, g))
    return gx, unbroadcast(a * u + b * w, cos.shape), unbroadcast(a * w - b * u, sin.shape)
