"""Programs of a compiled model: one executable for one signature, with or without gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from operator import is_
from typing import TYPE_CHECKING, Any, Protocol

from mithril.backend import Backend, LazyGraph
from mithril.compiler.batch_buckets import BucketedExecutable, Buckets
from mithril.compiler.index_checks import Check, IndexCheckedExecutable
from mithril.compiler.memory_usage import ProgramMemory
from mithril.compiler.unused_parts import Unused
from mithril.compiler.updated_states import EarlyChecks, early_checks
from mithril.graph import Graph, Guard, Input, Output, Shape, TensorType, bind, substitute, visible

if TYPE_CHECKING:
    import numpy as np

    from mithril.passes import PassContext, PassManager


@dataclass(frozen=True, slots=True)
class ProgramKind:
    """The mode of a program and the gradients that it computes."""

    training: bool = False
    of: tuple[str, ...] = ()  # outputs with cotangents; empty: no gradients
    wrt: tuple[str, ...] | None = None  # inputs to differentiate; None: all parameters


@dataclass(frozen=True, eq=False)
class BoundArrays:
    """Arrays of one binding whose expressions are computed in advance, and the results, which its programs share."""

    params: Mapping[str, Any]
    statistics: Mapping[str, Any]
    originals: tuple[Any, ...] = ()  # the parameters before conversion
    # by fingerprint of the expressions: results that programs read, and the forms that a backend made of weights
    computed: dict[str, dict[str, Any]] = field(default_factory=dict)
    forms: dict[str, MutableMapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ProgramKey:
    """The key of a program: input types, kind, and bound parameters."""

    types: tuple[tuple[str, TensorType], ...]  # types of the model's inputs, in order
    kind: ProgramKind
    binding: int = 0  # number of the bind() whose parameters belong to the program; 0: none
    constants: Mapping[str, Any] = field(default_factory=dict, compare=False)  # these that it embeds, as NumPy arrays
    stored: tuple[tuple[str, int], ...] = ()  # sparse inputs, and the number of elements that they store at most
    bound: BoundArrays | None = field(default=None, compare=False)  # these whose expressions are computed in advance

    @property
    def embeds(self) -> bool:
        """Whether the parameters are constants of the program."""
        return bool(self.binding) and self.bound is None


@dataclass(frozen=True, slots=True)
class Interface:
    """The types and guards that calls are checked against, without access to the graph."""

    params: Mapping[str, TensorType]
    states: Mapping[str, TensorType]
    outputs: Mapping[str, TensorType]  # without the new states
    guards: tuple[Guard, ...]
    donated: tuple[str, ...] = ()  # the states that a run overwrites

    def all(self) -> Iterable[TensorType]:
        return (*self.params.values(), *self.states.values(), *self.outputs.values())

    @staticmethod
    def of(traced: Graph, graph: Graph) -> Interface:
        """Return the interface: inputs of the optimized graph, outputs and guards of the traced graph."""
        return Interface(
            {i.name: i.type for i in graph.with_role("param")},
            {i.name: i.type for i in graph.with_role("state")},
            {r.name: r.type for r in traced.results if r.role != "state"},
            traced.guards,
            tuple(i.name for i in graph.with_role("state") if i.tags.get("donated")),
        )


@dataclass(frozen=True, slots=True)
class Results:
    """Names of a program's results by role, in order."""

    outputs: tuple[str, ...]
    gradients: tuple[tuple[str, str], ...] = ()  # input, result name
    states: tuple[tuple[str, str], ...] = ()  # state, result name

    @staticmethod
    def of(traced: Graph, gradients: Iterable[Output] = ()) -> Results:
        """Return the result names of a traced graph and of the requested gradients."""
        return Results(
            tuple(r.name for r in traced.results if r.role != "state"),
            tuple((r.of, r.name) for r in gradients),
            tuple((r.of, r.name) for r in traced.results_of("state")),
        )

    @property
    def only_outputs(self) -> bool:
        return not self.gradients and not self.states


def assemble_of(executable: Any) -> Callable[..., Any] | None:
    """Return the function that builds an array from the regions of devices, also of a call in another setting."""
    call = getattr(executable, "call", None)
    return getattr(getattr(call, "jitted_call", call), "assemble", None)


def are_entries(arrays: Mapping[str, Any], values: tuple[Any, ...]) -> bool:
    """Whether the entries of a dictionary are these objects, in this order."""
    return len(arrays) == len(values) and all(map(is_, arrays.values(), values))


Pack = Callable[[dict[str, Any], MutableMapping[str, Any]], dict[str, Any]]


def _unchanged(weights: dict[str, Any], forms: MutableMapping[str, Any]) -> dict[str, Any]:
    return weights


class CallWithWeights:
    """An executable with the weights of one binding, which take the place of the parameters of calls.

    Nothing refers to it in a cycle: an old binding is freed at once.
    """

    def __init__(self, executable: Any, weights: Mapping[str, Any]) -> None:
        run = getattr(executable, "direct", executable)
        self.direct: Callable[[Any, Any], Any] = lambda params, inputs: run(weights, inputs)
        if hasattr(executable, "repeated"):
            self.repeated = partial(_repeated, executable.repeated, weights)

    def __call__(self, params: Mapping[str, Any], inputs: Mapping[str, Any]) -> Any:
        return self.direct(params, inputs)


def _repeated(
    repeated: Any, weights: Mapping[str, Any], params: Any, inputs: Any, otherwise: Callable[[Any, Any], Any]
) -> Callable[[Any, Any], Any]:
    """Return the fast path of an executable for calls with the same binding."""
    values = tuple(params.values())
    fast = repeated(weights, inputs, lambda _, call_inputs: otherwise(params, call_inputs))

    def call(call_params: Any, call_inputs: Any) -> Any:
        if call_params is params and are_entries(params, values):
            return fast(weights, call_inputs)
        return otherwise(call_params, call_inputs)

    return call


@dataclass(eq=False, repr=False)
class Program:
    """A compiled program: the graphs before and after the passes, and the executable."""

    request: ProgramKey
    before: LazyGraph  # traced graph
    after: LazyGraph  # graph after the passes
    interface: Interface
    executable: Any
    results: Results
    report: Any = None  # report of the passes
    backend: Backend = field(kw_only=True)
    memory: ProgramMemory = field(init=False)
    timed: bool = False  # whether a profile has run it before
    checked: IndexCheckedExecutable | None = None  # executable with run-time checks
    bucketed: BucketedExecutable | None = None  # executable that pads batches
    folded: tuple[LazyGraph, ...] = ()  # expressions of bound parameters, computed in this order
    pack: Pack = _unchanged  # converts weights to the forms that the program reads
    weights: Mapping[str, Any] | None = None  # their results and the other bound parameters, which calls do not pass
    stepped: dict[Any, Any] = field(default_factory=dict)  # interpreters by input shapes
    state_sizes: dict[Any, dict[str, Shape]] = field(default_factory=dict)  # by input shapes

    def __post_init__(self) -> None:
        self.memory = ProgramMemory(self.backend, self.executable)

    def __repr__(self) -> str:
        kind = self.request.kind
        words = ["training"] * kind.training + ["gradients"] * bool(kind.of)
        inputs = ", ".join(f"{name}: {t}" for name, t in self.request.types)
        return visible(f"Program({inputs}{'; ' if words else ''}{', '.join(words)})")

    @property
    def call(self) -> Any:
        """The executable that calls of the model run."""
        executable = self.bucketed or self.checked or self.executable
        return executable if self.weights is None else CallWithWeights(executable, self.weights)

    @cached_property
    def early(self) -> EarlyChecks | None:
        """The checks of a call before the run, None if the run itself has to finish before its checks."""
        late = self.checked is not None and any(isinstance(check, Check) for check in self.checked.checks)
        return None if late else early_checks(self.traced)

    def assembled(self, name: str, read: Callable[[Any], Any]) -> Any:
        """Build a parameter of which each of several devices holds a region, ``read(index)``; None on one device."""
        assemble = assemble_of(self.executable)
        type = self.interface.params.get(name)
        return None if assemble is None or type is None else assemble(name, tuple(map(int, type.shape)), read)

    def state_shapes(self, types: Mapping[str, TensorType]) -> Mapping[str, Shape]:
        """Return the shapes of the states for inputs of these types."""
        key = tuple(t.shape for t in types.values())
        shapes = self.state_sizes.get(key)
        if shapes is None:
            sizes = bind({n: t.shape for n, t in self.types.items()}, {n: t.shape for n, t in types.items()})  # type: ignore[misc]
            shapes = {n: tuple(substitute(d, sizes) for d in t.shape) for n, t in self.interface.states.items()}
            self.state_sizes[key] = shapes
        return shapes

    @property
    def traced(self) -> Graph:
        return self.before.get()

    @property
    def graph(self) -> Graph:
        return self.after.get()

    @property
    def types(self) -> dict[str, TensorType]:
        return dict(self.request.types)


class Compiler(Protocol):
    """The interface by which a compiled model gets its programs: ``ModelCompiler``, or the reader of a file format."""

    @property
    def model(self) -> Any: ...

    def specialize(self, request: ProgramKey) -> Program: ...

    def lowered(self, request: ProgramKey) -> Graph: ...

    def differentiable(self, request: ProgramKey) -> tuple[Interface, Results, Callable[..., Any]]: ...

    def probe(self, types: Mapping[str, TensorType] | None, *, training: bool = True) -> Graph: ...

    def passes(self) -> tuple[PassManager, PassContext]: ...

    def buckets(self, training: bool, *, recompiles: bool) -> Buckets | None: ...

    def check_call(self, program: Program, shapes: Mapping[str, tuple[int, ...]]) -> None: ...

    def folds(self, request: ProgramKey) -> bool: ...

    @property
    def unused(self) -> Unused: ...

    @property
    def pretrained(self) -> Mapping[str, Any]: ...

    def initial(self, inputs: Iterable[Input], seed: int, index: Any = None) -> dict[str, np.ndarray[Any, Any]]: ...

    def learn(self, shapes: Mapping[str, Any]) -> bool: ...


class Compiled(Protocol):
    """A compiled model: ``mithril.compiler.compiled_model.CompiledModel``."""

    name: str
    backend: Backend
    options: Mapping[str, Any]

    @property
    def interface(self) -> Graph: ...
    @property
    def params(self) -> dict[str, Any] | None: ...
    @property
    def held_params(self) -> Mapping[str, Any]: ...
    @property
    def programs(self) -> tuple[Program, ...]: ...
    @property
    def last_shapes(self) -> dict[str, tuple[int, ...]]: ...
    def get_shapes(self) -> dict[str, list[Any]]: ...
    def program_for(self, gradients: bool, /) -> Program | None: ...
    def concrete(self, program: Program, shapes: Mapping[str, tuple[int, ...]], /) -> Graph: ...
    def bound_call(
        self, params: Any, inputs: Any, /, *, state: Any = None, training: bool = False
    ) -> tuple[Program, dict[str, Any]]: ...
