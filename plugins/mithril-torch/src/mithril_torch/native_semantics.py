"""``semantics="native"``: rows that follow PyTorch's semantics where these need less work."""

from __future__ import annotations

from mithril import ops
from mithril.backend import Call, dtype_of
from mithril.graph import Node, Registry
from mithril_torch.fusion import native_kernels
from mithril_torch.lowering import is_uint32, table
from mithril_torch.parallel import collectives, own_gradients, program_parts, ring_attention, routed_rows  # noqa: F401  # their rows are copied, too

native_table = table.extend()
DIFFERENT: Registry[str] = Registry(
    "native semantics",
    {
        "argsort": "descending order puts nan first",
        "attention": "a fully masked query returns 0",
        "cast": "a float outside an integer's range wraps or saturates as the CPU does",
        "floordiv": "an integer over 0 is an error",
        "mod": "an integer modulo 0 is an error",
        "sign": "the sign of nan is 0",
        "sort": "descending order puts nan first",
        "take": "an index below 0 or out of range is an error",
        "take_along_axis": "an index out of range is an error",
    },
)


def _common(node: Node) -> bool:
    return not is_uint32(node)


@native_table.function("sign")
def _sign(call: Call) -> str:
    return f"torch.sign({call.array('x')})"


@native_table.function("floordiv", "mod", when=_common)
def _division(call: Call) -> str:
    name = "floor_divide" if call.node.op is ops.floordiv else "remainder"
    return f"torch.{name}({call.array('a')}, {call.array('b')})"


@native_table.function("cast")
def _cast(call: Call) -> str:
    return f"{call.array('x')}.to({call.dtype()})"


@native_table.function("take", when=lambda node: node.operands[1] is not None and len(node.operands[1].shape) == 1)
def _take(call: Call) -> str:
    return f"torch.index_select({call.array('x')}, {call.axis}, {call.array('indices')})"


@native_table.function("take_along_axis")
def _take_along_axis(call: Call) -> str:
    return f"torch.take_along_dim({call.array('x')}, {call.array('indices')}.to(torch.int64), {call.axis})"


@native_table.function("argsort", "sort", when=_common)
def _sort(call: Call) -> str:
    arguments = f"{call.array('x')}, dim={call.axis}, stable=True, descending={call.descending}"
    if call.node.op is ops.sort:
        return f"torch.sort({arguments})[0]"
    return f"torch.argsort({arguments}).to(torch.int32)"


@native_table.function("attention", when=lambda node: bool(dtype_of(node).is_float))
def _attention(call: Call) -> str:
    return native_kernels.attention(call)
