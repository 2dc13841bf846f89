"""Every operation that mithril declares, on the kit: rules against references, gradients against differences."""

from __future__ import annotations

from mithril_testing import OpConformance
from mithril_testing.selection import core_operations


class TestCore(OpConformance):
    ops = tuple(core_operations())
    xfail = {"gradient:stop_gradient[0]": "to cut the gradient of what moves is its purpose"}
