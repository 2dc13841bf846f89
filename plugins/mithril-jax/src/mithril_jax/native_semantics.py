"""``semantics="native"``: rows by which operations mean what JAX means by them, where that is less work."""

from __future__ import annotations

from mithril import ops
from mithril.backend import Call, is_integer
from mithril.base import Registry
from mithril_jax.lowering import table

own = table.extend()
DIFFERENT: Registry[str] = Registry(
    "native semantics",
    {
        "argsort": "descending order puts nan first",
        "cast": "a float outside an integer's range, or nan, becomes what XLA makes of it",
        "floordiv": "an integer over 0 is -1 or less",
        "mod": "an integer modulo 0 is what XLA leaves",
        "pow": "a negative integer exponent gives what XLA leaves",
        "sort": "descending order puts nan first",
        "take": "an index out of range gives nan, or the largest integer",
        "take_along_axis": "an index out of range gives nan, or the largest integer",
    },
)


@own.function("take", "take_along_axis")
def _take(call: Call) -> str:
    return f"jnp.{call.node.op.name}({call.x}, jnp.asarray({call.indices}), {call.axis})"


@own.function("floordiv", "mod", "pow", when=is_integer)
def _arithmetic(call: Call) -> str:
    name = {"floordiv": "floor_divide", "mod": "mod", "pow": "power"}[call.node.op.name]
    return f"jnp.{name}({call.array('a')}, {call.array('b')})"


@own.function("cast")
def _cast(call: Call) -> str:
    return f"jnp.asarray({call.x}).astype({call.dtype()})"


@own.function("argsort", "sort")
def _sort(call: Call) -> str:
    made = f"jnp.{call.node.op.name}({call.x}, axis={call.axis}, stable=True, descending={call.descending})"
    return f"{made}.astype(jnp.int32)" if call.node.op is ops.argsort else made
