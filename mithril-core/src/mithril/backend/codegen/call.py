"""One application of an operation, as a lowering sees it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from mithril.base import DType, OperationError, TensorType
from mithril.ir import Graph, Node, Value


class Text(Protocol):
    """The part of the lowering table that a lowering uses: dtypes and scalars as source text."""

    def is_weak(self, number: Any, dtype: DType, /) -> bool: ...
    def scalar_text(self, value: Any, dtype: DType, /) -> str: ...
    def dtype_text(self, dtype: DType, /) -> str: ...


class FreshNames(Protocol):
    """Local names that are not taken."""

    def fresh(self, wish: str, /) -> str: ...


class Lines(Protocol):
    """The part of the writer that a lowering uses."""

    @property
    def table(self) -> Text: ...
    @property
    def names(self) -> FreshNames: ...

    def expression(self, value: Value, /) -> str: ...
    def literal(self, value: Any, /) -> str: ...
    def helper(self, function: Callable[..., Any], /) -> str: ...
    def line(self, text: str, node: Node, /) -> None: ...
    def region(self, graph: Graph, wish: str, given: Sequence[Value | None] = (), /) -> str: ...


class Call:
    """Operands as expressions by name (``call.x``), attributes, types, and ways to write more than an expression."""

    __slots__ = ("_writer", "attributes", "node", "operands", "results")

    def __init__(self, node: Node, operands: list[str | None], results: list[str], writer: Lines) -> None:
        self.node = node
        self.operands = operands  # expressions; None where an optional operand is missing
        self.results = results  # names that the results are assigned to
        self.attributes: Mapping[str, Any] = node.attributes
        self._writer = writer

    def __getattr__(self, name: str) -> Any:
        op = self.node.op
        if not op.variadic and name in op.operands:
            return self.operands[op.operands.index(name)]
        if name in self.attributes:
            return self.attributes[name]
        raise AttributeError(f"operation '{op.name}' has no operand or attribute '{name}'")

    @property
    def types(self) -> list[TensorType | None]:
        """Types of the operands."""
        return [None if v is None else v.type for v in self.node.operands]

    @property
    def type(self) -> TensorType:
        """Type of the first result."""
        return self.node.result.type

    def operand_type(self, name: str) -> TensorType:
        """Type of an operand by name."""
        op = self.node.op
        value = self.node.operands[op.operands.index(name)]
        if value is None:
            raise OperationError(f"operand '{name}' of '{op.name}' is missing")
        found: TensorType = value.type
        return found

    def array(self, name: str) -> str:
        """An operand as an array, typed even where it would be read as a plain number."""
        op = self.node.op
        value = self.node.operands[op.operands.index(name)]
        if value is None:
            raise OperationError(f"operand '{name}' of '{op.name}' is missing")
        return self._writer.expression(value)

    def argument(self, name: str) -> str:
        """What a helper is given for a parameter: an operand as an array, an attribute, the result's shape or dtype."""
        op = self.node.op
        if name in op.operands and not op.variadic:
            return "None" if self.node.operands[op.operands.index(name)] is None else self.array(name)
        return self.field(name)

    def literal(self, value: Any) -> str:
        """An attribute, size or dtype as source text."""
        return self._writer.literal(value)

    def number(self, value: Any) -> str:
        """A number to combine with an array of the result's dtype: plain where that keeps the dtype."""
        table, dtype = self._writer.table, self.type.dtype
        return self.literal(value) if table.is_weak(value, dtype) else table.scalar_text(value, dtype)

    def dtype(self, dtype: DType | None = None) -> str:
        """A dtype as source text; the result's by default."""
        return self._writer.table.dtype_text(dtype or self.type.dtype)

    def shape(self, value: TensorType | None = None) -> str:
        """A shape as source text; the result's by default."""
        return self.literal((value or self.type).shape)

    def helper(self, function: Callable[..., Any]) -> str:
        """The name under which a plain function is called; its source goes into the generated file."""
        return self._writer.helper(function)

    def line(self, text: str) -> None:
        """Write a statement before this operation's own."""
        self._writer.line(text, self.node)

    def temp(self, wish: str = "t") -> str:
        """A new local name."""
        return self._writer.names.fresh(wish)

    def region(self, k: int, given: Sequence[Value | None] = ()) -> str:
        """The name of the function that is the node's k-th region: takes its inputs, gives a tuple of its outputs.

        With ``given``, the values that it is called with, once, it may write over those that nothing else reads.
        """
        return self._writer.region(self.node.regions[k], f"{self.node.op.name}_{k}", given)

    def field(self, name: str) -> str:
        """What ``{name}`` in a template stands for."""
        if name == "dtype" and "dtype" not in self.attributes:
            return self.dtype()
        if name == "shape" and "shape" not in self.attributes:
            return self.shape()
        op = self.node.op
        if op.variadic and name == op.operands[0]:
            return ", ".join(o or "None" for o in self.operands)
        if name in self.attributes:
            return self.literal(self.attributes[name])
        if name in op.operands:
            text = self.operands[op.operands.index(name)]
            return "None" if text is None else text
        raise OperationError(f"the template of '{op.name}' names '{name}', which the operation does not have")

    @property
    def values(self) -> tuple[Value | None, ...]:
        return self.node.operands
