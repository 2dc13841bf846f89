"""What layers talk to while a model is being traced: parameters, state, random keys, and layers within layers."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from mithril.base import (
    DEFAULT_FLOAT,
    DType,
    MithrilError,
    ModelError,
    Shape,
    ShapeError,
    dtype as as_dtype,
    equal,
    is_static,
)
from mithril.ir import Builder, Origin, Output, Value, result
from mithril.models.language.connection import IOKey
from mithril.models.language.source_location import Place


class Builds(Protocol):
    """The part of a layer that a trace uses."""

    tags: dict[str, Any]
    scalars: bool

    @property
    def inputs(self) -> tuple[str, ...]: ...
    @property
    def optional(self) -> tuple[str, ...]: ...
    @property
    def weights(self) -> tuple[str, ...]: ...
    def build(self, *inputs: Any) -> Any: ...
    def child_name(self, child: Any, /) -> str: ...


RNG = "rng"


class _Active(threading.local):
    context: Context | None = None


_active = _Active()


def active(layer: Builds) -> Context:
    """The running trace, or an error for layers that are applied outside of one."""
    if _active.context is None:
        raise ModelError(
            f"{layer!r} is applied to values, but no model is being traced",
            hint="call layers on connections, or inside the build method of a layer",
        )
    return _active.context


class LazyParam:
    """A trainable input whose shape the first layer that reads it decides."""

    __slots__ = ("key", "name")

    def __init__(self, name: str, key: IOKey) -> None:
        self.name = name
        self.key = key


class Context:
    """One trace. Parameters, states and the random key are inputs of the root graph, whatever region asks for them."""

    def __init__(self, root: Builder, *, training: bool, dtype: DType | None, frozen: Mapping[str, bool]) -> None:
        self.root = root
        self.training = training
        self.dtype = dtype
        self.frozen = frozen
        self.path = ""
        self.place = Place()
        self.tags: Mapping[str, Any] = {}
        self.operands: tuple[Any, ...] = ()
        self.bound: Mapping[str, Any] = {}
        self.params: dict[str, Value] = {}
        self.owners: dict[str, int] = {}  # who made a name: two layers must not
        self.homes: dict[int, str] = {}  # the path under which a layer keeps its parameters: that of its first use
        self.states: dict[str, Value] = {}  # current values
        self.inputs_of_states: dict[str, Value] = {}  # their values before this call
        self.updated: dict[str, Value] = {}
        self.draws = 0
        self._current: Builds | None = None

    @contextmanager
    def active(self) -> Iterator[Context]:
        before, _active.context = _active.context, self
        try:
            yield self
        finally:
            _active.context = before

    @property
    def home(self) -> str:
        """The path under which the layer that is being built keeps its parameters."""
        return self.homes[id(self._current)]

    # -- running a layer ---------------------------------------------------------------------------------------------
    def run(
        self,
        layer: Builds,
        path: str,
        place: Place,
        tags: Mapping[str, Any],
        operands: tuple[Any, ...],
        bound: Mapping[str, Any],
    ) -> Any:
        """Build one layer's operations; errors get its path and the user's line."""
        before = (self.path, self.place, self.tags, self.operands, self.bound, self._current)
        self.path, self.place, self.tags, self.operands, self.bound = path, place, tags, operands, bound
        self._current = layer
        self.homes.setdefault(id(layer), path)
        builder = Builder.current()
        origin = Origin(path, place.file, place.line)
        outer, builder.origin, builder.tags = (builder.origin, builder.tags), origin, tags or None
        try:
            return layer.build(*operands)
        except MithrilError as error:
            if not _located(error):
                error.with_facts(str(origin))
            raise
        finally:
            builder.origin, builder.tags = outer
            self.path, self.place, self.tags, self.operands, self.bound, self._current = before

    def call(self, layer: Builds, args: tuple[Any, ...], bindings: Mapping[str, Any], place: Place | None) -> Any:
        """A layer called on values inside another one's build."""
        parent = self._current
        if parent is None or _active.context is not self:
            active(layer)
        assert parent is not None
        inputs = layer.inputs + layer.optional
        slots = list(args) + [None] * (len(inputs) - len(args))
        bound = {}
        for name, given in bindings.items():
            if name in layer.weights:
                bound[name] = given
            elif name in inputs and slots[inputs.index(name)] is None:
                slots[inputs.index(name)] = given
            else:
                raise ModelError(f"{layer!r} cannot take '{name}' here", facts=[f"inputs: {', '.join(inputs)}"])
        home = self.homes[id(parent)]
        name = parent.child_name(layer)
        path = f"{self.path}.{name}" if self.path else name
        self.homes.setdefault(id(layer), f"{home}.{name}" if home else name)
        tags = {**self.tags, **layer.tags} if layer.tags else self.tags
        if not layer.scalars:
            slots = [self.as_value(s) for s in slots]
        return self.run(layer, path, place or self.place, tags, tuple(slots), bound)

    def as_value(self, given: Any) -> Any:
        """Numbers and arrays as constants; a trainable input that has a shape as the parameter it is."""
        if given is None or isinstance(given, Value):
            return given
        if isinstance(given, LazyParam):
            return self.settle(given)
        return Builder.current().constant(given)

    # -- parameters --------------------------------------------------------------------------------------------------
    def param(self, layer: Builds, name: str, shape: Shape, init: str, dtype: Any) -> Value:
        """The parameter of that name; a layer used twice gets the same one."""
        given = self.bound.get(name) if layer is self._current else None
        kind = self._dtype(dtype)
        if isinstance(given, LazyParam):
            return self._checked(given.name, self.settle(given, shape, init, kind), shape)
        if given is not None:
            return self._checked(name, self.as_value(given), shape)
        home = self.homes[id(layer)]
        full = f"{home}.{name}" if home else name
        known = self.params.get(full)
        if known is None:
            self.owners[full] = id(layer)
            return self._new_param(full, shape, kind, init)
        if self.owners[full] != id(layer):
            raise ModelError(
                f"two parameters are named '{full}'", hint="give one of the layers another name with name=..."
            )
        return self._checked(full, known, shape)

    def settle(self, lazy: LazyParam, shape: Shape | None = None, init: str = "", dtype: DType | None = None) -> Value:
        """The parameter behind a trainable input, made now if it was not yet."""
        known = self.params.get(lazy.name)
        if known is not None:
            return known
        declared = lazy.key.shape_declared
        if shape is None:
            if declared is None or not is_static(declared):
                raise ShapeError(
                    f"Cannot infer shape for tensor '{lazy.name}'",
                    facts=[f"declared at {lazy.key.made}"],
                    hint="it is trainable: declare its shape with IOKey(shape=[...])",
                )
            shape = declared
        kind = lazy.key.dtype_declared or dtype or self._dtype(None)
        self.owners[lazy.name] = id(lazy.key)
        return self._new_param(lazy.name, shape, kind, lazy.key.init or init or "normal(std=0.02)")

    def _new_param(self, name: str, shape: Shape, dtype: DType, init: str) -> Value:
        tags: dict[str, Any] = {"init": init}
        if self.frozen.get(name, False):
            tags["trainable"] = False
        value = self.params[name] = self.root.param(name, shape, dtype, **tags)
        return value

    def _checked(self, name: str, value: Value, shape: Shape) -> Value:
        if len(value.shape) != len(shape) or any(equal(a, b) is False for a, b in zip(value.shape, shape, strict=True)):
            raise ShapeError(
                f"the parameter '{name}' does not fit here",
                facts=[f"it is {value.type}", f"expected [{', '.join(map(str, shape))}]"],
            )
        return value

    def _dtype(self, wanted: Any) -> DType:
        """As asked, else like the layer's inputs, else the trace's dtype."""
        if wanted is not None:
            return as_dtype(wanted)
        for operand in self.operands:
            if isinstance(operand, Value) and operand.dtype.is_float:
                return operand.dtype
        return self.dtype or DEFAULT_FLOAT

    # -- state -------------------------------------------------------------------------------------------------------
    def state(self, layer: Builds, name: str, shape: Shape, init: str, dtype: Any) -> Value:
        """The current value of a state."""
        home = self.homes[id(layer)]
        full = f"{home}.{name}" if home else name
        if full not in self.states:
            value = self.root.input(full, shape, self._dtype(dtype), "state", tags={"init": init})
            self.states[full] = self.inputs_of_states[full] = value
        return self.states[full]

    def update_state(self, layer: Builds, name: str, value: Value) -> None:
        home = self.homes[id(layer)]
        full = f"{home}.{name}" if home else name
        self.states[full] = self.updated[full] = value

    def key(self) -> Value:
        """A new random key: the state ``rng`` folded with the number of draws so far."""
        from mithril.ops import fold_in

        if RNG not in self.states:
            self.states[RNG] = self.root.input(RNG, (2,), "uint32", "state", tags={"init": "key"})
        self.draws += 1
        made: Value = fold_in(self.states[RNG], self.draws)
        return made

    def finish(self) -> list[Output]:
        """The results that carry state on: updated states, and the next random key where one was used."""
        if self.draws:
            from mithril.ops import fold_in

            self.updated[RNG] = fold_in(self.states[RNG], 0)
        return [result("state", name, value) for name, value in self.updated.items()]


def _located(error: MithrilError) -> bool:
    return any(fact.startswith("layer '") for fact in error.facts)
