"""Layers that merge several tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

from mithril import ops
from mithril_keras.table import layer
from mithril_keras.tensor import Tensor, elementwise
from mithril_keras.weights import Weights


def _aligned(xs: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors with one rank: axes of size 1 are added after the batch."""
    rank = max(x.rank for x in xs)
    return [
        x if x.rank == rank else Tensor(ops.reshape(x.value, shape=(x.shape[0], *(1,) * (rank - x.rank), *x.shape[1:])))
        for x in xs
    ]


def _merged(xs: Sequence[Tensor], function: Callable[..., Any]) -> Tensor:
    """Merge from left to right; a position is valid where it is in any of the tensors."""
    y = elementwise(lambda *vs: reduce(function, vs), *_aligned(xs))
    masks = [x.mask for x in xs]
    valid = None if any(m is None for m in masks) else reduce(ops.logical_or, masks)
    return y.with_mask(valid)


def _merge_layer(name: str, function: Callable[..., Any]) -> None:
    def merge(weights: Weights, x: Sequence[Tensor]) -> Tensor:
        del weights
        return _merged(x, function)

    layer(name, masks="own")(merge)


for _name, _function in (
    ("Add", ops.add),
    ("Subtract", ops.sub),
    ("Multiply", ops.mul),
    ("Maximum", ops.maximum),
    ("Minimum", ops.minimum),
):
    _merge_layer(_name, _function)


@layer("Average", masks="own")
def average(weights: Weights, x: Sequence[Tensor]) -> Tensor:
    """Return the mean of tensors."""
    del weights
    total = _merged(x, ops.add)
    return elementwise(lambda v: v * (1.0 / len(x)), total).with_mask(total.mask)


@layer("Concatenate", masks="own")
def concatenate(weights: Weights, x: Sequence[Tensor], *, axis: int = -1) -> Tensor:
    """Return tensors side by side."""
    del weights
    rank = x[0].rank
    axis %= rank
    if rank > 2 and all(t.stored(True) for t in x):
        place = 1 if axis == rank - 1 else axis + 1 if axis else 0
        y = Tensor(first=ops.concat(*(t.first for t in x), axis=place))
    else:
        y = Tensor(ops.concat(*(t.value for t in x), axis=axis))
    if all(t.mask is None for t in x):
        return y
    masks = [ops.full(shape=t.shape[:2], value=True, dtype="bool") if t.mask is None else t.mask for t in x]
    return y.with_mask(ops.concat(*masks, axis=axis) if axis < 2 else reduce(ops.logical_or, masks))


@layer("Dot", masks="own")
def dot(weights: Weights, x: Sequence[Tensor], *, axes: Any, normalize: bool = False) -> Tensor:
    """Return the product over one axis of each tensor, per element of the batch."""
    a, b = (weights.cast(t.value) for t in x)
    first, second = (axes, axes) if isinstance(axes, int) else axes
    first, second = first % len(a.shape), second % len(b.shape)
    if normalize:
        a, b = (
            v * ops.rsqrt(ops.maximum(ops.sum(ops.square(v), axis=k, keepdims=True), 1e-12))
            for v, k in ((a, first), (b, second))
        )
    y = ops.dot(a, b, contract_a=(first,), contract_b=(second,), batch_a=(0,), batch_b=(0,))
    return Tensor(ops.unsqueeze(y, axis=1) if len(y.shape) == 1 else y)
