"""Mixtures of experts: networks of which each token passes through a few, which a router selects."""

from __future__ import annotations

from typing import Any

from mithril import ops
from mithril.graph import ModelError, Value, unknown
from mithril.models.language.arguments import expect_size, positive
from mithril.models.language.layer import Layer
from mithril.models.layers.metrics import to_float


class MixtureOfExperts(Layer):
    """``experts`` networks with ``hidden`` features; each token passes through the ``active`` ones of highest share.

    Parameters: ``router [experts, in]``, ``gate`` and ``up`` ``[experts, in, hidden]``, ``down [experts, hidden, in]``.
    An expert is ``down(activation(gate(x)) * up(x))``, and without ``gated`` it is ``down(activation(up(x)))``. Results
    are weighted by the shares, a softmax of the router; with ``normalized`` those of several active experts sum to 1.
    The share of a single one remains: divided by itself it would not depend on the router, which could not be trained.

    No token is dropped, and experts compute the tokens that are routed to them only. In training, ``balance`` times a
    loss is added that is 1 if experts are active equally often, and larger otherwise.
    """

    def __init__(
        self,
        experts: int,
        hidden: int,
        *,
        active: int = 2,
        activation: str = "silu",
        gated: bool = True,
        normalized: bool = True,
        balance: float = 0.01,
    ) -> None:
        self.experts = positive("MixtureOfExperts", "experts", experts)
        self.hidden = positive("MixtureOfExperts", "hidden", hidden)
        self.active = positive("MixtureOfExperts", "active", active)
        if active > experts:
            raise ModelError(f"MixtureOfExperts: active={active} exceeds the {experts} experts")
        if activation not in ops.ANY_ACTIVATION:
            message, facts, hint = unknown("activation of MixtureOfExperts", activation, list(ops.ANY_ACTIVATION))
            raise ModelError(message, facts=facts, hint=hint)
        self.activation = activation
        self.gated, self.normalized, self.balance = gated, normalized, balance

    def build(self, x: Value) -> Any:
        width = expect_size(x, -1, None, "features")
        logits = ops.linear(x, self.param("router", (self.experts, width), "normal(std=0.02)"))
        normalized = self.normalized and self.active > 1
        shares, indices, used = self.routed(logits, self.active, normalized=normalized)
        if self.balance:
            self._add_balance(shares, indices)
        form, init = (self.experts, width, self.hidden), f"fan_in_uniform(fan_in={width})"
        gate = self.param("gate", form, init) if self.gated else None
        up = self.param("up", form, init)
        down = self.param("down", (self.experts, self.hidden, width), f"fan_in_uniform(fan_in={self.hidden})")
        return ops.expert_mixture(x, used, indices, up, down, gate, activation=self.activation)

    @staticmethod
    def routed(logits: Any, active: int, *, normalized: bool) -> tuple[Any, Any, Any]:
        """Return the shares of all experts, the numbers of the active ones, and their shares in the result."""
        shares = ops.softmax(to_float(logits), axis=-1)
        values, indices = ops.top_k(shares, k=active, axis=-1)
        if normalized:
            values = values / ops.sum(values, axis=-1, keepdims=True)
        return shares, indices, ops.cast(values, dtype=logits.dtype)

    def _add_balance(self, shares: Any, indices: Any) -> None:
        tokens = tuple(range(len(shares.shape) - 1))
        used = ops.mean(ops.one_hot(indices, depth=self.experts), axis=(*tokens, len(tokens)))
        self.add_loss(ops.sum(used * ops.mean(shares, axis=tokens)) * (self.balance * self.experts))
