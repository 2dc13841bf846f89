"""The frontend for layers and models."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from operator import attrgetter
from typing import Any

from mithril.backend import is_ours
from mithril.compiler import Array, Index, TraceRequest, Unused, initialize
from mithril.graph import Graph, Input, Shape, TensorType
from mithril.models.language.flatten import InputDecl, flatten
from mithril.models.language.surgery import walk
from mithril.models.language.trace import trace_model, weights_of
from mithril.models.language.trace_context import shapes_of


class LayerSource:
    """A flattened model, or a flattened single layer."""

    def __init__(self, model: Any, *, outputs: Sequence[str] | None = None, inference: bool = False) -> None:
        self._model = model
        self.flat = flatten(model, outputs=outputs, inference=inference)
        self.name = self.flat.name
        self.inference = self.flat.inference

    @property
    def inputs(self) -> Sequence[InputDecl]:
        return self.flat.inputs

    @property
    def outputs(self) -> Sequence[str]:
        return [name for name, _ in self.flat.outputs]

    @property
    def layers(self) -> Sequence[str]:
        return [call.path for call in self.flat.layer_calls]

    @property
    def unused(self) -> Unused:
        """The inputs, parameters and layers that no output depends on."""
        layers = tuple(call.path for call in self.flat.layer_calls if not call.needed)
        return Unused(self.flat.unused_inputs, self.flat.unused_params, layers)

    @property
    def layer_types(self) -> set[type]:
        """The classes of all layers, also of those within others."""
        return {type(self._model), *(type(layer) for _, layer in walk(self._model))}

    @property
    def pretrained(self) -> Mapping[str, Any]:
        return self.flat.pretrained

    @property
    def places(self) -> list[str]:
        """The user's lines that messages about the model name; they do not affect programs."""
        builds = [
            getattr(kind.__dict__.get("build"), "__code__", None) for kind in self.layer_types if not is_ours(kind)
        ]
        methods = {f"{code.co_filename}:{code.co_firstlineno}" for code in builds if code is not None}
        calls = [str(call.location) for call in self.flat.layer_calls]
        return [*calls, *(d.where for d in self.flat.inputs), *sorted(methods)]

    def learn(self, shapes: Mapping[str, Shape]) -> None:
        """Let layers take sizes from the shapes of parameters that are not pretrained."""
        self.flat.learned = shapes

    def __fingerprint__(self) -> tuple[Any, ...]:
        return self.flat, shapes_of(self.flat.pretrained)  # layers take sizes from them

    def expects(self, name: str) -> tuple[tuple[Any, ...] | None, Any] | None:
        """Return ``Layer.expects(terminal)`` of the first layer that uses the input, or None if no layer does."""
        slot = next((d.slot for d in self.flat.inputs if d.name == name), None)
        for call in filter(attrgetter("needed"), self.flat.layer_calls):
            terminals = (*call.layer.inputs, *call.layer.optional)
            for terminal, operand in zip(terminals, call.operands, strict=False):
                if operand == slot:
                    with weights_of(call, self.flat):
                        return call.layer.expects(terminal)
        return None

    def known_part(self, names: Collection[str]) -> LayerSource | None:
        """Return the source of the layers that depend on these inputs alone, or None if there is none."""
        inputs = [d for d in self.flat.inputs if d.name in names]
        unknown = {d.slot for d in self.flat.inputs if d.name not in names}
        layer_calls = []
        for call in filter(attrgetter("needed"), self.flat.layer_calls):
            if unknown.isdisjoint((*call.operands, *call.weights.values())):
                layer_calls.append(call)
            else:
                unknown.update(call.results.values())
        if not layer_calls:
            return None
        slots = [slot for call in layer_calls for slot in call.results.values()]
        outputs = tuple((f"known_{slot}", slot) for slot in slots)
        part = copy(self)
        part.flat = replace(self.flat, inputs=tuple(inputs), outputs=outputs, layer_calls=layer_calls)
        return part

    def graph(self, types: Mapping[str, TensorType], request: TraceRequest) -> Graph:
        return trace_model(
            self.flat,
            types,
            training=request.training,
            constants=request.constants,
            trainable=request.trainable or (),
            dtype=request.dtype,
        )

    def initial(self, inputs: Iterable[Input], seed: int, index: Index | None = None) -> dict[str, Array]:
        return initialize(inputs, seed, self.flat.pretrained, index)
