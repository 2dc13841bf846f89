"""The names of the predecessor's ``mithril.models``."""

from __future__ import annotations

from typing import Any

from mithril.graph import closest
from mithril_compat.compiling import PhysicalModel
from mithril_compat.language.block import Block, Joining
from mithril_compat.language.connection import NOT_GIVEN, TBD, Connection, Constant, IOKey, Tensor
from mithril_compat.language.model import Model, functional
from mithril_compat.layers import classical, elementwise, losses, metrics, neural, recurrent, stacks
from mithril_compat.training import TrainModel

LAYERS = {
    name: value
    for module in (elementwise, neural, losses, metrics, stacks, recurrent, classical)
    for name, value in vars(module).items()
    if isinstance(value, type) and issubclass(value, Block) and not name.startswith("_")
    if name not in ("Block", "Leaf", "Model", "FirstRows")
}
globals().update(LAYERS)
BaseModel, ExtendInfo = Block, Joining
__all__ = [
    "NOT_GIVEN",
    "TBD",
    "BaseModel",
    "Connection",
    "Constant",
    "ExtendInfo",
    "IOKey",
    "Model",
    "PhysicalModel",
    "Tensor",
    "TrainModel",
    "functional",
]
__all__ += list(LAYERS)
_OPERATORS = ("CustomPrimitiveModel", "PrimitiveModel")


def __getattr__(name: str) -> Any:
    if name in _OPERATORS:
        raise AttributeError(
            f"'{name}' of the predecessor is not offered; declare an operation: docs/writing-plugins.md"
        )
    similar = closest(name, __all__, 1)
    hint = f"; did you mean '{similar[0]}'?" if similar else ""
    raise AttributeError(f"the predecessor has no layer '{name}'{hint}")
