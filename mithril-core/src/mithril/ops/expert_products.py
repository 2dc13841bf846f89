"""Mixtures of experts: products of which each row has the weight of the expert that it was routed to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mithril.base import DTypeError, OperationError, ShapeError, Size, TensorType, dtype as as_dtype, product, unknown
from mithril.ir import composite, exactly, ints, sample
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
    _check(x, w, experts)
    y = reshape(matmul(reshape(x, shape=(1, -1, x.shape[-1])), w), shape=(w.shape[0], *x.shape[:-1], w.shape[2]))
    return sum(where(_selected(experts, w.shape[0]), y, 0), axis=0)


def _check(x: Any, w: Any, experts: Any) -> None:
    if len(w.shape) != 3:
        raise ShapeError(f"the weight of experts has rank {len(w.shape)}, expected [experts, in, out]")
    if not x.shape or x.shape[-1] != w.shape[1]:
        raise ShapeError(f"rows of {x.shape[-1:]} features do not match experts of {w.shape[1]} features")
    _check_numbers(experts)


def _check_numbers(experts: Any) -> None:
    kind = as_dtype(experts.dtype)
    if not kind.is_integer or kind.bits < 32:  # narrow ones may not hold the number of experts
        raise DTypeError(
            f"numbers of experts must be integers of at least 32 bits, not {kind.name}",
            hint="cast them: cast(experts, dtype='int32')",
        )


def _selected(experts: Any, count: Size) -> Any:
    """Return [count, ..., 1]: whether a row is routed to an expert."""
    rank = len(experts.shape)
    numbers = reshape(iota(shape=(count,), dtype=experts.dtype), shape=(count, *[1] * (rank + 1)))
    return equal(unsqueeze(experts, axis=(0, rank + 1)), numbers)


@expert_matmul.vjp
def _(g, y, x, w, experts):
    gx = expert_matmul(g, transpose(w, perm=(0, 2, 1)), experts)
    rows = broadcast_to(x, shape=(*g.shape[:-1], x.shape[-1]))
    return unbroadcast(gx, x.shape), expert_weight_grad(rows, g, experts, count=w.shape[0]), None


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
    selected = where(_selected(experts, count), unsqueeze(x, axis=(0,)), 0)
    rows = reshape(selected, shape=(count, -1, x.shape[-1]))
    return matmul(transpose(rows, perm=(0, 2, 1)), reshape(g, shape=(1, -1, g.shape[-1])))


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
    rows, activate = unsqueeze(x, axis=(-2,)), ANY_ACTIVATION[activation]
    if gate is None:
        hidden = activate(expert_matmul(rows, up, experts))
    else:
        hidden = activate(expert_matmul(rows, gate, experts)) * expert_matmul(rows, up, experts)
    return sum_of_shares(expert_matmul(hidden, down, experts), shares)


def sum_of_shares(y: Any, shares: Any) -> Any:
    """Return the results ``y`` [..., active, features] summed with their shares; 0 ignores a result that overflows."""
    shares = unsqueeze(shares, axis=(-1,))
    return sum(where(not_equal(shares, 0), y * shares, 0), axis=-2)


__all__ = ["expert_matmul", "expert_mixture", "expert_weight_grad"]
