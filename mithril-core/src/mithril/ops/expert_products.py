"""Mixtures of experts: products of which each row has the weight of the expert that it was routed to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mithril.graph import (
    DTypeError,
    OperationError,
    ShapeError,
    Size,
    TensorType,
    composite,
    dtype as as_dtype,
    exactly,
    ints,
    product,
    sample,
    unknown,
)
from mithril.ops.creation import iota
from mithril.ops.elementwise import equal, not_equal, where
from mithril.ops.nn import ANY_ACTIVATION
from mithril.ops.products import matmul, unbroadcast
from mithril.ops.reduction import sum
from mithril.ops.shape import broadcast_to, reshape, transpose, unsqueeze


def _product_flops(types: Sequence[TensorType | None], results: Sequence[TensorType], _: Any) -> Size:
    assert types[0] is not None
    return product(results[0].shape) * types[0].shape[-1] * 2


ROUTED = (
    sample((6, 4), (3, 4, 5), ints((6,), 0, 2)),
    sample((3, 1, 4), (3, 4, 2), ints((3, 2), 0, 2), label="several experts"),
    sample((4, 3), (2, 3, 5), exactly(1, 2, -1, 1, dtype="int32"), label="outside"),
    sample((4, 3), (2, 3, 5), exactly(1, 2**32, -(2**32), 0, dtype="int64"), label="beyond 32 bits"),
    sample((3, 4), (4, 4, 2), ints((2, 3), 0, 3), label="rows of several"),
    sample((2, 3, 4), (3, 4, 2), ints((3,), 0, 2), label="numbers of several"),
)


@composite(
    promotes="same",
    promoted=("x", "w"),
    flops=_product_flops,
    samples=ROUTED,
    axes="... i, e i o, ... -> ... o | i sum, e index experts",
    linear="x | w",
    precision="low",
)
def expert_matmul(x, w, experts):
    """x[n] @ w[experts[n]] for each row n, with w [experts, in, out]; 0 for experts that w does not have."""
    _check_numbers(experts)
    if not x.shape or len(w.shape) != 3:
        raise ShapeError("expert_matmul requires x [..., in] and w [experts, in, out]")
    lead, rank = x.shape[:-1], max(len(x.shape) - 1, len(experts.shape))
    y = matmul(reshape(x, shape=(1, product(lead), x.shape[-1])), w)
    y = reshape(y, shape=(w.shape[0], *[1] * (rank - len(lead)), *lead, w.shape[2]))
    return sum(where(_selected(experts, w.shape[0], rank), y, 0), axis=0)


def _check_numbers(experts: Any) -> None:
    kind = as_dtype(experts.dtype)
    if not kind.is_integer or kind.bits < 32:  # narrow ones may not hold the number of experts
        raise DTypeError(
            f"numbers of experts must be integers of at least 32 bits, not {kind.name}",
            hint="cast them: cast(experts, dtype='int32')",
        )


def _selected(experts: Any, count: Size, rank: int) -> Any:
    """Return [count, ..., 1]: whether a row is routed to an expert; rows have ``rank`` axes."""
    numbers = reshape(iota(shape=(count,), dtype=experts.dtype), shape=(count, *[1] * (rank + 1)))
    return equal(unsqueeze(experts, axis=(-1,)), numbers)


@expert_matmul.vjp
def _(g, y, x, w, experts):
    gx = expert_matmul(g, transpose(w, perm=(0, 2, 1)), experts)
    rows = broadcast_to(x, shape=(*g.shape[:-1], x.shape[-1]))
    numbers = broadcast_to(experts, shape=g.shape[:-1])
    return unbroadcast(gx, x.shape), expert_weight_grad(rows, g, numbers, count=w.shape[0]), None


def _weight_flops(types: Sequence[TensorType | None], _: Any, attributes: Any) -> Size:
    assert types[0] is not None
    assert types[1] is not None
    return product(types[0].shape) * types[1].shape[-1] * 2


@composite(
    promotes="same",
    promoted=("x", "g"),
    flops=_weight_flops,
    samples=[
        sample((6, 4), (6, 5), ints((6,), 0, 2), count=3),
        sample((3, 2, 4), (3, 2, 2), ints((3, 2), 0, 2), count=4, label="several experts"),
        sample((4, 3), (4, 5), exactly(1, 2, -1, 1, dtype="int32"), count=2, label="outside"),
    ],
    linear="x | g",
    precision="low",
)
def expert_weight_grad(x, g, experts, *, count: Size):
    """The gradient of ``expert_matmul`` for its weight: for each expert the sum of the outer products of its rows."""
    _check_numbers(experts)
    lead = experts.shape
    if not x.shape[:-1] == g.shape[:-1] == lead:
        raise ShapeError("expert_weight_grad requires a row of x and g for each number of an expert")
    selected = where(_selected(experts, count, len(lead)), unsqueeze(x, axis=(0,)), 0)
    rows = reshape(selected, shape=(count, product(lead), x.shape[-1]))
    return matmul(transpose(rows, perm=(0, 2, 1)), reshape(g, shape=(1, product(lead), g.shape[-1])))


@expert_weight_grad.vjp
def _(c, y, x, g, experts, *, count):
    return expert_matmul(g, transpose(c, perm=(0, 2, 1)), experts), expert_matmul(x, c, experts), None


@composite(
    promotes="same",
    promoted=("x", "shares", "up", "down", "gate"),
    samples=[
        sample((3, 4), (3, 2), ints((3, 2), 0, 2), (3, 4, 5), (3, 5, 4), (3, 4, 5)),
        sample((2, 3, 4), (2, 3, 1), ints((2, 3, 1), 0, 1), (2, 4, 3), (2, 3, 4), activation="gelu", label="no gate"),
    ],
    precision="low",
)
def expert_mixture(x, shares, experts, up, down, gate=None, *, activation: str = "silu"):
    """Results of the experts of each row, summed with their shares; shares and numbers of experts are [..., active].

    Weights are [experts, in, out]. An expert is ``down(activation(gate(x)) * up(x))``, or without a gate
    ``down(activation(up(x)))``.
    """
    if activation not in ANY_ACTIVATION:
        message, facts, hint = unknown("activation of expert_mixture", activation, list(ANY_ACTIVATION))
        raise OperationError(message, facts=facts, hint=hint)
    rows, activate, used = unsqueeze(x, axis=(-2,)), ANY_ACTIVATION[activation], used_experts(experts, shares)
    if gate is None:
        hidden = activate(expert_matmul(rows, up, used))
    else:
        hidden = activate(expert_matmul(rows, gate, used)) * expert_matmul(rows, up, used)
    return sum_of_shares(expert_matmul(hidden, down, used), shares)


def used_experts(experts: Any, shares: Any) -> Any:
    """Return the numbers of experts, with one that does not exist where the share is 0: the expert may overflow."""
    return where(not_equal(shares, 0), experts, 2**31 - 1)


def sum_of_shares(y: Any, shares: Any) -> Any:
    """Return the results ``y`` [..., active, features] of experts summed with their shares."""
    return sum(y * unsqueeze(shares, axis=(-1,)), axis=-2)


__all__ = ["expert_matmul", "expert_mixture", "expert_weight_grad"]
