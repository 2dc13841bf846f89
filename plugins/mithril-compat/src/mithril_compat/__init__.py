"""The names of mithril's predecessor on today's graph: ``import mithril_compat as ml``.

``python -m mithril_compat script.py`` runs a program of the predecessor unchanged.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mithril import Backend as Backend
from mithril_compat.compiling import compile as compile
from mithril_compat.language.connection import (
    TBD as TBD,
    Connection as Connection,
    Constant as Constant,
    IOKey as IOKey,
    Tensor as Tensor,
)
from mithril_compat.notices import PredecessorWarning as PredecessorWarning
from mithril_compat.types import (
    DataType as DataType,
    bfloat16 as bfloat16,
    bool as bool,
    double as double,
    epsilon_table as epsilon_table,
    float as float,
    float16 as float16,
    float32 as float32,
    float64 as float64,
    int as int,
    int16 as int16,
    int32 as int32,
    int64 as int64,
    short as short,
)

BACKENDS = ("CBackend", "GGMLBackend", "JaxBackend", "MlxBackend", "NumpyBackend", "TorchBackend")
_TODAY = {"CBackend": "CBackend", "GGMLBackend": "GGMLBackend"}

if TYPE_CHECKING:
    from mithril_compat import models as models
    from mithril_compat.models import Model as Model, TrainModel as TrainModel


def __getattr__(name: str) -> Any:
    if name in BACKENDS:
        from mithril_compat.backends import backend_class

        return backend_class(_TODAY.get(name, name))
    if name in ("models", "types", "utils", "framework", "backends"):
        from importlib import import_module

        return import_module(f"mithril_compat.{name}")
    from mithril_compat import models

    if name in ("Model", "TrainModel", "PhysicalModel"):
        return getattr(models, name)
    raise AttributeError(f"module 'mithril_compat' has no attribute '{name}'")
