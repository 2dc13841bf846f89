"""``semantics="native"``: rows that follow JAX's semantics where these need less work."""

from __future__ import annotations

from mithril import ops
from mithril.backend import Call, is_integer
from mithril.base import Registry
from mithril_jax.lowering import table

native_table = table.extend()
DIFFERENT: Registry[str] = Registry(
    "native semantics",
    {
        "argsort": "descending order puts nan first",
        "cast": "a float outside an integer's range, or nan, converts as in XLA",
        "floordiv": "an integer over 0 is -1 or less",
        "mod": "an integer modulo 0 is computed as in XLA",
        "pow": "a negative integer exponent is computed as in XLA",
        "sort": "descending order puts nan first",
        "take": "an index out of range returns nan, or the largest integer",
        "take_along_axis": "an index out of range returns nan, or the largest integer",
    },
)


@native_table.function("take", "take_along_axis")
def _take(call: Call) -> str:
    return f"jnp.{call.node.op.name}({call.x}, jnp.asarray({call.indices}), {call.axis})"


@native_table.function("floordiv", "mod", "pow", when=is_integer)
def _arithmetic(call: Call) -> str:
    name = {"floordiv": "floor_divide", "mod": "mod", "pow": "power"}[call.node.op.name]
    return f"jnp.{name}({call.array('a')}, {call.array('b')})"


@native_table.function("cast")
def _cast(call: Call) -> str:
    return f"jnp.asarray({call.x}).astype({call.dtype()})"


@native_table.function("argsort", "sort")
def _sort(call: Call) -> str:
    sorted_code = f"jnp.{call.node.op.name}({call.x}, axis={call.axis}, stable=True, descending={call.descending})"
    return f"{sorted_code}.astype(jnp.int32)" if call.node.op is ops.argsort else sorted_code
