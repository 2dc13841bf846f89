"""The graph: immutable values, nodes and graphs in static single assignment.

A ``Value`` is an identity with a name and a type; a ``Node`` says which operation makes its results from its operands;
a ``Graph`` is inputs, nodes in order, outputs. Nothing here ever changes: a pass builds a new graph and shares every
node it did not touch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np

from mithril.base.dims import Shape
from mithril.base.dtypes import DType
from mithril.base.guards import Guard
from mithril.base.operator_overloads import Operators
from mithril.base.tensor_type import TensorType

Attributes = Mapping[str, Any]
ROLES = ("input", "param", "state", "constant")


class OpLike(Protocol):
    """What the graph needs to know of an operation; ``mithril.ops`` has the whole of it."""

    @property
    def name(self) -> str: ...

    def infer(
        self, types: Sequence[TensorType | None], attributes: Attributes, regions: Sequence[Graph] = ()
    ) -> tuple[TensorType, ...]: ...


class Origin(NamedTuple):
    """Where a node comes from: the layer's path and the user's source line."""

    path: str = ""
    file: str = ""
    line: int = 0

    def __str__(self) -> str:
        line = f"{self.file}:{self.line}" if self.file else ""
        return " at ".join(part for part in (self.path and f"layer '{self.path}'", line) if part)


NOWHERE = Origin()


class Value(Operators):
    """One tensor of the graph. Its identity is what counts; the name is for people and for the generated code."""

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

    def __repr__(self) -> str:
        return f"%{self.name}: {self.type}"


class Node:
    """One application of an operation."""

    __slots__ = ("attributes", "op", "operands", "origin", "regions", "results", "tags")

    def __init__(
        self,
        op: OpLike,
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
        """The first, usually only, result."""
        return self.results[0]

    @property
    def axes(self) -> Any:
        """Which axes of operands and results are the same loop: ``Axes``, cached by the operation."""
        types = [None if v is None else v.type for v in self.operands]
        return self.op.axes(types, self.attributes, [v.type for v in self.results])  # type: ignore[attr-defined]

    def replaced(self, **changes: Any) -> Node:
        """This node with some fields changed; the results stay the same values unless given."""
        fields = {name: changes.get(name, getattr(self, name)) for name in FIELDS}
        return Node(**fields)

    def __repr__(self) -> str:
        results = ", ".join(f"%{v.name}" for v in self.results)
        operands = ", ".join(f"%{v.name}" if v is not None else "none" for v in self.operands)
        return f"{results} = {self.op.name}({operands})"


FIELDS = ("op", "operands", "attributes", "results", "regions", "origin", "tags")
NO_TAGS: Attributes = {}


@dataclass(frozen=True, eq=False)
class Input:
    """A value that comes from outside, and what it is to the model."""

    value: Value
    role: str = "input"
    data: np.ndarray[Any, Any] | None = None  # the elements of a constant
    tags: Attributes = field(default_factory=dict)  # e.g. init="xavier_uniform" of a parameter

    @property
    def name(self) -> str:
        return self.value.name

    @property
    def type(self) -> TensorType:
        return self.value.type


@dataclass(frozen=True, eq=False)
class Graph:
    """Inputs with roles, nodes in an order that defines before it uses, named outputs."""

    inputs: tuple[Input, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Value, ...]
    output_names: tuple[str, ...] = ()
    name: str = "forward"
    guards: tuple[Guard, ...] = ()
    # Filled by the modules that know how: ``ir.text`` and ``ir.editor``.
    _printer: ClassVar[Callable[..., str]]
    _editor: ClassVar[Callable[[Graph], Any]]

    def __post_init__(self) -> None:
        if not self.output_names:
            object.__setattr__(self, "output_names", tuple(v.name for v in self.outputs))

    # -- look-ups, made once when first asked for -----------------------------------------------------------------
    @cached_property
    def producers(self) -> dict[Value, Node]:
        """The node that makes a value; inputs have none."""
        return {result: node for node in self.nodes for result in node.results}

    @cached_property
    def users(self) -> dict[Value, tuple[Node, ...]]:
        """The nodes that read a value, each once, in order; values nobody reads are absent."""
        found: dict[Value, dict[Node, None]] = {}
        for node in self.nodes:
            for operand in node.operands:
                if operand is not None:
                    found.setdefault(operand, {})[node] = None
        return {value: tuple(nodes) for value, nodes in found.items()}

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
        """The inputs of some roles, in order."""
        return tuple(i for i in self.inputs if i.role in roles)

    @property
    def arguments(self) -> tuple[Input, ...]:
        """The inputs a caller binds: all but constants."""
        return tuple(i for i in self.inputs if i.role != "constant")

    def input(self, name: str) -> Input:
        for i in self.inputs:
            if i.name == name:
                return i
        raise KeyError(name)

    # -- new graphs from this one ---------------------------------------------------------------------------------
    def replaced(self, **changes: Any) -> Graph:
        """This graph with some fields changed."""
        names = ("inputs", "nodes", "outputs", "output_names", "name", "guards")
        if "outputs" in changes and "output_names" not in changes and len(changes["outputs"]) != len(self.outputs):
            changes["output_names"] = ()
        return Graph(**{n: changes.get(n, getattr(self, n)) for n in names})

    def edit(self) -> Any:
        """Return an ``Editor`` for changing the graph in place; ``editor.freeze()`` returns the new graph."""
        return Graph._editor(self)

    def __str__(self) -> str:
        return Graph._printer(self)

    def __fingerprint__(self) -> tuple[Any, ...]:
        return (Graph._printer(self, origins=False),)

    def __repr__(self) -> str:
        return f"<Graph '{self.name}': {len(self.inputs)} inputs, {len(self.nodes)} nodes, {len(self.outputs)} outputs>"

    def _repr_html_(self) -> str:
        import html

        return f"<details><summary>{html.escape(repr(self))}</summary><pre>{html.escape(str(self))}</pre></details>"


def iterate(graph: Graph) -> Iterable[tuple[Node, Graph]]:
    """Every node with the graph that holds it, regions included, without recursion."""
    stack = [graph]
    while stack:
        current = stack.pop()
        for node in current.nodes:
            yield node, current
            stack.extend(reversed(node.regions))
