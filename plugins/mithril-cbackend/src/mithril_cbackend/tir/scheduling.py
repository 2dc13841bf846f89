"""TVM's scheduling: te stages, ``s_tir.Schedule`` and the passes from blocks to loops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

from mithril_cbackend.module_loader import without_search
from mithril_cbackend.tir.tvm_api import nodes, te, tirx, tvm

Stage = Any  # a tensor of te
Loop = Any  # a loop of a schedule


class Schedule:
    """The primitives of ``s_tir.Schedule``, without its checks of the types of arguments, which take longer."""

    def __init__(self, results: Sequence[Stage]) -> None:
        function = te.create_prim_func(list(results))
        # The checks after each primitive take as long again.
        self.schedule = _scheduler()[0](function, error_render_level="none", enable_check=False)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        primitive = getattr(type(self.schedule), name)
        return partial(getattr(primitive, "__wrapped__", primitive), self.schedule)

    def lowered(self) -> Any:
        """Return the statement of the function, whose reductions are decomposed: loops over compact arrays."""
        return _scheduler()[1](self.schedule.mod)["main"].body


@cache
def _scheduler() -> tuple[Any, Any]:
    """Return the class of schedules and the passes from blocks to loops; kernels of own templates import neither."""
    with without_search():
        from tvm import s_tir
    blocks = s_tir.transform
    passes = [
        blocks.PlanAndUpdateBufferAllocationLocation(),
        blocks.ConvertBlocksToOpaque(),
        blocks.CompactBufferAllocation(),
        blocks.LowerOpaqueBlock(),
        tirx.transform.FlattenBuffer(),  # simplifies positions as well
    ]
    return s_tir.Schedule, tvm.ir.transform.Sequential(passes)


def opaque(dtype: str, name: str, *operands: Any) -> Any:
    """Return a call that TVM knows nothing about but its operands."""
    return tirx.call_pure_extern(dtype, name, *operands)


def called(x: Any) -> str | None:
    """Return the name of the function that an expression of ``opaque`` calls."""
    return str(x.args[0].value) if isinstance(x, nodes.Call) and isinstance(x.args[0], nodes.StringImm) else None


def stage(name: str, extents: Sequence[int], element: Callable[..., Any]) -> Stage:
    """Return a stage of elements, from their index."""
    return te.compute(tuple(extents), element, name=name)


def fold(
    name: str, extents: Sequence[int], over: Sequence[int], identity: Any, pair: Callable[..., Any], element: Any
) -> Stage:
    """Return a stage that reduces the elements at ``(*index, *reduced)`` with ``pair(total, element)``."""
    axes = [te.reduce_axis((0, n), name=f"k{k}") for k, n in enumerate(over)]
    reducer = te.comm_reducer(pair, lambda dtype: identity, name="fold")
    return te.compute(tuple(extents), lambda *i: reducer(element(*i, *[a.var for a in axes]), axis=axes), name=name)
