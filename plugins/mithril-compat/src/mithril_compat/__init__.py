"""The names of mithril's predecessor on today's graph: ``import mithril_compat as ml``.

``python -m mithril_compat script.py`` runs a program of the predecessor unchanged.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

BACKENDS = ("CBackend", "GGMLBackend", "JaxBackend", "MlxBackend", "NumpyBackend", "TorchBackend")
MODULES = ("backends", "framework", "models", "types", "utils")
TYPES = ("DataType", "bfloat16", "bool", "double", "epsilon_table", "float", "float16", "float32", "float64", "int")
PUBLIC = {  # module -> names; imported on first use, as the commands of mithril import this package
    "compiling": ("compile",),
    "language.connection": ("TBD", "Connection", "Constant", "IOKey", "Tensor"),
    "models": ("Model", "PhysicalModel", "TrainModel"),
    "notices": ("PredecessorWarning",),
    "types": (*TYPES, "int16", "int32", "int64", "short"),
}

if TYPE_CHECKING:
    from mithril import Backend as Backend
    from mithril_compat import models as models
    from mithril_compat.compiling import compile as compile
    from mithril_compat.language.connection import (
        TBD as TBD,
        Connection as Connection,
        Constant as Constant,
        IOKey as IOKey,
        Tensor as Tensor,
    )
    from mithril_compat.models import Model as Model, TrainModel as TrainModel
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


def __getattr__(name: str) -> Any:
    if name in BACKENDS:
        from mithril_compat.backends import backend_class

        return backend_class(name)
    if name == "Backend":
        import mithril

        return mithril.Backend
    if name in MODULES:
        return import_module(f"mithril_compat.{name}")
    for module, names in PUBLIC.items():
        if name in names:
            return getattr(import_module(f"mithril_compat.{module}"), name)
    raise AttributeError(f"module 'mithril_compat' has no attribute '{name}'")
