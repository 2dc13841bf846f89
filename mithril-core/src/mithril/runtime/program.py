"""One executable of a compiled model: for one signature, forward only or with gradients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mithril.backend import Backend
from mithril.base import Guard, TensorType
from mithril.ir import Graph, LazyGraph, Output
from mithril.runtime.batch_buckets import Bucketed
from mithril.runtime.index_checks import Checked
from mithril.runtime.memory_usage import ProgramMemory


@dataclass(frozen=True, slots=True)
class Kind:
    """What a program computes besides the outputs."""

    training: bool = False
    of: tuple[str, ...] = ()  # outputs that get a cotangent; empty: no gradients
    wrt: tuple[str, ...] | None = None  # inputs whose gradients are wanted; None: all parameters


@dataclass(frozen=True, slots=True)
class Request:
    """What the compiler is asked for."""

    types: tuple[tuple[str, TensorType], ...]  # of the model's inputs, in order
    kind: Kind
    binding: int = 0  # which parameters are baked in: 0 for none, else the number of the bind() they came by
    constants: Mapping[str, Any] = field(default_factory=dict, compare=False)  # these parameters, as NumPy


@dataclass(frozen=True, slots=True)
class Interface:
    """What a call is checked against, without looking at any operation."""

    params: Mapping[str, TensorType]
    states: Mapping[str, TensorType]
    outputs: Mapping[str, TensorType]  # without the new states
    guards: tuple[Guard, ...]

    def all(self) -> Iterable[TensorType]:
        return (*self.params.values(), *self.states.values(), *self.outputs.values())

    @staticmethod
    def of(traced: Graph, graph: Graph) -> Interface:
        """Inputs of what runs; outputs and assumptions of the model."""
        return Interface(
            {i.name: i.type for i in graph.with_role("param")},
            {i.name: i.type for i in graph.with_role("state")},
            {r.name: r.type for r in traced.results if r.role != "state"},
            traced.guards,
        )


@dataclass(frozen=True, slots=True)
class Results:
    """Names of a program's results by what they are to the caller, in order."""

    outputs: tuple[str, ...]
    gradients: tuple[tuple[str, str], ...] = ()  # the input, and the name of the result
    states: tuple[tuple[str, str], ...] = ()  # the state, and the name of the result

    @staticmethod
    def of(traced: Graph, gradients: Iterable[Output] = ()) -> Results:
        """Of a model's graph, and of the gradients that were asked for besides."""
        return Results(
            tuple(r.name for r in traced.results if r.role != "state"),
            tuple((r.of, r.name) for r in gradients),
            tuple((r.of, r.name) for r in traced.results_of("state")),
        )

    @property
    def only_outputs(self) -> bool:
        return not self.gradients and not self.states


@dataclass(eq=False, repr=False, slots=True)
class Program:
    """The answer: the graphs before and after the passes, and what runs."""

    request: Request
    before: LazyGraph  # the graph as traced
    after: LazyGraph  # and after the passes
    interface: Interface
    executable: Any
    results: Results
    report: Any = None  # of the passes
    backend: Backend = field(kw_only=True)
    memory: ProgramMemory = field(init=False)
    timed: bool = False  # whether a profile has run it before
    checked: Checked | None = None  # the executable where checks=True
    bucketed: Bucketed | None = None  # the executable for batches that are rounded up
    stepped: dict[Any, Any] = field(default_factory=dict)  # by shapes: ways to run it operation by operation

    def __post_init__(self) -> None:
        self.memory = ProgramMemory(self.backend, self.executable)

    def __repr__(self) -> str:
        kind = self.request.kind
        words = ["training"] * kind.training + ["gradients"] * bool(kind.of)
        inputs = ", ".join(f"{name}: {t}" for name, t in self.request.types)
        return f"Program({inputs}{'; ' if words else ''}{', '.join(words)})"

    @property
    def call(self) -> Any:
        """What a call of the model calls."""
        return self.bucketed or self.checked or self.executable

    @property
    def traced(self) -> Graph:
        return self.before.get()

    @property
    def graph(self) -> Graph:
        return self.after.get()

    @property
    def types(self) -> dict[str, TensorType]:
        return dict(self.request.types)
