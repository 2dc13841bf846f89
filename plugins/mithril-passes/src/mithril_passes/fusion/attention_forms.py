"""Attention as exporters write it: products around a softmax, with scales, masks, guards and repeated key heads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from mithril.graph import Size, Value
from mithril.ops import (
    attention,
    broadcast_to,
    div,
    isnan,
    matmul,
    mul,
    reshape,
    softmax,
    sum as sum_,
    transpose,
    where,
)
from mithril.passes import Rule, rule

SWAPPED = (0, 1, 3, 2)
INF = float("inf")
ABSORBS = -1e30  # a number from which no score differs after rounding; -1e4 is just a low score


def same(a: Size, b: Size) -> bool:
    return a is b or a == b


def transposed(x: Any, order: tuple[int, ...]) -> Any:
    return x if order == tuple(range(len(order))) else transpose(x, perm=order)


# -- products around a softmax --------------------------------------------------------------------------------------
def _is_attention(q: Value, k: Value, v: Value, *rest: Any, perm: Any, axis: Any, **captured: Any) -> bool:
    """Whether the products are those of heads: all operands have [batch, heads, ...], or [heads, ...] as in ``bmm``."""
    if captured.get("low", -INF) > ABSORBS:
        return False
    rank = len(q.shape)
    if rank not in (3, 4) or not len(k.shape) == len(v.shape) == rank or axis != rank - 1:
        return False
    leading = range(rank - 2)
    return all(same(q.shape[n], k.shape[perm[n]]) and same(q.shape[n], v.shape[n]) for n in leading)


def _selected(mask: Any, low: float) -> Any:
    """Return the mask of attention; a finite number gives a row without keys the mean of all."""
    return mask if low == -INF else where(mask, 0.0, low)


def _attend(q: Any, k: Any, v: Any, mask: Any, perm: Any, scale: float) -> Any:
    """Return the attention to the operand of a transposed k, of which transposes of other axes remain."""
    k = transposed(k, (*perm[:-2], perm[-1], perm[-2]))
    if len(q.shape) == 4:
        return attention(q, k, v, mask, scale=scale)
    one, two, three = (reshape(x, shape=(1, *x.shape)) for x in (q, k, v))
    return reshape(attention(one, two, three, mask, scale=scale), shape=(*q.shape[:2], v.shape[2]))


def _weighted(scores: Any, v: Any, axis: Any) -> Any:
    return matmul(softmax(scores, axis=axis), v)


def _unscaled() -> Iterator[Rule]:
    def scores(q: Any, k: Any, perm: Any) -> Any:
        return matmul(q, transpose(k, perm=perm))

    yield _rule(
        lambda q, k, v, *, perm=SWAPPED, axis=-1: _weighted(scores(q, k, perm), v, axis),
        lambda q, k, v, *, perm: _attend(q, k, v, None, perm, 1.0),
        "attention",
    )
    yield _rule(
        lambda q, k, v, m, *, perm=SWAPPED, axis=-1: _weighted(scores(q, k, perm) + m, v, axis),
        lambda q, k, v, m, *, perm: _attend(q, k, v, m, perm, 1.0),
        "attention with a mask",
    )
    yield _rule(
        lambda q, k, v, m, *, perm=SWAPPED, low=-INF, axis=-1: _weighted(where(m, scores(q, k, perm), low), v, axis),
        lambda q, k, v, m, *, perm, low: _attend(q, k, v, _selected(m, low), perm, 1.0),
        "attention to selected keys",
    )


def _scaled(scores: Callable[..., Any], factor: Callable[[float], float]) -> Iterator[Rule]:
    half = factor(0.5)  # tests of the rules use it
    yield _rule(
        lambda q, k, v, *, perm=SWAPPED, scale=half, axis=-1: _weighted(scores(q, k, perm, scale), v, axis),
        lambda q, k, v, *, perm, scale: _attend(q, k, v, None, perm, factor(scale)),
        "attention",
    )
    yield _rule(
        lambda q, k, v, m, *, perm=SWAPPED, scale=half, axis=-1: _weighted(scores(q, k, perm, scale) + m, v, axis),
        lambda q, k, v, m, *, perm, scale: _attend(q, k, v, m, perm, factor(scale)),
        "attention with a mask",
    )
    yield _rule(
        lambda q, k, v, m, *, perm=SWAPPED, scale=half, low=-INF, axis=-1: _weighted(
            where(m, scores(q, k, perm, scale), low), v, axis
        ),
        lambda q, k, v, m, *, perm, scale, low: _attend(q, k, v, _selected(m, low), perm, factor(scale)),
        "attention to selected keys",
    )


def _rule(before: Callable[..., Any], after: Callable[..., Any], name: str) -> Rule:
    return rule(before, after, when=_is_attention, exact=False, name=name)


# -- rules on attention itself --------------------------------------------------------------------------------------
def _has_scale(*operands: Value, scale: Any, **_: Any) -> bool:
    return scale is not None


def _scaled_queries(scaled: Callable[[Any, Any], Any], factor: Callable[[float], float]) -> Iterator[Rule]:
    half = factor(0.5)
    yield rule(
        lambda q, k, v, *, c=half, scale=0.5: attention(scaled(q, c), k, v, scale=scale),
        lambda q, k, v, *, c, scale: attention(q, k, v, scale=factor(c) * scale),
        when=_has_scale,
        exact=False,
        name="attention of scaled queries",
    )
    yield rule(
        lambda q, k, v, m, *, c=half, scale=0.5: attention(scaled(q, c), k, v, m, scale=scale),
        lambda q, k, v, m, *, c, scale: attention(q, k, v, m, scale=factor(c) * scale),
        when=_has_scale,
        exact=False,
        name="attention of scaled queries",
    )


def _repeats(q: Value, k: Value, v: Value, *rest: Any, one: Any, groups: Any, heads: Any, **_: Any) -> bool:
    """Whether each of the heads [batch, heads, positions, size] is repeated for the query heads that share it."""
    if not len(k.shape) == len(heads) == 4 or len(groups) != 5 or len(one) != 5:
        return False
    b, h, n, d = k.shape
    sizes = zip((*one, *groups[:2], *groups[3:]), (b, h, 1, n, d, b, h, n, d), strict=True)
    return all(same(x, y) for x, y in sizes) and same(groups[1] * groups[2], heads[1])


def _repeated(x: Any, one: Any, groups: Any, heads: Any) -> Any:
    return reshape(broadcast_to(reshape(x, shape=one), shape=groups), shape=heads)


def _is_swap(x: Value, v: Value, *, axis: Any, perm: Any) -> bool:
    rank = len(perm)
    return len(v.shape) == rank and tuple(perm) == (*range(rank - 2), rank - 1, rank - 2)


def _from_the_right(x: Any, v: Any, *, axis: Any, perm: Any) -> Any:
    return transpose(matmul(softmax(x, axis=axis), transpose(v, perm=perm)), perm=perm)


def _guarded(x: Any, v: Any, *, axis: Any = -1) -> Any:
    p = softmax(x, axis=axis)
    return matmul(where(isnan(p), 0.0, p), v)


def _guarded_result(x: Any, v: Any, *, axis: Any) -> Any:
    """Return the product with the guard behind it, where a row without weights is 0, or nan if a value of v is."""
    y = matmul(softmax(x, axis=axis), v)
    return where(isnan(y), sum_(v * 0.0, axis=-2, keepdims=True), y)


SIZES: dict[str, Any] = {"one": (1, 2, 1, 4, 3), "groups": (1, 2, 1, 4, 3), "heads": (1, 2, 4, 3)}
ATTENTION = [
    *_unscaled(),
    *_scaled(lambda q, k, perm, scale: mul(matmul(q, transpose(k, perm=perm)), scale), lambda scale: scale),
    *_scaled(lambda q, k, perm, scale: div(matmul(q, transpose(k, perm=perm)), scale), lambda scale: 1.0 / scale),
    *_scaled(lambda q, k, perm, scale: matmul(q, mul(transpose(k, perm=perm), scale)), lambda scale: scale),
    rule(
        lambda x, v, *, axis=-1, perm=(1, 0): matmul(v, transpose(softmax(x, axis=axis), perm=perm)),
        _from_the_right,
        when=_is_swap,
        exact=False,
        name="weights on the right",
    ),
    rule(
        _guarded,
        _guarded_result,
        when=lambda x, v, *, axis: len(x.shape) == len(v.shape) and axis == len(x.shape) - 1,
        exact=False,
        name="guarded weights",
    ),
    *_scaled_queries(mul, lambda c: c),
    *_scaled_queries(div, lambda c: 1.0 / c),
    rule(
        lambda q, k, v, *, one=SIZES["one"], groups=SIZES["groups"], heads=SIZES["heads"], causal=False, scale=0.5: (
            attention(q, _repeated(k, one, groups, heads), _repeated(v, one, groups, heads), causal=causal, scale=scale)
        ),
        lambda q, k, v, *, causal, scale: attention(q, k, v, causal=causal, scale=scale),
        when=_repeats,
        exact=False,
        name="attention to repeated heads",
    ),
    rule(
        lambda q, k, v, m, *, one=SIZES["one"], groups=SIZES["groups"], heads=SIZES["heads"], causal=False, scale=0.5: (
            attention(
                q, _repeated(k, one, groups, heads), _repeated(v, one, groups, heads), m, causal=causal, scale=scale
            )
        ),
        lambda q, k, v, m, *, causal, scale: attention(q, k, v, m, causal=causal, scale=scale),
        when=_repeats,
        exact=False,
        name="attention to repeated heads",
    ),
]
