"""Lowering rows shared by the array-library backends: operators, functions of equal name, predicates on operands."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mithril import ops
from mithril.backend.codegen.call import Call
from mithril.backend.codegen.lowering_table import Lowerings
from mithril.backend.codegen.shared import complex_numbers, indexing, integers, pooling, random_words, reductions
from mithril.graph import Node, Registry, operation, operation_names

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
# The element-wise operations with boolean results.
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
    table: Lowerings,
    module: str,
    names: Iterable[str],
    called: Mapping[str, str] | None = None,
    *,
    out: bool = False,
    when: Callable[[Node], bool] | None = None,
) -> None:
    """Add rows that call the function of ``module`` with the operation's name, or with its name in ``called``.

    ``out`` means that the functions have an ``out`` parameter for the result.
    """
    for name in names:
        function = f"{module}.{(called or {}).get(name, name)}"
        operands = ", ".join(f"{{{x}}}" for x in operation(name).operands)
        into = f"{function}({operands}, out={{out}})" if out else None
        table.row(name, f"{function}({operands})", out=into, when=when)


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
    """Return the dtype of an operand of a node."""
    operand = node.operands[k]
    assert operand is not None
    return operand.dtype


def is_float(node: Node) -> bool:
    """Whether the first operand of a node has a floating point dtype; a condition of rows."""
    return bool(dtype_of(node).is_float)


def is_integer(node: Node) -> bool:
    """Whether the first operand of a node has an integer dtype; a condition of rows."""
    return bool(dtype_of(node).is_integer)


def is_wide_float(node: Node) -> bool:
    """Whether the node computes floats of 32 or 64 bits."""
    return node.result.dtype.is_float and node.result.dtype.bits >= 32


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


def sliced(call: Call, backwards: Callable[..., Any] | None = None) -> str:
    """Return ``x[2:5, :, ::3]`` for a node ``slice``, and ``backwards(x, axis, start, stop, step)`` for negative steps.

    Without ``backwards``, the arrays must support negative steps.
    """
    text = call.array("x")
    parts = [":"] * len(call.operand_type("x").shape)
    for start, stop, step, axis in zip(call.starts, call.stops, call.steps, call.axes, strict=True):
        ends = call.literal(start), call.literal(stop)
        if step < 0 and backwards is not None:
            text = f"{call.helper(backwards)}({text}, {axis}, {ends[0]}, {ends[1]}, {step})"
        else:
            parts[axis] = ":".join(ends) + (f":{step}" if step != 1 else "")
    return f"{text}[{', '.join(parts)}]" if any(p != ":" for p in parts) else text


@dataclass(frozen=True, kw_only=True)
class LibraryCalls:
    """Calls with operands of 32 bits or more, and results in the dtype of the operation."""

    cast: str = "{x}.astype({dtype})"  # expression of an array in another dtype
    upcast: Callable[..., Any] = reductions.single  # helper that converts 16-bit floats

    def operand(self, call: Call, name: str) -> str:
        """Return an operand as the library takes it."""
        return f"{call.helper(self.upcast)}({call.array(name)})"

    def rounded(self, call: Call, text: str) -> str:
        """Return the results of a factorization in the dtype of the operation."""
        if call.type.dtype.bits > 16:
            return text
        if len(call.results) == 1:
            return self.cast.format(x=text, dtype=call.dtype())
        return f"tuple({self.cast.format(x='r', dtype=call.dtype())} for r in {text})"


@dataclass(frozen=True, kw_only=True)
class FourierCalls(LibraryCalls):
    """Lowerings of Fourier transforms to a module with the functions of ``numpy.fft``."""

    module: str
    complex_array: str  # expression of a complex array of the parts {re} and {im}
    axis: str = "axis"  # keyword of the axis

    def functions(self) -> Iterator[tuple[str, Callable[[Call], str]]]:
        """Yield each operation with the function that lowers it, which has its name."""
        for lower in (self.fft, self.ifft, self.rfft, self.irfft):
            yield lower.__name__, lower

    def fft(self, call: Call) -> str:
        return self._pair(call, "fft", self._complex(call))

    def ifft(self, call: Call) -> str:
        return self._pair(call, "ifft", self._complex(call))

    def rfft(self, call: Call) -> str:
        return self._pair(call, "rfft", self.operand(call, "x"))

    def irfft(self, call: Call) -> str:
        text = f"{self.module}.irfft({self._complex(call)}, {call.size}, {self.axis}={call.axis})"
        return self.cast.format(x=text, dtype=call.dtype())

    def _complex(self, call: Call) -> str:
        return self.complex_array.format(re=self.operand(call, "re"), im=self.operand(call, "im"))

    def _pair(self, call: Call, function: str, operand: str) -> str:
        """Return real and imaginary part of a complex array in the dtype of the operation."""
        text = f"{self.module}.{function}({operand}, {self.axis}={call.axis})"
        return f"{call.helper(complex_numbers.as_pair)}({text}, {call.dtype()})"
