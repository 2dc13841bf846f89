"""The graph: immutable values, nodes and graphs in static single assignment.

A ``Value`` is an identity with a name and a type; a ``Node`` applies an operation to operands; a ``Graph`` is inputs,
nodes in topological order and results. All of them are immutable: a pass builds a new graph that shares every
unchanged node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, ClassVar, NamedTuple

import numpy as np

from mithril.graph.current_builder import is_building
from mithril.graph.declaration import Declaration, limits_of
from mithril.graph.dims import Shape, Size, TensorType, numel
from mithril.graph.dtypes import DType
from mithril.graph.errors import MithrilError, OperationError, ShapeError, visible
from mithril.graph.guards import Guard, assume, collect_guards
from mithril.graph.operator_overloads import Operators
from mithril.graph.registry import operation

# The attributes of a node by name, normalized by their annotations.
Attributes = Mapping[str, Any]
ROLES = ("input", "param", "state", "constant", "cotangent")


class Origin(NamedTuple):
    """Where a node comes from: the layer's path and the user's source line."""

    path: str = ""
    file: str = ""
    line: int = 0

    def __str__(self) -> str:
        line = f"{self.file}:{self.line}" if self.file else ""
        return visible(" at ".join(part for part in (self.path and f"layer '{self.path}'", line) if part))


NOWHERE = Origin()


class Value(Operators):
    """A tensor of the graph, an identity. The name only serves readers and generated code."""

    __slots__ = ("name", "type")

    def __init__(self, name: str, type: TensorType) -> None:
        self.name = name
        self.type = type

    @property
    def dtype(self) -> DType:
        return self.type.dtype

    @property
    def shape(self) -> Shape:
        return self.type.shape

    @property
    def ndim(self) -> int:
        return len(self.type.shape)

    # While a graph is built, ``x == 0`` is an operation: False would select in where(x == 0, ...) without a word.
    # Elsewhere values are members of lists and tuples, which compare them.
    def __eq__(self, other: object) -> Any:
        return super().__eq__(other) if is_building() else self is other

    def __ne__(self, other: object) -> Any:
        return super().__ne__(other) if is_building() else self is not other

    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return visible(f"%{self.name}: {self.type}")


@dataclass(eq=False)
class Op(Declaration):
    """An operation. Calling it with values appends a node to the current graph; with arrays it computes."""

    _inferred: dict[Any, tuple[tuple[TensorType, ...], tuple[Guard, ...]]] = field(default_factory=dict, repr=False)
    _bodies: dict[Any, Graph] = field(default_factory=dict, repr=False)
    # Set by the modules ``apply`` and ``builder``, which import this module.
    _apply: ClassVar[Callable[..., Any]]
    _evaluate: ClassVar[Callable[..., Any]]
    _trace: ClassVar[Callable[..., Graph]]

    # -- declaring ---------------------------------------------------------------------------------------------------
    def vjp(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Register the decorated gradient ``(g, y, *operands, **attributes) -> one cotangent per operand``."""
        self.gradient = function
        self.gradient_reason = ""
        return function

    def surrogate_vjp(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Register a gradient that deliberately differs from the true derivative (straight-through estimators)."""
        self.surrogate = True
        return self.vjp(function)

    def regions_vjp(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Register the gradient of control flow: ``(reverse, node, cotangents) -> pairs of operand and cotangent``."""
        self.region_gradient = function
        return function

    def vmap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Register the batching rule ``(rows, has_rows, *operands, **attributes) -> results with rows as axis 0``."""
        self.batching = function
        return function

    def no_vjp(self, reason: str) -> Op:
        """Declare that the operation has no gradient, for this reason."""
        self.gradient, self.gradient_reason = None, reason
        return self

    def __repr__(self) -> str:
        return f"<op {self.name}>"

    def __fingerprint__(self) -> tuple[Any, ...]:
        return (self.name,)  # the declaration is covered by the stamp of its package

    def __reduce__(self) -> tuple[Any, ...]:
        return operation, (self.name,)

    def __call__(self, *operands: Any, **attributes: Any) -> Any:
        return Op._apply(self, operands, attributes)

    def evaluate(self, operands: Sequence[Any], attributes: Mapping[str, Any], regions: Sequence[Graph] = ()) -> Any:
        """Compute the operation on NumPy arrays by its reference implementation."""
        return Op._evaluate(self, operands, attributes, regions)

    # -- types -------------------------------------------------------------------------------------------------------
    def infer(
        self, types: Sequence[TensorType | None], attributes: Mapping[str, Any], regions: Sequence[Graph] = ()
    ) -> tuple[TensorType, ...]:
        """Return the result types; assumptions about symbolic sizes are recorded as guards of the current builder."""
        # Regions are graphs, which have no cheap key.
        if regions or self.infer_rule is not None:
            assert self.infer_rule is not None
            return self.infer_rule(types, attributes, regions)
        # With the bounds of symbols: equality of sizes ignores them, but they decide which guards are
        # needed.
        key = (tuple(types), tuple(attributes.values()), limits_of(types))
        entry = self._inferred.get(key)
        if entry is None:
            with collect_guards() as guards:
                results = self._infer(types, attributes)
            # A bound, not a policy: a process that compiles for ever new sizes must not grow.
            if len(self._inferred) > 4096:
                self._inferred.clear()
            entry = self._inferred[key] = (results, tuple(guards))
        # Assumed again for each call: guards belong to the graph being built, and a cached result has
        # none.
        for guard in entry[1]:
            assume(guard.left, guard.relation, guard.right, guard.reason)
        return entry[0]

    def _infer(self, types: Sequence[TensorType | None], attributes: Mapping[str, Any]) -> tuple[TensorType, ...]:
        try:
            self._check_operands(types)
            if self.composite and self.shape_rule is None:
                body = self.decompose(types, attributes)
                for guard in body.guards:  # the composite inherits the assumptions of its body
                    assume(guard.left, guard.relation, guard.right, guard.reason)
                return tuple(v.type for v in body.outputs)
            return self._by_rules(types, attributes)
        except MithrilError as error:
            raise error.with_facts(self.call_text(types, attributes)) from None
        except IndexError as cause:  # an axis out of range, for example in graph text
            message = f"the attributes of operation '{self.name}' do not match its operands"
            raise ShapeError(message, facts=[self.call_text(types, attributes)]) from cause

    # -- meaning -----------------------------------------------------------------------------------------------------
    def decompose(self, types: Sequence[TensorType | None], attributes: Mapping[str, Any]) -> Graph:
        """Return the body of a composite for operands of these types."""
        if not self.composite:
            raise OperationError(f"operation '{self.name}' is primitive: it has no decomposition")
        key = (tuple(types), tuple(map(repr, attributes.values())), limits_of(types))
        cached = self._bodies.get(key)
        if cached is None:
            # Sizes that are new in every call must not fill the memory of a long process.
            if len(self._bodies) > 4096:
                self._bodies.clear()
            names = [self.operand_name(k) for k in range(len(types))]
            # Those of the body's own Python code; they come first, since they give better reasons than its nodes.
            with collect_guards() as guards:
                function = partial(self._rule, "body", self.reference, **attributes)
                body = Op._trace(function, types, names, self.name)
            cached = self._bodies[key] = body.replaced(guards=(*guards, *body.guards)) if guards else body
        return cached

    def declared_flops(
        self, types: Sequence[TensorType | None], results: Sequence[TensorType], attributes: Mapping[str, Any]
    ) -> Size:
        """Return the floating-point operations by the declared ``cost``: a function, or a number per result element."""
        if callable(self.cost):
            return self.cost(types, results, attributes)
        cost, elements = self.cost or 0.0, numel(results[0].shape)
        return int(cost * elements) if isinstance(elements, int) else elements * int(cost)


class Node:
    """One application of an operation."""

    __slots__ = ("attributes", "op", "operands", "origin", "regions", "results", "tags")

    def __init__(
        self,
        op: Op,
        operands: tuple[Value | None, ...],
        attributes: Attributes,
        results: tuple[Value, ...],
        regions: tuple[Graph, ...] = (),
        origin: Origin = NOWHERE,
        tags: Attributes | None = None,
    ) -> None:
        self.op = op
        self.operands = operands
        self.attributes = attributes
        self.results = results
        self.regions = regions
        self.origin = origin
        self.tags: Attributes = tags or NO_TAGS

    @property
    def result(self) -> Value:
        """The first and usually only result."""
        return self.results[0]

    @property
    def is_constant(self) -> bool:
        """Whether the node is a scalar constant, stored in its attribute ``value``."""
        return self.op.name == "constant"

    def replaced(self, **changes: Any) -> Node:
        """Return a copy with some fields changed; the results stay the same values unless passed."""
        fields = {name: changes.get(name, getattr(self, name)) for name in FIELDS}
        return Node(**fields)

    def __repr__(self) -> str:
        results = ", ".join(f"%{v.name}" for v in self.results)
        operands = ", ".join(f"%{v.name}" if v is not None else "none" for v in self.operands)
        return visible(f"{results} = {self.op.name}({operands})")


FIELDS = ("op", "operands", "attributes", "results", "regions", "origin", "tags")
NO_TAGS: Attributes = {}
# Tags of run-time checks. Each belongs to one node: nodes that are made from it do not inherit them.
BOUNDED = "bounded"  # of a loop whose calls raise if ``max_trips`` stops it; the value names the layer that set the tag
REACHED = "reached"  # of a condition that is false after a loop that became a scan; the value is "6 While"
PLACES = "places"  # of integers that index a buffer; the value is the buffer's size and owner, "8 MultiHeadAttention"
# All tags of run-time checks.
CHECKS = frozenset({BOUNDED, REACHED, PLACES})


@dataclass(frozen=True, eq=False)
class Input:
    """An input, parameter, state, constant or cotangent of a graph."""

    value: Value
    role: str = "input"
    data: np.ndarray[Any, Any] | None = None  # the elements of a constant
    tags: Attributes = field(default_factory=dict)  # e.g. init="xavier_uniform" of a parameter
    of: str = ""  # the output that a cotangent belongs to
    name: str = field(init=False)
    type: TensorType = field(init=False)

    def __post_init__(self) -> None:
        # Read for every input in every pass: as properties they were the calls that a compilation made most often.
        object.__setattr__(self, "name", self.value.name)
        object.__setattr__(self, "type", self.value.type)


@dataclass(frozen=True, eq=False)
class Output:
    """A result of a graph. The role defines its meaning; the name is unique and only serves readers."""

    value: Value
    name: str
    role: str = "output"
    of: str = ""  # the input, the output or the check that it belongs to

    @property
    def type(self) -> TensorType:
        return self.value.type


@dataclass(frozen=True, eq=False)
class Graph:
    """Inputs with roles, nodes in an order that defines before it uses, results with names and roles."""

    inputs: tuple[Input, ...]
    nodes: tuple[Node, ...]
    results: tuple[Output, ...]
    name: str = "forward"
    guards: tuple[Guard, ...] = ()
    # Set by the modules ``text`` and ``editor``, which import this module.
    _printer: ClassVar[Callable[..., str]]
    _editor: ClassVar[Callable[[Graph], Any]]

    # -- cached look-ups ------------------------------------------------------------------------------------------
    @cached_property
    def outputs(self) -> tuple[Value, ...]:
        """The values of the results."""
        return tuple(r.value for r in self.results)

    @cached_property
    def output_names(self) -> tuple[str, ...]:
        """The names of the results."""
        return tuple(r.name for r in self.results)

    @cached_property
    def producers(self) -> dict[Value, Node]:
        """The node that produces each value; inputs have none."""
        return {result: node for node in self.nodes for result in node.results}

    @cached_property
    def users(self) -> dict[Value, tuple[Node, ...]]:
        """The nodes that use each value, each once, in graph order; unused values are absent."""
        users: dict[Value, dict[Node, None]] = {}
        for node in self.nodes:
            for operand in node.operands:
                if operand is not None:
                    users.setdefault(operand, {})[node] = None
        return {value: tuple(nodes) for value, nodes in users.items()}

    @cached_property
    def by_name(self) -> dict[str, Value]:
        """Values by name: inputs, then results."""
        names = {i.name: i.value for i in self.inputs}
        for node in self.nodes:
            for value in node.results:
                names.setdefault(value.name, value)
        return names

    @cached_property
    def input_of(self) -> dict[Value, Input]:
        return {i.value: i for i in self.inputs}

    def with_role(self, *roles: str) -> tuple[Input, ...]:
        """Return the inputs that have one of the roles, in order."""
        return tuple([i for i in self.inputs if i.role in roles])

    def results_of(self, *roles: str) -> tuple[Output, ...]:
        """Return the results that have one of the roles, in order."""
        return tuple([r for r in self.results if r.role in roles])

    def carrying(self, outputs: Iterable[Value]) -> tuple[Output, ...]:
        """Return the results with their values replaced by ``outputs``, in order."""
        return tuple(Output(v, r.name, r.role, r.of) for r, v in zip(self.results, outputs, strict=True))

    @property
    def arguments(self) -> tuple[Input, ...]:
        """The inputs that a caller passes: all but constants."""
        return tuple([i for i in self.inputs if i.role != "constant"])

    def input(self, name: str) -> Input:
        for i in self.inputs:
            if i.name == name:
                return i
        raise KeyError(name)

    # -- new graphs from this one ---------------------------------------------------------------------------------
    def replaced(self, **changes: Any) -> Graph:
        """Return a copy with some fields changed; ``outputs`` replaces the values of the results."""
        if "outputs" in changes:
            changes["results"] = self.carrying(changes.pop("outputs"))
        names = ("inputs", "nodes", "results", "name", "guards")
        return Graph(**{n: changes.get(n, getattr(self, n)) for n in names})

    def edit(self) -> Any:
        """Return an ``Editor`` for changing the graph in place; ``editor.freeze()`` returns the new graph."""
        return Graph._editor(self)

    def __str__(self) -> str:
        return Graph._printer(self)

    def __fingerprint__(self) -> tuple[Any, ...]:
        return (Graph._printer(self, origins=False),)

    def __repr__(self) -> str:
        counts = f"{len(self.inputs)} inputs, {len(self.nodes)} nodes, {len(self.outputs)} outputs"
        return visible(f"<Graph '{self.name}': {counts}>")

    def _repr_html_(self) -> str:
        import html

        return f"<details><summary>{html.escape(repr(self))}</summary><pre>{html.escape(str(self))}</pre></details>"


def types_of(values: Iterable[Value | None]) -> list[TensorType | None]:
    """Return the types of values, None for absent ones."""
    return [None if v is None else v.type for v in values]


def as_results(outputs: Value | Mapping[str, Value] | Iterable[Value | Output]) -> tuple[Output, ...]:
    """Convert outputs to graph results: mappings provide the names, values keep theirs, an ``Output`` is unchanged."""
    if isinstance(outputs, Value):
        return (Output(outputs, outputs.name),)
    if isinstance(outputs, Mapping):
        return tuple(Output(v, name) for name, v in outputs.items())
    return tuple(Output(v, v.name) if isinstance(v, Value) else v for v in outputs)


def iterate(graph: Graph) -> Iterable[tuple[Node, Graph]]:
    """Yield every node with the graph that contains it, regions included, without recursion."""
    stack = [graph]
    while stack:
        current = stack.pop()
        for node in current.nodes:
            yield node, current
            stack.extend(reversed(node.regions))
