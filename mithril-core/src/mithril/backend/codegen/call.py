"""The call of an operation, as passed to its lowering."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from mithril.graph import DType, Graph, Node, OperationError, TensorType, Value, types_of


class Text(Protocol):
    """The part of the lowering table that a lowering uses: dtypes and scalars as source text."""

    def is_weak(self, number: Any, dtype: DType, /) -> bool: ...
    def scalar_text(self, value: Any, dtype: DType, /) -> str: ...
    def dtype_text(self, dtype: DType, /) -> str: ...


class FreshNames(Protocol):
    """An allocator of unused local names."""

    def fresh(self, wish: str, /) -> str: ...


class Lines(Protocol):
    """The part of ``FunctionEmitter`` that a lowering uses."""

    @property
    def table(self) -> Text: ...
    @property
    def names(self) -> FreshNames: ...

    def expression(self, value: Value, /) -> str: ...
    def literal(self, value: Any, /) -> str: ...
    def helper(self, function: Callable[..., Any], /) -> str: ...
    def imported(self, path: str, wish: str, /) -> str: ...
    def line(self, text: str, node: Node, /) -> None: ...
    def region(self, graph: Graph, wish: str, arguments: Sequence[Value | None] = (), /) -> str: ...
    def is_spent(self, v: Value | None, /) -> bool: ...
    def convert_constant(self, v: Value | None, helper: Callable[..., Any], arguments: Sequence[str], /) -> None: ...


class Call:
    """An operation call: operands as source expressions (``call.x``), attributes, types, and emitters of statements."""

    __slots__ = ("_writer", "attributes", "node", "operands", "results")

    def __init__(self, node: Node, operands: list[str | None], results: list[str], writer: Lines) -> None:
        self.node = node
        self.operands = operands  # expressions, or None for absent optional operands
        self.results = results  # the names to which results are assigned
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
        """The types of the operands."""
        return types_of(self.node.operands)

    @property
    def type(self) -> TensorType:
        """The type of the first result."""
        return self.node.result.type

    def operand_type(self, name: str) -> TensorType:
        """Return the type of an operand by name."""
        op = self.node.op
        value = self.node.operands[op.operands.index(name)]
        if value is None:
            raise OperationError(f"operand '{name}' of '{op.name}' is missing")
        result: TensorType = value.type
        return result

    def array(self, name: str) -> str:
        """Return the expression of an operand as a typed array, never as a plain number."""
        op = self.node.op
        value = self.node.operands[op.operands.index(name)]
        if value is None:
            raise OperationError(f"operand '{name}' of '{op.name}' is missing")
        return self._writer.expression(value)

    def argument(self, name: str) -> str:
        """Return the argument for a parameter of a helper: an operand, an attribute, the result's shape or dtype."""
        op = self.node.op
        if name in op.operands and not op.variadic:
            return "None" if self.node.operands[op.operands.index(name)] is None else self.array(name)
        return self.field(name)

    def literal(self, value: Any) -> str:
        """Return an attribute, size or dtype as source text."""
        return self._writer.literal(value)

    def number(self, value: Any) -> str:
        """Return a scalar to combine with an array of the result's dtype: untyped if that preserves the dtype."""
        table, dtype = self._writer.table, self.type.dtype
        return self.literal(value) if table.is_weak(value, dtype) else table.scalar_text(value, dtype)

    def dtype(self, dtype: DType | None = None) -> str:
        """Return a dtype as source text; the result's by default."""
        return self._writer.table.dtype_text(dtype or self.type.dtype)

    def shape(self, value: TensorType | None = None) -> str:
        """Return a shape as source text; the result's by default."""
        return self.literal((value or self.type).shape)

    def helper(self, function: Callable[..., Any]) -> str:
        """Add the source of a function to the generated file and return its name there."""
        return self._writer.helper(function)

    def imported(self, path: str, wish: str) -> str:
        """Import ``module:attribute`` into the generated file and return its name there."""
        return self._writer.imported(path, wish)

    def convert_constant(self, name: str, helper: Callable[..., Any], *arguments: str) -> None:
        """Replace a constant operand that nothing else reads by the result of a helper when the module is loaded."""
        self._writer.convert_constant(self.node.operands[self.node.op.operands.index(name)], helper, arguments)

    def line(self, text: str) -> None:
        """Emit a statement before the one of this operation."""
        self._writer.line(text, self.node)

    def temp(self, wish: str = "t") -> str:
        """Return a new local name."""
        return self._writer.names.fresh(wish)

    def is_spent(self, name: str) -> bool:
        """Whether the result may overwrite an operand: an input tagged ``donated`` that has no later use."""
        return self._writer.is_spent(self.node.operands[self.node.op.operands.index(name)])

    def region(self, k: int, arguments: Sequence[Value | None] = ()) -> str:
        """Emit the function of the node's k-th region, from its inputs to a tuple of its outputs; return its name.

        ``arguments`` are the values of its only call: it can reuse the buffers of those without another use.
        """
        return self._writer.region(self.node.regions[k], f"{self.node.op.name}_{k}", arguments)

    def field(self, name: str) -> str:
        """Return the text of the placeholder ``{name}`` in a template."""
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
        raise OperationError(f"the template of '{op.name}' uses '{name}', which is not an operand or attribute")

    @property
    def values(self) -> tuple[Value | None, ...]:
        return self.node.operands
