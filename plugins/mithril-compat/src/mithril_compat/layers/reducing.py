"""Layers that TrainModel adds between losses and ``final_cost``."""

from __future__ import annotations

from math import prod
from typing import Any

from mithril import ops
from mithril_compat.language.block import Leaf, block
from mithril_compat.language.connection import TBD


class Combined(Leaf):
    """The elements of all inputs as one vector."""

    function = staticmethod(lambda **parts: ops.concat(*(ops.reshape(p, shape=(-1,)) for p in parts.values()), axis=0))

    def __init__(self, n: int) -> None:
        super(Leaf, self).__init__()
        self.settings = {}
        self._declare({f"input{k + 1}": TBD for k in range(n)})


class GeometricSize(Leaf):
    """The geometric mean over losses of the product of the sizes that each was averaged over."""

    function = staticmethod(lambda groups, **parts: _mean_size(groups, parts))

    def __init__(self, groups: tuple[int, ...]) -> None:
        super(Leaf, self).__init__()
        self.settings = {"groups": groups}
        count = sum(groups)
        self._declare({f"{kind}{k}": TBD for kind in ("x", "axis") for k in range(count)})


def _mean_size(groups: tuple[int, ...], parts: dict[str, Any]) -> Any:
    position, total = 0, 1.0
    for count in groups:
        for k in range(position, position + count):
            shape, axis = parts[f"x{k}"].shape, parts[f"axis{k}"]
            axes = range(len(shape)) if axis is None else (axis,) if isinstance(axis, int) else axis
            total = prod((shape[a] for a in axes), start=1) * total
        position += count
    return total if len(groups) == 1 else total ** (1.0 / len(groups))


@block()
def Divided(input: Any = TBD, size: Any = TBD) -> Any:
    return input / size
