"""Frontends: how a model of some kind becomes a graph. ``mithril.models`` is the first, a ``Graph`` the second.

A frontend is a function ``source(model, *, outputs, inference) -> Source``, named by a ``FrontendSpec``. The compiler
knows models through their source only.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import Any, Protocol

import numpy as np

from mithril import plugins
from mithril.base import DType, TensorType
from mithril.ir import Graph, Input
from mithril.plugins import FrontendSpec

# The core's own frontends; a model of no known kind goes to the first, which says what is accepted.
CORE = (
    FrontendSpec("models", ("mithril.models.language.layer.Layer",), "mithril.models.frontend:LayerSource"),
    FrontendSpec("graph", ("mithril.ir.core.Graph",), "mithril.compiler.graph_source:GraphSource"),
    FrontendSpec(
        "transformed",
        ("mithril.compiler.transformed.Transformed",),
        "mithril.compiler.transformed:TransformedSource",
    ),
)


class InputDeclaration(Protocol):
    """An input of a model, as declared."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[Any, ...] | None: ...  # numbers, names, dims, None for any size; None: unknown rank
    @property
    def dtype(self) -> DType | None: ...
    @property
    def where(self) -> str: ...  # the layer that reads it first, and the user's line
    @property
    def required(self) -> bool: ...
    @property
    def alike(self) -> str: ...  # a connection of nearly the same name that a layer produces, or ""


@dataclass(frozen=True)
class TraceRequest:
    """How a model is to be traced."""

    training: bool = False
    constants: Mapping[str, Any] = field(default_factory=dict)  # inputs fixed to values
    trainable: Collection[str] = ()  # names or patterns of the inputs to differentiate by; empty: all parameters
    dtype: DType | None = None  # of parameters whose dtype no input decides


class Source(Protocol):
    """One model, as the compiler sees it."""

    name: str
    inference: bool

    @property
    def inputs(self) -> Sequence[InputDeclaration]: ...
    @property
    def outputs(self) -> Sequence[str]: ...
    @property
    def layers(self) -> Sequence[str]: ...  # their paths

    def expects(self, name: str) -> tuple[tuple[Any, ...] | None, Any] | None:
        """Return the shape and dtype that the first reader of an input expects, or None if nothing is known."""

    def graph(self, types: Mapping[str, TensorType], request: TraceRequest) -> Graph:
        """Return the typed graph for inputs of these types."""

    def initial(self, inputs: Iterable[Input], seed: int) -> dict[str, np.ndarray[Any, Any]]:
        """Return initial values of parameters and states."""

    def __fingerprint__(self) -> tuple[Any, ...]: ...


def is_model(target: Any) -> bool:
    """Whether some frontend accepts an object of this class."""
    classes = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(target).__mro__}
    specs = [*CORE, *(registered.spec for registered in plugins.frontends().values())]
    return any(classes.intersection(spec.accepts) for spec in specs)


def source_of(model: Any, *, outputs: Sequence[str] | None, inference: bool) -> Source:
    """Return the source of a model, by the frontend that accepts its class."""
    classes = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(model).__mro__}
    frontend = _frontend(classes)
    source: Source = frontend(model, outputs=outputs, inference=inference)
    return source


def _frontend(classes: set[str]) -> Any:
    for spec in CORE:
        if classes.intersection(spec.accepts):
            return resolve_name(spec.loads)
    for name, registered in plugins.frontends().items():
        if classes.intersection(registered.spec.accepts):
            return plugins.load_frontend(name)
    return resolve_name(CORE[0].loads)
