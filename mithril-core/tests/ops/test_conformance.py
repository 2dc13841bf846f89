"""Every operation that mithril declares, on the kit: rules against references, gradients against differences."""

from __future__ import annotations

from mithril.testing import OpConformance
from mithril.testing.selection import core_operations


class TestCore(OpConformance):
    ops = tuple(core_operations())
    xfail = {"gradient:stop_gradient[0]": "to cut the gradient of what moves is its purpose"}
