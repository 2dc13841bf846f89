"""The frontend for transformed models, which traces the model and then transforms its graph."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from mithril.compiler.frontend import Source, TraceRequest, learn, source_of
from mithril.compiler.graph_source import with_constants
from mithril.compiler.initializers import Array, Index
from mithril.compiler.unused_parts import Unused, unused_of
from mithril.graph import DType, Graph, Input, ModelError, TensorType, unknown

Types = Mapping[str, TensorType]


@dataclass(frozen=True)
class InputOf:
    """An input of a transformed model."""

    name: str
    shape: tuple[Any, ...] | None
    dtype: DType | None
    where: str
    required: bool = True
    produced: frozenset[str] = field(default=frozenset(), repr=False, compare=False)
    primal: str = ""  # the input of a tangent, which has the same type


class Change(Protocol):
    """A transformation of models: how it changes input declarations and graphs."""

    def inputs(self, inner: Source) -> Sequence[InputOf]:
        """Return the inputs of the transformed model."""

    def outputs(self, inner: Source) -> Sequence[str]:
        """Return the names of the outputs that are known without types."""

    def inner_types(self, inner: Source, types: Types) -> dict[str, TensorType]:
        """Return the input types of the inner model for those of the transformed model."""

    def apply(self, graph: Graph, types: Types) -> Graph:
        """Return the graph of the transformed model."""

    def initial(self, inner: Source, inputs: Iterable[Input], seed: int, index: Index | None) -> dict[str, Array]:
        """Return initial values of parameters and states."""


@dataclass(frozen=True)
class Transformed:
    """A transformed model, such as ``ml.vmap(model)``; it can be compiled, trained and transformed like a model."""

    model: Any
    change: Change

    def __repr__(self) -> str:
        return f"{self.change} of {self.model!r}"


class TransformedSource:
    """The source of a transformed model."""

    def __init__(self, model: Transformed, *, outputs: Sequence[str] | None = None, inference: bool = False) -> None:
        self.change = model.change
        self.inner = source_of(model.model, outputs=None, inference=inference)
        self.requested_outputs = outputs
        self.name, self.inference = self.inner.name, self.inner.inference
        self.inputs = self.change.inputs(self.inner)

    @property
    def outputs(self) -> Sequence[str]:
        return self.requested_outputs if self.requested_outputs is not None else self.change.outputs(self.inner)

    @property
    def layers(self) -> Sequence[str]:
        return self.inner.layers

    @property
    def unused(self) -> Unused:
        return unused_of(self.inner)

    @property
    def pretrained(self) -> Mapping[str, Any]:
        return self.inner.pretrained

    @property
    def places(self) -> Sequence[str]:
        """The user's lines that messages about the model name."""
        return getattr(self.inner, "places", ())

    def learn(self, shapes: Mapping[str, Any]) -> None:
        """Let layers take sizes from the shapes of parameters that are not pretrained."""
        learn(self.inner, shapes)

    def __fingerprint__(self) -> tuple[Any, ...]:
        return (self.inner, self.change, tuple(self.requested_outputs or ()))

    def expects(self, name: str) -> tuple[tuple[Any, ...] | None, Any] | None:
        return None

    def graph(self, types: Types, request: TraceRequest) -> Graph:
        """Return the transformed graph; constant inputs are replaced after the transformation."""
        declared = {d.name: d for d in self.inputs}
        fixed = {n: np.asarray(x) for n, x in request.constants.items()}
        flags = {n: x for n, x in request.constants.items() if isinstance(x, bool)}  # affect tracing
        for name, x in fixed.items():
            kind = declared[name].dtype if name in declared else None
            types = {**types, name: TensorType(kind or _default(x), x.shape)}
        types = {n: t for n, t in types.items() if n not in flags}
        inner = TraceRequest(request.training, flags, request.trainable, request.dtype)
        graph = self.change.apply(self.inner.graph(self.change.inner_types(self.inner, types), inner), types)
        if self.requested_outputs is not None:
            graph = _select_results(graph, self.requested_outputs)
        values = {n: x for n, x in fixed.items() if n not in flags}
        return with_constants(graph, values) if values else graph

    def initial(self, inputs: Iterable[Input], seed: int, index: Index | None = None) -> dict[str, Array]:
        return self.change.initial(self.inner, inputs, seed, index)


def _default(x: np.ndarray[Any, Any]) -> DType:
    from mithril.graph import dtype as as_dtype, float32

    kind = as_dtype(x.dtype)
    return float32 if kind.name == "float64" else kind


def _select_results(graph: Graph, names: Sequence[str]) -> Graph:
    by_name = {r.name: r for r in graph.results if r.role != "state"}
    for name in names:
        if name not in by_name:
            message, facts, hint = unknown("output of the model", name, list(by_name))
            raise ModelError(message, facts=facts, hint=hint)
    return graph.replaced(results=(*(by_name[n] for n in names), *graph.results_of("state")))
