"""Lowering rows shared by the array-library backends: operators, functions of equal name, predicates on operands."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from mithril import ops
from mithril.backend.codegen.call import Call
from mithril.backend.codegen.lowering_table import Lowerings
from mithril.backend.codegen.shared import indexing, integers, pooling, random_words
from mithril.base import Registry, operation, operation_names
from mithril.ir import Node

SIGNS: Registry[str] = Registry(
    "Python's operators",
    {
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
    },
)
# Element-wise operations that every array library provides, under the operation's name or NumPy's.
UNARY = operation_names(
    *("abs", "exp", "expm1", "log", "log1p", "sqrt", "square"),
    *("sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh"),
    *("floor", "ceil", "round", "logical_not", "bitwise_not"),
)
PREDICATES = operation_names("isnan", "isinf", "isfinite")
NUMPY_NAMES: Registry[str] = Registry(
    "NumPy's names",
    {
        **{
            name: f"arc{name[1:]}"
            for name in operation_names("asin", "acos", "atan", "asinh", "acosh", "atanh", "atan2")
        },
        "neg": "negative",
        "pow": "power",
        "floordiv": "floor_divide",
        "bitwise_not": "invert",
        "sub": "subtract",
        "mul": "multiply",
        "div": "divide",
    },
)


def operators(table: Lowerings) -> None:
    """Add rows for the operations that have a Python operator."""
    for name, sign in SIGNS.items():
        table.row(name, f"{{a}} {sign} {{b}}")


def functions(
    table: Lowerings, module: str, names: Iterable[str], called: Mapping[str, str] | None = None, *, out: bool = False
) -> None:
    """Add rows that call the function of ``module`` with the operation's name, or with its name in ``called``.

    ``out`` means that the functions have an ``out`` parameter for the result.
    """
    for name in names:
        function = f"{module}.{(called or {}).get(name, name)}"
        operands = ", ".join(f"{{{x}}}" for x in operation(name).operands)
        table.row(name, f"{function}({operands})", out=f"{function}({operands}, out={{out}})" if out else None)


def shared_helpers(table: Lowerings) -> None:
    """Add rows for the shared helpers, in the dialect of the table."""
    table.helpers(integers.shift_left, integers.shift_right)
    table.helpers(indexing.take, indexing.take_along_axis, indexing.gather_nd)
    table.helpers(indexing.scatter_nd, indexing.scatter_nd_add)
    table.helpers(indexing.dynamic_slice, indexing.dynamic_update_slice, indexing.dynamic_update_rows)
    table.helpers(pooling.max_pool, pooling.max_pool_positions, pooling.avg_pool, pooling.avg_pool_grad)
    table.helpers(random_words.random_bits, random_words.split_key, random_words.fold_in)
    for name, helper in (("floordiv", integers.floordiv_int), ("mod", integers.mod_int), ("pow", integers.pow_int)):
        table.helper(helper, op=name, when=is_integer)


def integer_cast(call: Call, plain: str) -> str:
    """Return a cast to integers: ``plain``, which wraps, for integers; floats saturate."""
    source, target = call.operand_type("x").dtype, call.type.dtype
    if not source.is_float:
        return plain
    low, high = target.limits
    return f"{call.helper(integers.float_to_int)}({call.array('x')}, {call.dtype()}, {low}, {high})"


def dtype_of(node: Node, k: int = 0) -> Any:
    operand = node.operands[k]
    assert operand is not None
    return operand.dtype


def is_integer(node: Node) -> bool:
    return bool(dtype_of(node).is_integer)


def is_half(node: Node) -> bool:
    """Whether the first operand is a 16-bit float, so that sums need a wider accumulator."""
    return bool(dtype_of(node).is_float and dtype_of(node).bits == 16)


def axes_text(call: Call) -> str:
    """Return axes in NumPy's form: None for all of them, an int for one."""
    axes = call.axis
    if axes == tuple(range(len(call.operand_type("x").shape))):
        return "None"
    return str(axes[0]) if len(axes) == 1 else call.literal(axes)


def bounds(call: Call) -> tuple[str | None, str | None]:
    """Return the limits of ``clip``, for integers clamped to the range of their dtype."""
    dtype = call.type.dtype

    def text(value: Any, edge: int, inner: Any) -> str | None:
        return None if value is None else call.number(value if dtype.is_float else inner(int(value), edge))

    low, high = (0, 0) if dtype.is_float else dtype.limits
    return text(call.low, low, max), text(call.high, high, min)


def reduction_identity(call: Call, below: str, above: str) -> str:
    """Return the identity of ``max`` or ``min``: ``below`` or ``above`` for floats, else a limit of the dtype."""
    largest = call.node.op is ops.max
    if call.type.dtype.is_float:
        return below if largest else above
    return str(call.type.dtype.limits[0 if largest else 1])


def operands_unchanged(call: Call) -> str:
    """Return the operands unchanged."""
    return ", ".join(str(x) for x in call.operands)
