"""What the tables of array libraries have in common: operators, functions of one name, questions about operands."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from mithril import ops
from mithril.backend.codegen.call import Call
from mithril.backend.codegen.lowering_table import Lowerings
from mithril.base.registry import operation
from mithril.ir import Node

SIGNS = {
    "add": "+",
    "sub": "-",
    "mul": "*",
    "div": "/",
    "equal": "==",
    "not_equal": "!=",
    "less": "<",
    "less_equal": "<=",
    "greater": ">",
    "greater_equal": ">=",
    "bitwise_and": "&",
    "bitwise_or": "|",
    "bitwise_xor": "^",
}
# What every such library computes element by element, under the operation's own name or NumPy's.
UNARY = (
    *("abs", "exp", "expm1", "log", "log1p", "sqrt", "square"),
    *("sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh"),
    *("floor", "ceil", "round", "logical_not", "bitwise_not"),
)
QUESTIONS = ("isnan", "isinf", "isfinite")
NUMPY_NAMES = {
    **{name: f"arc{name[1:]}" for name in ("asin", "acos", "atan", "asinh", "acosh", "atanh", "atan2")},
    "neg": "negative",
    "pow": "power",
    "floordiv": "floor_divide",
    "bitwise_not": "invert",
    "sub": "subtract",
    "mul": "multiply",
    "div": "divide",
}


def operators(table: Lowerings) -> None:
    """Rows for what Python writes with an operator."""
    for name, sign in SIGNS.items():
        table.row(name, f"{{a}} {sign} {{b}}")


def functions(
    table: Lowerings, module: str, names: Iterable[str], called: Mapping[str, str] | None = None, *, out: bool = False
) -> None:
    """Rows that call the module's function of the operation's name, or the one it is ``called`` by, on its operands.

    ``out``: the functions can write into an array that they are given.
    """
    for name in names:
        function = f"{module}.{(called or {}).get(name, name)}"
        operands = ", ".join(f"{{{x}}}" for x in operation(name).operands)
        table.row(name, f"{function}({operands})", out=f"{function}({operands}, out={{out}})" if out else None)


def dtype_of(node: Node, k: int = 0) -> Any:
    operand = node.operands[k]
    assert operand is not None
    return operand.dtype


def is_integer(node: Node) -> bool:
    return bool(dtype_of(node).is_integer)


def is_half(node: Node) -> bool:
    """Whether the first operand has 16 bits, so that sums want more."""
    return bool(dtype_of(node).is_float and dtype_of(node).bits == 16)


def axes_text(call: Call) -> str:
    """The axes as NumPy takes them: all of them are None, one is a number."""
    axes = call.axis
    if axes == tuple(range(len(call.operand_type("x").shape))):
        return "None"
    return str(axes[0]) if len(axes) == 1 else call.literal(axes)


def bounds(call: Call) -> tuple[str | None, str | None]:
    """The limits of ``clip``, those of integers within what their dtype holds."""
    dtype = call.type.dtype

    def text(value: Any, edge: int, inner: Any) -> str | None:
        return None if value is None else call.number(value if dtype.is_float else inner(int(value), edge))

    low, high = (0, 0) if dtype.is_float else dtype.limits
    return text(call.low, low, max), text(call.high, high, min)


def nothing_yet(call: Call, below: str, above: str) -> str:
    """What ``max`` and ``min`` are of no elements: below all of the dtype's numbers, or above."""
    largest = call.node.op is ops.max
    if call.type.dtype.is_float:
        return below if largest else above
    return str(call.type.dtype.limits[0 if largest else 1])


def as_it_is(call: Call) -> str:
    """The operands themselves."""
    return ", ".join(str(x) for x in call.operands)
