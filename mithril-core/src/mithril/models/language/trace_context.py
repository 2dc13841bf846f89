"""The trace context of layers: parameters, state, random keys, and calls of nested layers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np

from mithril.backend import covers, plugin_of, require_match
from mithril.compiler import ADDED_LOSS
from mithril.graph import (
    DEFAULT_FLOAT,
    Builder,
    DType,
    MithrilError,
    ModelError,
    Origin,
    Output,
    Shape,
    ShapeError,
    Value,
    dtype as as_dtype,
    equal,
    is_static,
    result,
)
from mithril.models.language.children import LayerMap
from mithril.models.language.connection import Connection, IOKey
from mithril.models.language.source_location import SourceLocation
from mithril.plugins import Plugin


class Builds(Protocol):
    """The attributes of a layer that a trace uses."""

    name: str | None
    tags: dict[str, Any]
    pretrained: Mapping[str, Any]
    frozen: tuple[str, ...]
    _is_replacement: bool

    @property
    def scalars(self) -> bool: ...
    @property
    def inputs(self) -> tuple[str, ...]: ...
    @property
    def optional(self) -> tuple[str, ...]: ...
    @property
    def weights(self) -> tuple[str, ...]: ...
    def build(self, *inputs: Any) -> Any: ...
    def child_name(self, child: Any, /) -> str: ...
    def part_name(self, child: Any, /) -> str | None: ...
    def part_names(self) -> LayerMap[str]: ...
    def walk(self) -> Iterable[tuple[str, Builds]]: ...


RNG = "rng"
# States of models that continue texts: tokens read, and not to read.
POSITION, PADDING = "position", "padding"


class _Active(threading.local):
    context: Context | None = None


_active = _Active()


def active(layer: Builds) -> Context:
    """Return the current trace; raise ModelError if a layer is applied to values outside a trace."""
    if _active.context is None:
        raise ModelError(
            f"{layer!r} is applied to values, but no model is being traced",
            hint="call layers on connections, or inside the build method of a layer",
        )
    return _active.context


def current() -> Context | None:
    """Return the current trace, or None outside of one."""
    return _active.context


def shapes_of(arrays: Mapping[str, Any]) -> dict[str, Shape]:
    """Return the shapes of arrays by name."""
    return {name: tuple(np.shape(array)) for name, array in arrays.items()}


def join_path(path: str, name: str) -> str:
    """Return the path of a layer within another one; a wrapped layer has no name of its own."""
    return f"{path}.{name}" if path and name else path or name


class LazyParam:
    """A trainable input whose shape is determined by the first layer that uses it."""

    __slots__ = ("key", "name")

    def __init__(self, name: str, key: IOKey) -> None:
        self.name = name
        self.key = key


class Context:
    """The state of one trace. Parameters, states and the random key are inputs of the root graph in all regions."""

    def __init__(self, root: Builder, *, training: bool, dtype: DType | None, frozen: Mapping[str, bool]) -> None:
        self.root = root
        self.training = training
        self.dtype = dtype
        self.frozen = frozen
        self.frozen_parts: dict[tuple[str, str], bool] = {}  # path of a layer, pattern -> whether a parameter matched
        self.path = ""
        self.location = SourceLocation()
        self.tags: Mapping[str, Any] = {}
        self.operands: tuple[Any, ...] = ()
        self.bound: Mapping[str, Any] = {}
        self.params: dict[str, Value] = {}
        self.owners: dict[str, object] = {}  # parameter name -> the only layer that may create it
        self.parameter_scopes: LayerMap[str] = LayerMap()  # prefix of the parameters: the path of the first use
        self.created: LayerMap[str] = LayerMap()  # names of the layers that the current build method created
        self.ran: LayerMap[None] = LayerMap()
        self.repeats = (
            False  # whether the current layer, or one around it, runs again, with the parameters of its first run
        )
        self.states: dict[str, Value] = {}  # current values
        self.pretrained: dict[str, Any] = {}  # arrays by full name
        self.learned: Mapping[str, Shape] = {}  # shapes of parameters, where no array determines them
        self.derived: dict[str, Shape] = {}  # shapes of parameters that the layer around theirs determines
        self.inputs_of_states: dict[str, Value] = {}  # their values before this call
        self.updated: dict[str, Value] = {}
        self.draws = 0
        self.new_tokens: tuple[Any, Any] | None = None  # batch and length of the tokens that advance the position
        self.reparametrized: dict[tuple[int, str], Callable[[Value], Value]] = {}  # by layer and name of parameter
        self.watched: dict[str, Any] = {}  # path of a layer -> its result, None until it ran
        self.results: dict[str, Any] = {}  # path of a layer outside of loops and branches -> its first result
        self._current: Builds | None = None

    @contextmanager
    def active(self) -> Iterator[Context]:
        outer, _active.context = _active.context, self
        try:
            yield self
        finally:
            _active.context = outer

    @property
    def parameter_scope(self) -> str:
        """The prefix of the parameter names of the current layer."""
        assert self._current is not None
        return self.parameter_scopes[self._current]

    def adopt(self, scope: str, arrays: Mapping[str, Any]) -> None:
        """Add the pretrained arrays of a layer; those of the layers around it take precedence."""
        for name, array in arrays.items():
            self.pretrained.setdefault(f"{scope}.{name}" if scope else name, array)

    def freeze(self, scope: str, patterns: Iterable[str]) -> None:
        """Do not train the parameters below ``scope`` that match a pattern, or are within a layer that does."""
        for pattern in patterns:
            self.frozen_parts.setdefault((scope, pattern), False)

    def pass_over(self, layer: Builds, path: str) -> None:
        """Reserve the names of a layer that is not run: all parameters keep their names, and patterns find it."""
        self.parameter_scopes.setdefault(layer, path)
        for inner, part in (("", layer), *layer.walk()):
            for name in part.weights:
                self.is_frozen(join_path(join_path(path, inner), name))

    def is_frozen(self, name: str) -> bool:
        excluded = self.frozen.get(name, False)
        for scope, pattern in self.frozen_parts:
            is_inside = not scope or name.startswith(f"{scope}.")
            if is_inside and covers(pattern, name[len(scope) + 1 if scope else 0 :]):
                self.frozen_parts[scope, pattern] = excluded = True
        return excluded

    # -- running a layer ---------------------------------------------------------------------------------------------
    def run(
        self,
        layer: Builds,
        path: str,
        location: SourceLocation,
        tags: Mapping[str, Any],
        operands: tuple[Any, ...],
        bound: Mapping[str, Any],
    ) -> Any:
        """Build the operations of a layer; add its path and the user's line to errors."""
        saved = (self.path, self.location, self.tags, self.operands, self.bound)
        surroundings = (self._current, self.created, self.repeats)
        self.path, self.location, self.tags, self.operands, self.bound = path, location, tags, operands, bound
        self._current, self.created, self.repeats = layer, LayerMap(), self.repeats or layer in self.ran
        self.ran[layer] = None
        self.parameter_scopes.setdefault(layer, path)
        if layer.pretrained:
            self.adopt(self.parameter_scope, layer.pretrained)
        self.freeze(self.parameter_scope, layer.frozen)
        builder = Builder.current()
        origin = Origin(path, location.file, location.line)
        outer, builder.origin, builder.tags = (builder.origin, builder.tags), origin, tags or None
        try:
            built = layer.build(*operands)
            _check_results(layer, built)
            if layer._is_replacement:
                self._forget_unlike(self.parameter_scope)
            first = built[0] if isinstance(built, (tuple, list)) and built else built
            if path in self.watched and self.watched[path] is None:
                self.watched[path] = self._watched(path, first)
            if Builder.current() is self.root:
                self.results.setdefault(path, first)
            return built
        except MithrilError as error:
            if not _located(error):
                error.with_facts(str(origin))
            if plugin := plugin_of(type(layer).__module__):
                error.with_facts(_class_of(layer, plugin))
            raise
        except Exception as error:
            if plugin := plugin_of(type(layer).__module__):
                error.add_note(f"{origin}: {_class_of(layer, plugin)}")
            elif isinstance(error, (TypeError, AttributeError)) and not hasattr(error, "__notes__"):
                if "tuple" in str(error):
                    error.add_note("a layer such as LSTM returns several values: output, *states = layer(x)")
                # functions of NumPy, math and other frameworks refuse symbolic values by their class
                elif isinstance(error, TypeError) and "Value" in str(error):
                    error.add_note(
                        f"values in the build of {layer!r} are symbolic: use mithril.ops, such as ops.tanh(x)"
                    )
            raise
        finally:
            builder.origin, builder.tags = outer
            self.path, self.location, self.tags, self.operands, self.bound = saved
            self._current, self.created, self.repeats = surroundings

    def _watched(self, path: str, value: Any) -> Any:
        if Builder.current() is not self.root:
            raise ModelError(
                f"the result of layer '{path}' cannot be an output: it is computed inside a loop or a branch",
                hint="make it a result of the loop, such as the second value that the body of scan returns",
            )
        return value

    def call(
        self, layer: Builds, args: tuple[Any, ...], bindings: Mapping[str, Any], location: SourceLocation | None
    ) -> Any:
        """Apply a layer to values inside the build method of another layer."""
        parent = self._current
        if parent is None or _active.context is not self:
            active(layer)
        assert parent is not None
        inputs = layer.inputs + layer.optional
        slots = list(args) + [None] * (len(inputs) - len(args))
        name = self._name_within(parent, layer)
        # A layer in a wrapper has the parameters of the wrapper.
        bound = {} if name else dict(self.bound)
        for terminal, value in bindings.items():
            if terminal in layer.weights:
                bound[terminal] = value
            elif terminal in inputs and slots[inputs.index(terminal)] is None:
                slots[inputs.index(terminal)] = value
            else:
                raise ModelError(
                    f"{layer!r} has no unbound input or weight '{terminal}'", facts=[f"inputs: {', '.join(inputs)}"]
                )
        scope = self.parameter_scopes[parent]
        path = join_path(self.path, name)
        self.parameter_scopes.setdefault(layer, join_path(scope, name))
        tags = {**self.tags, **layer.tags} if layer.tags else self.tags
        if not layer.scalars:
            slots = [self.as_value(s) for s in slots]
        return self.run(layer, path, location or self.location, tags, tuple(slots), bound)

    def _name_within(self, parent: Builds, layer: Builds) -> str:
        """Return the name of a layer within another one; those that ``build`` creates are numbered, as in models."""
        if (name := parent.part_name(layer)) is not None:
            return name
        if layer not in self.created:
            names = {*self.created.values(), *parent.part_names().values()}
            name = stem = parent.child_name(layer)
            n = 0
            # in a loop or branch, which may be traced several times, a second layer is an error
            while name in names and layer.name is None and Builder.current() is self.root:
                n += 1
                name = f"{stem}_{n}"
            self.created[layer] = name
        return self.created[layer]

    def as_value(self, value: Any) -> Any:
        """Convert to a value: numbers and arrays become constants, a trainable input becomes its parameter."""
        if value is None or isinstance(value, Value):
            return value
        if isinstance(value, LazyParam):
            return self.materialize(value)
        return Builder.current().constant(value)

    # -- parameters --------------------------------------------------------------------------------------------------
    @contextmanager
    def reparametrize(self, layer: Builds, name: str, function: Callable[[Value], Value]) -> Iterator[None]:
        """Within this context the layer gets ``function`` of its parameter in place of the parameter."""
        outer = self.reparametrized.get((id(layer), name))
        self.reparametrized[id(layer), name] = function if outer is None else lambda value: outer(function(value))
        try:
            yield
        finally:
            if outer is None:
                del self.reparametrized[id(layer), name]
            else:
                self.reparametrized[id(layer), name] = outer

    def given_shape(self, layer: Builds, name: str) -> Shape | None:
        """Return the shape that a parameter has before the layer asks for it: connected, pretrained or declared."""
        binding = self.bound.get(name) if layer is self._current else None
        if isinstance(binding, LazyParam):
            value = self.params.get(binding.name)
            return self._shape_of(binding) if value is None else value.shape
        if binding is not None:
            return self.as_value(binding).shape  # type: ignore[no-any-return]
        return self._shape_named(join_path(self.parameter_scopes.get(layer, self.path), name))

    def _shape_named(self, name: str) -> Shape | None:
        array = self.pretrained.get(name)
        shape = self.learned.get(name) if array is None else tuple(np.shape(array))
        # Derived shapes come first, so that a weight of another shape is an error that names it.
        return self.derived.get(name, shape)

    def _shape_of(self, lazy: LazyParam) -> Shape | None:
        """Return the declared shape of a trainable input, else that of its pretrained array."""
        declared = lazy.key.shape_declared
        if declared is not None and is_static(declared):
            return declared
        return self._shape_named(lazy.name)

    def param(self, layer: Builds, name: str, shape: Shape, init: str, dtype: Any) -> Value:
        """Return the parameter of that name; a layer used twice gets the same parameter."""
        value = self._param(layer, name, shape, init, dtype)
        function = self.reparametrized.get((id(layer), name))
        return value if function is None else self._checked(name, function(value), shape)

    def _param(self, layer: Builds, name: str, shape: Shape, init: str, dtype: Any) -> Value:
        binding = self.bound.get(name) if layer is self._current else None
        kind = self._dtype(dtype)
        if isinstance(binding, LazyParam):
            return self._checked(binding.name, self.materialize(binding, shape, init, kind), shape)
        if binding is not None:
            return self._checked(name, self.as_value(binding), shape)
        scope = self.parameter_scopes[layer]
        full = f"{scope}.{name}" if scope else name
        existing = self.params.get(full)
        if existing is None:
            self.owners[full] = layer
            return self._new_param(full, shape, kind, init)
        if self.owners[full] is not layer and not self.repeats:
            raise ModelError(
                f"two parameters are named '{full}'",
                hint="rename one of the layers with name=..., or create it in __init__",
            )
        return self._checked(full, existing, shape)

    def materialize(
        self, lazy: LazyParam, shape: Shape | None = None, init: str = "", dtype: DType | None = None
    ) -> Value:
        """Return the parameter of a trainable input, creating it if necessary."""
        existing = self.params.get(lazy.name)
        if existing is not None:
            return existing
        shape = self._shape_of(lazy) if shape is None else shape
        if shape is None:
            raise ShapeError(
                f"Cannot infer shape for tensor '{lazy.name}'",
                facts=[f"declared at {lazy.key.declared_at}"],
                hint="it is trainable: declare its shape with IOKey(shape=[...]), or set model.pretrained",
            )
        kind = lazy.key.dtype_declared or dtype or self._dtype(None)
        self.owners[lazy.name] = lazy.key
        return self._new_param(lazy.name, shape, kind, lazy.key.init or init or "normal(std=0.02)")

    def _new_param(self, name: str, shape: Shape, dtype: DType, init: str) -> Value:
        tags: dict[str, Any] = {"init": init}
        if self.is_frozen(name):
            tags["trainable"] = False
        value = self.params[name] = self.root.param(name, shape, dtype, **tags)
        return value

    def _forget_unlike(self, scope: str) -> None:
        """Leave out arrays of a replaced layer that do not have the shapes of the new one, such as another head."""
        for name, value in self.params.items():
            array = self.pretrained.get(name) if name.startswith(f"{scope}.") else None
            if array is not None and np.shape(array) != value.shape:
                del self.pretrained[name]

    def _checked(self, name: str, value: Value, shape: Shape) -> Value:
        if len(value.shape) != len(shape) or any(equal(a, b) is False for a, b in zip(value.shape, shape, strict=True)):
            raise ShapeError(
                f"parameter '{name}' has shape [{', '.join(map(str, value.shape))}], "
                f"but [{', '.join(map(str, shape))}] is required here",
                facts=["its shape was determined where it was created"],
            )
        return value

    def _dtype(self, requested: Any) -> DType:
        """Return the requested dtype, else that of the layer's first float input, else that of the trace."""
        if requested is not None:
            return as_dtype(requested)
        for operand in self.operands:
            if isinstance(operand, Value) and operand.dtype.is_float:
                return operand.dtype
        return self.dtype or DEFAULT_FLOAT

    # -- state -------------------------------------------------------------------------------------------------------
    def state(self, layer: Builds, name: str, shape: Shape, init: str, dtype: Any) -> Value:
        """Return the current value of a state."""
        scope = self.parameter_scopes[layer]
        full = f"{scope}.{name}" if scope else name
        if full not in self.states:
            value = self.root.input(full, shape, self._dtype(dtype), "state", tags={"init": init})
            self.states[full] = self.inputs_of_states[full] = value
        return self.states[full]

    def update_state(self, layer: Builds, name: str, value: Value) -> None:
        scope = self.parameter_scopes[layer]
        full = f"{scope}.{name}" if scope else name
        self.states[full] = self.updated[full] = value

    def is_updated(self, layer: Builds, name: str) -> bool:
        scope = self.parameter_scopes[layer]
        return (f"{scope}.{name}" if scope else name) in self.updated

    def position(self, batch: Any, length: Any) -> Value:
        """Return the position of the first token of the call: the input of that name, else a state."""
        from mithril.ops import cast

        declared = next((i for i in self.root.inputs if i.name == POSITION and i.role == "input"), None)
        if declared is not None:
            position: Value = cast(declared.value, dtype="int32")
            return position
        if self.training:
            return self.root.constant(0, "int32")
        return self._continued(POSITION, batch, length)

    def token_counts(self, batch: Any, length: Any) -> Value | None:
        """Return how many tokens of each row are not padding, None for all."""
        from mithril.ops import size_value

        if self.training:
            return None
        self.position(batch, length)
        counts: Value = size_value(value=length) - self._continued(PADDING, batch, length)
        return counts

    def _continued(self, name: str, batch: Any, length: Any) -> Value:
        """Return a state with a number for each row of the tokens."""
        if Builder.current() is not self.root:
            raise ModelError(
                "the position of the model is read inside a branch or a loop, which may run several times",
                hint="call the layer outside of it, or declare an input named 'position'",
            )
        first = self.new_tokens = self.new_tokens or (batch, length)
        if any(equal(a, b) is False for a, b in zip(first, (batch, length), strict=True)):
            raise ShapeError(
                f"{batch} rows of {length} tokens in a model that continues {first[0]} rows of {first[1]} tokens",
                hint="a cache is for the tokens that are generated, not for other sequences such as an encoder's",
            )
        if name not in self.states:
            self.states[name] = self.root.input(name, (batch,), "int32", "state", tags={"init": "zeros"})
        return self.states[name]

    def _advance(self) -> None:
        """Update the states that count tokens."""
        from mithril.ops import full, size_value

        if POSITION in self.states and self.new_tokens is not None:
            batch, length = self.new_tokens
            count = size_value(value=length)
            if PADDING in self.states:
                count = count - self.states[PADDING]
                self.updated[PADDING] = full(shape=(batch,), value=0, dtype="int32")
            self.updated[POSITION] = self.states[POSITION] + count

    def key(self) -> Value:
        """Return a new random key: the state ``rng`` folded with the number of keys drawn so far."""
        from mithril.ops import fold_in

        if RNG not in self.states:
            self.states[RNG] = self.root.input(RNG, (2,), "uint32", "state", tags={"init": "key"})
        self.draws += 1
        key: Value = fold_in(self.states[RNG], self.draws)
        return key

    def add_loss(self, loss: Value) -> None:
        """Mark a scalar as part of the training loss. Programs that do not train remove it as unused."""
        builder = Builder.current()
        if builder is not self.root:
            raise ModelError(
                "add_loss is called inside a branch or a loop",
                hint="return the loss from the branch or loop, and add it outside",
            )
        if not isinstance(loss, Value) or loss.shape != () or not loss.dtype.is_float:
            shown = loss.type if isinstance(loss, Value) else type(loss).__name__
            raise ModelError(
                f"add_loss expects a float scalar, got {shown}", hint="reduce it: ops.mean(x) or ops.sum(x)"
            )
        one = builder.constant(1.0, loss.dtype)
        with builder.at(builder.origin, {**(builder.tags or {}), ADDED_LOSS: True}):
            _ = loss * one

    def finish(self) -> list[Output]:
        """Return the state results: updated states, and the next random key if one was used."""
        for (scope, pattern), is_used in self.frozen_parts.items():
            if not is_used:
                names = [name for name in self.params if not scope or name.startswith(f"{scope}.")]
                require_match("freeze", "parameter or layer", pattern, [n[len(scope) :].lstrip(".") for n in names])
        if self.draws:
            from mithril.ops import fold_in

            self.updated[RNG] = fold_in(self.states[RNG], 0)
        self._advance()
        return [result("state", name, value) for name, value in self.updated.items()]


def _class_of(layer: Builds, plugin: Plugin) -> str:
    return f"in the layer class '{type(layer).__name__}' of {plugin.origin}"


def _located(error: MithrilError) -> bool:
    return any(fact.startswith("layer '") for fact in error.facts)


def _check_results(layer: Builds, built: Any) -> None:
    """Refuse results that ``build`` returned by mistake; one of several may be None, if it is absent."""
    if built is None:
        raise ModelError(f"{layer!r} returned None instead of a value", hint="end build with return")
    for value in built if isinstance(built, (tuple, list)) else built.values() if isinstance(built, dict) else (built,):
        if type(value) in (str, bytes, set, frozenset):  # subclasses are handles that layers exchange
            raise ModelError(
                f"{layer!r} returned a {type(value).__name__} instead of a value",
                facts=[f"got {value!r}", "accepted: values, numbers, NumPy arrays, tuples and dictionaries of those"],
            )
        if isinstance(value, Connection):
            hint = "within build, call layers on values: Linear(2)(x)"
            raise ModelError(f"{layer!r} returned a connection without a value, {value!r}", hint=hint)
