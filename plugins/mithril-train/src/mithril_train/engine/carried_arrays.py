"""The arrays that training carries from step to step: parameters, state, optimizer values, averages.

On several devices every array is built in parts, as the executable of the step splits it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mithril.backend import Backend, to_numpy
from mithril.compiler import ModelCompiler, assemble_of, missing_or_unknown
from mithril.graph import Decisions, Graph, InputError, MithrilError, shape_text, unknown
from mithril_parallel.sharding.tensor_parts import PartedTensor, held, in_memory
from mithril_train.step.step import TrainState, carried_values, parameter_names, trained_names
from mithril_train.step.step_config import StepConfig

Region = Callable[["tuple[slice, ...] | None"], np.ndarray[Any, Any]]  # the elements of a region, or all


def _expect_names(kind: str, names: Sequence[str], arrays: Mapping[str, Any], states: Sequence[str] = ()) -> None:
    for name in arrays:
        if name not in names:
            message, facts, hint = unknown(kind, name, names)
            raise InputError(message, facts=facts, hint="pass states in state=" if name in states else hint)


class CarriedArrays:
    """The carried arrays of an engine by name, and their placement on its devices; the base class of ``Engine``."""

    backend: Backend
    decisions: Decisions
    recipe: StepConfig
    compiler: ModelCompiler
    _traced: tuple[Any, Graph, Graph] | None

    def __init__(self) -> None:
        self.arrays: dict[str, Any] = {}
        self.parameters: tuple[str, ...] = ()
        self.states: tuple[str, ...] = ()
        self.trained: tuple[str, ...] = ()
        self.extra: dict[str, TrainState] = {}
        self._shapes: dict[str, tuple[Any, ...]] = {}
        self._dtypes: dict[str, Any] = {}  # those of NumPy
        self._assemble: Callable[..., Any] | None = None  # builds an array from its regions, on several devices
        self._split: frozenset[str] = frozenset()  # the arrays that it knows

    def declare(self, traced: Graph, initial_values: Mapping[str, Any], state: Mapping[str, Any]) -> None:
        """Determine which arrays a model carries, and check the names of those that the user gives."""
        params, states = traced.with_role("param"), traced.with_role("state")
        self.parameters = tuple(i.name for i in params)
        self.states = tuple(i.name for i in states)
        self.recipe.check_patterns(parameter_names(traced))
        self.trained = trained_names(traced, self.recipe)
        self.extra = carried_values(traced, self.recipe, self.trained)
        self._shapes = {i.name: i.type.shape for i in (*params, *states)}
        self._dtypes = {i.name: i.type.dtype.numpy for i in (*params, *states)}
        _expect_names("parameter", self.parameters, self._needed(initial_values, self.parameters), self.states)
        _expect_names("state", self.states, self._needed(state, self.states))
        drawn_names = [n for n in self.parameters if initial_values and n not in initial_values]
        if drawn_names:
            self.decisions.record("choice", f"not among params, drawn from the seed: {', '.join(drawn_names)}")

    def forget_sizes(self) -> None:
        """Let the next batch determine the sizes of all arrays."""
        self._shapes = {}

    def check_sizes(self, traced: Graph) -> None:
        """Raise if a batch needs arrays of other sizes: its step would fail in the framework, or broadcast them."""
        for i in (*traced.with_role("param"), *traced.with_role("state")):
            shape = self._shapes.get(i.name, i.type.shape)
            if shape != i.type.shape:
                inputs = (f"'{x.name}' {shape_text(x.type.shape)}" for x in traced.with_role("input"))
                raise InputError(
                    f"'{i.name}' has the shape {shape_text(shape)}; this batch requires {shape_text(i.type.shape)}",
                    facts=[f"the batch: {', '.join(inputs)}"],
                    hint="pass batches of the sizes that training began with, or make a new Trainer",
                )

    def _needed(self, arrays: Mapping[str, Any], expected: Collection[str]) -> Mapping[str, Any]:
        """Return the arrays without those of a part of the model that no output depends on."""
        return self.compiler.unused.left_out(arrays, expected, self.decisions)

    # -- placement ---------------------------------------------------------------------------------------------------
    def place_like(self, executable: Any, names: Sequence[str]) -> None:
        """Build arrays of these names in future as an executable splits them."""
        assemble = assemble_of(executable)
        if assemble is not None and getattr(self.backend, "mesh", True) is not None:
            self._assemble, self._split = assemble, frozenset(names)

    @property
    def is_distributed(self) -> bool:
        """Whether several devices hold the arrays."""
        return self._assemble is not None

    def placed(self, name: str, source: Any) -> Any:
        """Copy an array of any framework, or a tensor in parts, to the devices and the dtype that the step expects."""
        if isinstance(source, PartedTensor):
            return self.assembled(name, source.shape, lambda index: self._cast(name, source.read(index)))
        tensor = self._cast(name, self._numpy(source))
        return self.assembled(name, tensor.shape, lambda index: tensor[index or ...])

    def _cast(self, name: str, array: Any) -> Any:
        """Cast to the dtype that a parameter or a state has in the program, which `precision` selects."""
        return array.astype(self._dtypes.get(name, array.dtype), copy=False)

    def assembled(self, name: str, shape: Sequence[int], read: Region) -> Any:
        """Build an array from its regions, of which each device gets its own; on one device from all of it."""
        if self._assemble is not None and name in self._split:
            # The engine may use the memory, which the step overwrites: it must not be that of others.
            array = self._assemble(name, tuple(shape), lambda index: np.array(read(index), order="C"))
            if array is not None:
                return array
        return self.to_backend(read(None))

    def to_backend(self, array: Any) -> Any:
        """Copy an array of any framework to the backend: steps overwrite their arrays."""
        return self.backend.array(np.array(self._numpy(array), order="C", copy=True))

    def copied(self, name: str) -> Any:
        """Return a copy of a carried array, in the parts in which the last step left it."""
        return self.backend.copied(self.arrays[name])

    def _numpy(self, x: Any) -> np.ndarray[Any, Any]:
        return self.backend.to_numpy(x) if self.backend.is_array(x) else to_numpy(x)

    # -- values ------------------------------------------------------------------------------------------------------
    def with_extra(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """Return arrays with the slots and averages that are new, such as those of parameters that were frozen."""
        complete = dict(arrays)
        for name, entry in self.extra.items():
            if name in complete:
                continue
            if entry.initial is None:
                complete[name] = self._average_of(name, complete[entry.parameter], entry.type.dtype.numpy)
                continue
            number = np.asarray(entry.initial, entry.type.dtype.numpy)
            complete[name] = self.placed(name, np.broadcast_to(number, tuple(map(int, entry.type.shape))))
        return complete

    def _average_of(self, name: str, parameter: Any, dtype: Any) -> Any:
        """Return a copy of a parameter in the dtype of its average."""
        if not self.is_distributed:
            return self.to_backend(self.backend.to_numpy(parameter).astype(dtype))
        parts = held(name, parameter)
        return self.assembled(name, parts.shape, lambda index: parts.read(index).astype(dtype))

    def refreeze(self, recipe: StepConfig) -> None:
        """Continue with another set of frozen parameters; steps for sets used before are not compiled again."""
        old, self.recipe = self.recipe, recipe
        if self._traced is None:
            return
        graph = self._traced[1]
        try:
            recipe.check_patterns(parameter_names(graph))
            self.trained = trained_names(graph, recipe)
        except MithrilError:
            self.recipe = old
            raise
        self.extra = carried_values(graph, recipe, self.trained)
        self.arrays = self.with_extra(self.arrays)

    def replace(self, kind: str, names: Sequence[str], arrays: Mapping[str, Any]) -> None:
        """Replace parameters or state by copies of arrays of the same shape."""
        arrays = self._needed(arrays, names)
        _expect_names(kind, names, arrays)
        new = {}
        for name, x in arrays.items():
            array, old = self._numpy(x), self.backend.to_numpy(self.arrays[name])
            if array.shape != old.shape:
                raise InputError(f"'{name}' has shape {list(array.shape)}, expected {list(old.shape)}")
            new[name] = self.placed(name, array.astype(old.dtype, copy=False))
        self.arrays = {**self.arrays, **new}

    def to_numpy(self) -> dict[str, np.ndarray[Any, Any]]:
        """Return complete copies of all carried arrays; all processes must call it."""
        return {n: np.array(self.backend.to_numpy(x)) for n, x in self.arrays.items()}

    def snapshot(self) -> dict[str, Any]:
        """Copy all carried arrays to the host for ``restore``; each process copies the parts that it holds."""
        if not self.is_distributed:
            return self.to_numpy()
        return {n: in_memory(n, x, 0, replicas=True) for n, x in self.arrays.items()}

    def restore(self, tensors: Mapping[str, Any]) -> None:
        """Restore the arrays of ``to_numpy``, of ``snapshot`` or of a checkpoint. Names and shapes must match."""
        self.arrays = self.restored(tensors)

    def restored(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arrays that ``restore`` sets."""
        # A checkpoint of a time when other parameters were frozen has their slots, or lacks them: both
        # are accepted.
        thawed = replace(self.recipe, frozen=())
        optional = (
            set(carried_values(self._traced[1], thawed, parameter_names(self._traced[1]))) if self._traced else set()
        )
        shapes = {**self._shapes, **{n: e.type.shape for n, e in self.extra.items()}}
        shapes |= {n: tuple(x.shape) for n, x in self.arrays.items()}
        tensors = self._needed(tensors, shapes)
        selection = {n: s for n, s in shapes.items() if n in tensors or n in self.extra or n not in optional}
        missing_or_unknown(
            "checkpoint tensor", selection, {n: x for n, x in tensors.items() if n in selection or n not in optional}
        )
        for name, shape in selection.items():
            if shape != tensors[name].shape:
                raise InputError(
                    f"the checkpoint's '{name}' has shape {list(tensors[name].shape)}, expected {list(shape)}",
                    hint="load restores all values; Trainer(params=..., state=...) takes some of them",
                )
        return {n: self.placed(n, x) for n, x in tensors.items()}
