"""A compiled model that owns its state, for consecutive calls: caches of generation, recurrent states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from mithril.backend import Backend, to_numpy
from mithril.base import InputError
from mithril.runtime.signature import InputSpec

Arrays = Mapping[str, Any]


class Stateful(Protocol):
    """The methods of a compiled model that a runner uses."""

    backend: Backend
    specs: dict[str, InputSpec]

    @property
    def model(self) -> Any: ...

    def __call__(self, inputs: Any, *, state: Any) -> Any: ...

    def evaluate(self, params: Any, inputs: Any, *, state: Any) -> Any: ...

    def state_for(self, inputs: Arrays, seed: int | None) -> dict[str, Any]: ...


class Runner:
    """A compiled model with its current state, and with parameters or the bound ones.

    The first call creates the initial state for its batch; each call replaces the state, unless it raises.
    """

    def __init__(self, model: Stateful, params: Arrays | None = None, seed: int | None = None) -> None:
        self.model = model
        self.params = params
        self.seed = seed
        self.state: dict[str, Any] | None = None

    def __call__(self, inputs: Arrays) -> dict[str, Any]:
        """Run the model once and return its outputs."""
        state = self.model.state_for(inputs, self.seed) if self.state is None else self.state
        outputs: dict[str, Any]
        if self.params is None:
            outputs, self.state = self.model(inputs, state=state)
        else:
            outputs, self.state = self.model.evaluate(self.params, inputs, state=state)
        return outputs

    def reset(self) -> None:
        """Discard the state: the next call starts from the initial one."""
        self.state = None

    def fork(self, rows: Sequence[int] | None = None) -> Runner:
        """Return a runner that continues from the same state, or from these rows of its batch, in this order."""
        other = Runner(self.model, self.params, self.seed)
        if self.state is not None:
            other.state = dict(self.state) if rows is None else self._rows(self.state, rows)
        return other

    def _rows(self, state: Arrays, rows: Sequence[int]) -> dict[str, Any]:
        batch = min((x.shape[0] for x in state.values() if len(x.shape)), default=0)
        invalid = next((r for r in rows if not 0 <= r < batch), None)
        if invalid is not None:
            raise InputError(f"there is no row {invalid} in a state of {batch} rows")
        array = self.model.backend.array
        index = np.asarray(rows, np.int64)
        return {name: array(to_numpy(x)[index]) if len(x.shape) > 1 else x for name, x in state.items()}
