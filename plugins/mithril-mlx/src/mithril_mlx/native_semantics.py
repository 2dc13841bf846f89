"""``semantics="native"``: rows with MLX's own semantics, for operations where that is cheaper."""

from __future__ import annotations

from mithril import ops
from mithril.backend import Call, dtype_of, is_integer
from mithril.graph import Node, Registry
from mithril_mlx import native_kernels
from mithril_mlx.lowering import table

own = table.extend()
DIFFERENT: Registry[str] = Registry(
    "native semantics",
    {
        "argmax": "nan is not counted as the largest",
        "argmin": "nan is not counted as the largest",
        "attention": "a query that may attend to nothing gives some average",
        "cast": "a float outside an integer's range wraps as the processor does",
        "floordiv": "infinities and zeros give what rounding the quotient down gives",
        "matmul": "products of 16-bit floats are summed in 16 bits where the kernel does so",
        "mod": "infinities and zeros give what MLX's remainder gives",
        "sign": "the sign of nan is 0",
        "take": "an index out of range gives whatever lies there",
        "take_along_axis": "an index out of range gives whatever lies there",
    },
)


def _is_float(node: Node) -> bool:
    return bool(dtype_of(node).is_float)


def _is_filled(node: Node) -> bool:
    """Whether the operand is known to be non-empty: MLX cannot reduce empty arrays."""
    operand = node.operands[0]
    assert operand is not None
    return all(isinstance(n, int) and n > 0 for n in operand.shape)


@own.function("sign")
def _sign(call: Call) -> str:
    return f"mx.sign({call.array('x')})"


@own.function("floordiv", "mod", when=lambda node: not is_integer(node))
def _division(call: Call) -> str:
    if call.node.op is ops.mod:
        return f"mx.remainder({call.array('a')}, {call.array('b')})"
    return f"mx.floor({call.array('a')} / {call.array('b')})"


@own.function("cast")
def _cast(call: Call) -> str:
    return f"{call.array('x')}.astype({call.dtype()})"


@own.function("take", "take_along_axis", when=_is_filled)
def _take(call: Call) -> str:
    return f"mx.{call.node.op.name}({call.array('x')}, {call.array('indices')}, {call.axis})"


@own.function("argmax", "argmin", when=_is_filled)
def _position(call: Call) -> str:
    return f"mx.{call.node.op.name}({call.array('x')}, {call.axis}, {call.keepdims}).astype(mx.int32)"


@own.function("matmul", when=lambda node: _is_float(node) and _is_filled(node))
def _matmul(call: Call) -> str:
    return f"mx.matmul({call.array('a')}, {call.array('b')})"


@own.function("attention", when=_is_float)
def _attention(call: Call) -> str:
    return native_kernels.attention(call)
