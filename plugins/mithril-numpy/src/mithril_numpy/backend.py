"""``ml.NumpyBackend``: generated NumPy source, run as it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from mithril.codegen import Lowerings
from mithril.runtime.backend import as_numpy
from mithril.runtime.source_backend import SourceBackend
from mithril.types import dtype as as_dtype
from mithril_numpy.lowering import table


class NumpyBackend(SourceBackend):
    """Arrays are NumPy's; there is nothing to compile, and every operation runs when its line is reached."""

    name = "numpy"
    tables: ClassVar[Mapping[str, Lowerings]] = {"portable": table}

    def array(self, data: Any, dtype: Any = None) -> np.ndarray[Any, Any]:
        made = as_numpy(data, self.dtype)
        return made if dtype is None else made.astype(as_dtype(dtype).numpy)

    def to_numpy(self, array: Any) -> np.ndarray[Any, Any]:
        return np.asarray(array)

    def is_array(self, x: Any) -> bool:
        return isinstance(x, (np.ndarray, np.generic))
