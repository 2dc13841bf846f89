"""``Layer`` and ``MLP``: linear layers followed by activations that are given as layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mithril import ModelError
from mithril_compat.language.block import Block
from mithril_compat.language.connection import TBD, Connection
from mithril_compat.language.model import Model
from mithril_compat.layers.neural import Linear


class Layer(Model):
    """A linear layer and an activation."""

    def __init__(
        self, activation: Block, dimension: int | None = None, input: Any = TBD, weight: Any = TBD, bias: Any = TBD,
        *, name: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(name)
        linear = Linear(dimension)
        terminals = {"input": input, "weight": weight, "bias": bias}
        self.join(linear, {key: Connection(key, value=value) for key, value in terminals.items()})
        follow(self, activation, linear.edges["output"])
        self._freeze()


class MLP(Model):
    """Linear layers of these dimensions, each with its activation; parameters are ``weight0``, ``bias0``, ..."""

    def __init__(
        self, activations: Sequence[Block], dimensions: Sequence[int | None],
        input_name_templates: Mapping[str, str] | None = None, input: Any = TBD,
        *, name: str | None = None, **given: Any,
    ) -> None:  # fmt: skip
        super().__init__(name)
        if len(activations) != len(dimensions) or not activations:
            raise ModelError(
                f"MLP has {len(activations)} activations and {len(dimensions)} dimensions", hint="pass one of each"
            )
        stems = {"weight": "weight", "bias": "bias", **(input_name_templates or {})}
        source: Connection = Connection("input", value=input)
        for k, (activation, dimension) in enumerate(zip(activations, dimensions, strict=True)):
            linear = Linear(dimension)
            names = {key: f"{stem}{k}" for key, stem in stems.items() if key in ("weight", "bias")}
            parameters = {key: Connection(n, value=given.get(n, TBD)) for key, n in names.items()}
            self.join(linear, {"input": source, **parameters})
            last = k == len(dimensions) - 1
            source = follow(self, activation, linear.edges["output"], "output" if last else None)
        self.cins = [self.edges["input"].edge]
        self._freeze()


def follow(model: Model, activation: Block, source: Connection, name: str | None = "output") -> Connection:
    """Add an activation; ``name`` exposes its output."""
    (terminal,) = (key for key, edge in activation.edges.items() if edge.edge is activation.cins[0].edge)
    model.join(activation, {terminal: source})
    result = activation.couts[0].edge
    if name is not None:
        model._expose(result, name)
    model.couts = [result]
    return result
