"""The second half of a layer: an MLP, or a mixture of experts."""

from __future__ import annotations

from typing import Any

from mithril import ops
from mithril.models import MixtureOfExperts
from mithril_hub.decoder.config import DecoderConfig, Experts
from mithril_hub.weights import Weights, activate, activation_name


def feed_forward(weights: Weights, config: DecoderConfig, n: int, x: Any) -> Any:
    """Return the MLP or the mixture of experts of layer ``n``."""
    names = config.names
    if config.experts is not None and config.sparse[n]:
        return mixture(weights, config, config.experts, x)
    size, bias = config.intermediate, config.mlp_bias
    if names.gate_up:
        joint = weights.linear(names.gate_up, x, 2 * size, bias=bias)
        gate, up = ops.split(joint, sizes=(size, size), axis=-1)
        hidden = activate(config.activation, gate) * up
    elif config.gated:
        hidden = activate(config.activation, weights.linear(names.gate, x, size, bias=bias))
        hidden = hidden * weights.linear(names.up, x, size, bias=bias)
    else:
        hidden = activate(config.activation, weights.linear(names.up, x, size, bias=bias))
    return weights.linear(names.down, hidden, config.hidden, bias=bias)


def mixture(weights: Weights, config: DecoderConfig, experts: Experts, x: Any) -> Any:
    """Return the sum of the experts, each weighted by the router; experts that are not active have the weight 0."""
    logits = weights.linear(experts.router, x, experts.count)
    _, numbers, shares = MixtureOfExperts.routed(logits, experts.active, normalized=experts.normalized)
    total = _stacked(weights.below(experts.joint), config, experts, x, shares, numbers) if experts.stacked else None
    for e in range(0 if experts.stacked else experts.count):
        part = weights.below(experts.expert.format(e))
        hidden = activate(config.activation, part.linear(experts.gate, x, experts.size))
        y = part.linear(experts.down, hidden * part.linear(experts.up, x, experts.size), config.hidden)
        share = ops.sum(ops.where(ops.equal(numbers, e), shares, 0.0), axis=-1, keepdims=True)
        y = ops.where(ops.not_equal(share, 0.0), y, 0.0) * share  # the results for other tokens may overflow
        total = y if total is None else total + y
    if experts.shared:
        part = weights.below("mlp.shared_expert.")
        hidden = activate(config.activation, part.linear("gate_proj", x, experts.shared))
        y = part.linear("down_proj", hidden * part.linear("up_proj", x, experts.shared), config.hidden)
        total = total + y * ops.sigmoid(weights.linear("mlp.shared_expert_gate", x, 1))
    return total


def _stacked(weights: Weights, config: DecoderConfig, experts: Experts, x: Any, shares: Any, numbers: Any) -> Any:
    """Return the weighted sum of experts whose weights are stacked."""
    inner, outer = (experts.count, config.hidden, experts.size), (experts.count, experts.size, config.hidden)
    shapes = {experts.gate: inner, experts.up: inner, experts.down: outer}
    gate, up, down = (weights.param(f"{name}.weight", shape) for name, shape in shapes.items())
    activation = activation_name(config.activation)
    return ops.expert_mixture(x, shares, numbers, up, down, gate, activation=activation)
