"""The kernels that TVM's primitives schedule, by family, and which scheduler a kernel gets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mithril_cbackend.lowering.element import elementwise
from mithril_cbackend.lowering.element.kernel import Kernel, Template
from mithril_cbackend.lowering.element.kernel_builder import Machine
from mithril_cbackend.lowering.pool import pooling
from mithril_cbackend.lowering.rows import fused_rows, reductions
from mithril_cbackend.lowering.scheduled import elements, folds, pools, row_passes


@dataclass(frozen=True)
class Family:
    """Kernels of one template that TVM schedules."""

    write: Template
    declines: Callable[[Kernel, Machine], str | None]  # why a kernel has no schedule
    # Why "auto" leaves a kernel to its template: more than 1.03 of its time in benchmarks/bench_scheduler.py.
    is_slower: Callable[[Kernel], str | None] = lambda kernel: None


FAMILIES: Mapping[Template, Family] = {
    elementwise.elementwise: Family(elements.elements, elements.declines),
    reductions.reduction: Family(folds.folds, folds.declines),
    fused_rows.rows: Family(row_passes.rows, row_passes.declines),
    pooling.max_pool: Family(pools.pool, pools.declines),
    pooling.average_pool: Family(pools.pool, pools.declines, pools.is_slower),
}


def choice(kernel: Kernel, machine: Machine) -> tuple[Template | None, str]:
    """Return the writer of a kernel by TVM's schedules; or None, and why its template writes it."""
    if machine.scheduler == "own" or machine.launches:
        return None, ""
    family = FAMILIES.get(kernel.template)
    if family is None:
        return None, "no schedule"
    if kernel.sizes:
        return None, "symbolic sizes"
    reason = family.declines(kernel, machine)
    if reason is None and machine.scheduler == "auto":
        reason = family.is_slower(kernel)
    return (None, reason) if reason is not None else (family.write, "")
