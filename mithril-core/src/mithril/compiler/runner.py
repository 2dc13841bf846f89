"""A compiled model that owns its state, for consecutive calls: caches of generation, recurrent states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from mithril.backend import Backend
from mithril.compiler.signature import InputSpec
from mithril.graph import InputError, TensorType

Arrays = Mapping[str, Any]


class Stateful(Protocol):
    """The methods of a compiled model that a runner uses."""

    backend: Backend
    specs: dict[str, InputSpec]

    @property
    def model(self) -> Any: ...

    def advance(self, params: Arrays | None, inputs: Arrays, state: dict[str, Any]) -> dict[str, Any]: ...

    def state_for(self, inputs: Arrays, seed: int | None) -> dict[str, Any]: ...

    def exact_types(self, inputs: Arrays) -> dict[str, TensorType]: ...

    def state_axes(self, types: Mapping[str, TensorType]) -> dict[str, int] | None: ...


class Runner:
    """A compiled model with its current state, and with parameters or the bound ones.

    The first call creates the initial state for its batch, and each call replaces it: caches are updated in place, so
    that a step allocates no memory of their size. A call that is rejected before it runs leaves the state unchanged.
    """

    def __init__(self, model: Stateful, params: Arrays | None = None, seed: int | None = None) -> None:
        self.model = model
        self.params = params
        self.seed = seed
        self._state: dict[str, Any] | None = None
        self._names: frozenset[str] = frozenset()  # of the initial state
        self._types: dict[str, TensorType] = {}  # of the first inputs
        self._axes: dict[str, int] | None = None  # of the states that have rows

    def __call__(self, inputs: Arrays) -> dict[str, Any]:
        """Run the model once and return its outputs."""
        state = self._started(inputs)
        if not self._names <= state.keys():
            raise InputError("the last call failed while it changed the state", hint="runner.reset()")
        return self.model.advance(self.params, inputs, state)

    def _started(self, inputs: Arrays) -> dict[str, Any]:
        if self._state is None:
            self._state = self.model.state_for(inputs, self.seed)
            self._names = frozenset(self._state)
            self._types, self._axes = self.model.exact_types(inputs), None
        return self._state

    def reset(self) -> None:
        """Discard the state: the next call starts from the initial one."""
        self._state = None

    @property
    def state(self) -> dict[str, Any] | None:
        """A copy of the state, which later calls do not change; None before the first call."""
        return None if self._state is None else {n: self.model.backend.copied(x) for n, x in self._state.items()}

    def get_shapes(self, inputs: Arrays) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the state, created for these inputs if there is none."""
        return {name: tuple(x.shape) for name, x in self._started(inputs).items()}

    def set_state(self, inputs: Arrays, values: Arrays) -> None:
        """Replace some states, created for these inputs if there are none."""
        state = self._started(inputs)
        state.update({name: self.model.backend.array(np.asarray(x)) for name, x in values.items()})

    def fork(self, rows: Sequence[int] | None = None) -> Runner:
        """Return a runner that continues from the same state, or from these rows of its batch, in this order."""
        if self._state is None:
            return self._with(None)
        return self._with(self.state if rows is None else self._rows(rows))

    def _with(self, state: dict[str, Any] | None) -> Runner:
        """Return a runner of the same model with another state."""
        other = Runner(self.model, self.params, self.seed)
        other._state, other._names, other._types, other._axes = state, self._names, self._types, self._axes
        return other

    @classmethod
    def joined(cls, parts: Sequence[tuple[Runner, Sequence[int]]]) -> Runner:
        """Return a runner whose batch has rows of several runners of one model, in this order."""
        first, states = parts[0][0], [runner._selected(rows) for runner, rows in parts]
        axes, array = first._axes or {}, first.model.backend.array
        names = states[0]
        return first._with(
            {n: array(np.concatenate([s[n] for s in states], axes[n]) if n in axes else names[n]) for n in names}
        )

    def _row_axes(self, state: Arrays) -> dict[str, int]:
        """Return the axis of each state that has rows."""
        shapes = {name: tuple(x.shape) for name, x in state.items()}
        batch = next((t.shape[0] for t in self._types.values() if t.shape), None)
        if all(len(s) > 1 and s[0] == batch and batch not in s[1:] for s in shapes.values()):
            return dict.fromkeys(shapes, 0)  # certain without tracing the model
        axes = self.model.state_axes(self._types)
        return {name: 0 for name, shape in shapes.items() if len(shape) > 1} if axes is None else axes

    def _rows(self, rows: Sequence[int]) -> dict[str, Any]:
        return {name: self.model.backend.array(x) for name, x in self._selected(rows).items()}

    def _selected(self, rows: Sequence[int]) -> dict[str, np.ndarray[Any, Any]]:
        """Return the states of some rows, in main memory."""
        state = self._state or {}
        axes = self._axes = self._row_axes(state) if self._axes is None else self._axes
        batch = min((state[name].shape[axis] for name, axis in axes.items()), default=0)
        invalid = next((r for r in rows if not 0 <= r < batch), None)
        if invalid is not None:
            raise InputError(f"there is no row {invalid} in a state of {batch} rows")
        index, arrays = np.asarray(rows, np.int64), {n: self.model.backend.to_numpy(x) for n, x in state.items()}
        return {n: np.take(x, index, axes[n]) if n in axes else np.array(x) for n, x in arrays.items()}
