"""The second half of a layer: an MLP, or a mixture of experts."""

from __future__ import annotations

from typing import Any

from mithril import ops
from mithril.models import Layer, MixtureOfExperts
from mithril_hub.decoder.config import DecoderConfig, Experts, last_name
from mithril_hub.parts import INIT, Projection
from mithril_hub.weights import activate, activation_name


class FeedForward(Layer):
    """An MLP: one product, or two of which one is the gate."""

    def __init__(self, config: DecoderConfig, dtype: str) -> None:
        self.config = config
        names, size, bias = config.names, config.intermediate, config.mlp_bias
        widths = {names.gate_up: 2 * size} if names.gate_up else {names.gate: size, names.up: size}
        if not config.gated:
            widths = {names.up: size}
        for name, width in widths.items():
            part = Projection(config.hidden, width, dtype, bias=bias, input_major=config.input_major)
            setattr(self, last_name(name), part)
        down = Projection(size, config.hidden, dtype, bias=bias, input_major=config.input_major)
        setattr(self, last_name(names.down), down)

    def build(self, x: Any) -> Any:
        config, names = self.config, self.config.names
        if names.gate_up:
            sizes = (config.intermediate, config.intermediate)
            gate, up = ops.split(_part(self, names.gate_up)(x), sizes=sizes, axis=-1)
            hidden = activate(config.activation, gate) * up
        elif config.gated:
            hidden = activate(config.activation, _part(self, names.gate)(x)) * _part(self, names.up)(x)
        else:
            hidden = activate(config.activation, _part(self, names.up)(x))
        return _part(self, names.down)(hidden)


class Expert(Layer):
    """An expert: an MLP with a gate."""

    def __init__(self, hidden: int, size: int, activation: str, names: tuple[str, str, str], dtype: str) -> None:
        self.names, self.activation = names, activation
        gate, up, down = names
        setattr(self, gate, Projection(hidden, size, dtype))
        setattr(self, up, Projection(hidden, size, dtype))
        setattr(self, down, Projection(size, hidden, dtype))

    def build(self, x: Any) -> Any:
        gate, up, down = (getattr(self, name) for name in self.names)
        return down(activate(self.activation, gate(x)) * up(x))


class StackedExperts(Layer):
    """All experts with one parameter for the same matrix of each."""

    inputs = ("input", "shares", "numbers")

    def __init__(self, config: DecoderConfig, experts: Experts, dtype: str) -> None:
        self.config, self.experts, self.dtype = config, experts, dtype

    def build(self, x: Any, shares: Any, numbers: Any) -> Any:
        config, experts = self.config, self.experts
        inner, outer = (experts.count, config.hidden, experts.size), (experts.count, experts.size, config.hidden)
        shapes = {experts.gate: inner, experts.up: inner, experts.down: outer}
        gate, up, down = (self.param(f"{name}.weight", shape, INIT, self.dtype) for name, shape in shapes.items())
        return ops.expert_mixture(x, shares, numbers, up, down, gate, activation=activation_name(config.activation))


class Mixture(Layer):
    """The sum of experts, each weighted by the router; experts that are not active have the weight 0."""

    def __init__(self, config: DecoderConfig, experts: Experts, dtype: str) -> None:
        self.settings = experts
        self.router_name, self.list_name = last_name(experts.router), last_name(experts.joint.rstrip("."))
        setattr(self, self.router_name, Projection(config.hidden, experts.count, dtype))
        names = (experts.gate, experts.up, experts.down)
        expert = [Expert(config.hidden, experts.size, config.activation, names, dtype) for _ in range(experts.count)]
        setattr(self, self.list_name, StackedExperts(config, experts, dtype) if experts.stacked else expert)
        if experts.shared:
            shared = ("gate_proj", "up_proj", "down_proj")
            self.shared_expert = Expert(config.hidden, experts.shared, config.activation, shared, dtype)
            self.shared_expert_gate = Projection(config.hidden, 1, dtype)

    def build(self, x: Any) -> Any:
        settings, layers = self.settings, getattr(self, self.list_name)
        logits = getattr(self, self.router_name)(x)
        _, numbers, shares = MixtureOfExperts.routed(logits, settings.active, normalized=settings.normalized)
        if settings.stacked:
            total = layers(x, shares, numbers)
        else:
            parts = []
            for e, expert in enumerate(layers):
                share = ops.sum(ops.where(ops.equal(numbers, e), shares, 0.0), axis=-1, keepdims=True)
                # the results for other tokens may overflow
                parts.append(ops.where(ops.not_equal(share, 0.0), expert(x), 0.0) * share)
            total = parts[0]
            for part in parts[1:]:
                total = total + part
        if settings.shared:
            total = total + self.shared_expert(x) * ops.sigmoid(self.shared_expert_gate(x))
        return total


def _part(layer: Layer, name: str) -> Layer:
    return getattr(layer, last_name(name))  # type: ignore[no-any-return]  # the names are those of the checkpoint
