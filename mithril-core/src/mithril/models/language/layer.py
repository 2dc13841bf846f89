"""Layers: the base class, which declares terminals and builds operations from typed values."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from copy import deepcopy
from inspect import CO_VARARGS, Parameter, Signature, signature
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

import numpy as np

from mithril.backend import check_call, checked, constructor, is_ours
from mithril.graph import METHODS, ModelError, OptionError, Value, is_building, phrase_here, visible
from mithril.models.language.children import LayerMap, parts, slot
from mithril.models.language.connection import Connection, Connections, Step, snake_case
from mithril.models.language.source_location import NOWHERE, SourceLocation, caller_location, user_location
from mithril.models.language.trace_context import Context, active, current, shapes_of
from mithril.system import fields, notebook

T = TypeVar("T")
TRAINING_FLAG = "is_training"  # the input that is True in programs for training

_layers_left: ContextVar[int | None] = ContextVar("layers_left", default=None)


@contextmanager
def limited_construction(limit: int) -> Iterator[None]:
    """Raise ModelError in the block if it constructs more than ``limit`` layers."""
    token = _layers_left.set(limit)
    try:
        yield
    finally:
        _layers_left.reset(token)


def _count_layer() -> None:
    if (left := _layers_left.get()) is not None:
        if left == 0:
            raise ModelError("the saved model has too many layers", hint="construct it by the program that wrote it")
        _layers_left.set(left - 1)


class LayerMeta(type):
    """Metaclass that adds ``name=`` to every layer and reports invalid constructor arguments with the user's line."""

    @property
    def __signature__(cls) -> Signature:
        """The parameters of the constructor and ``name``, for ``help`` and for editors."""
        parameters = cls.constructor_parameters()  # type: ignore[attr-defined]  # mypy takes the metaclass for the class
        keyword = Parameter("name", Parameter.KEYWORD_ONLY, default=None, annotation="str | None")
        parameters = [p for p in parameters if p.name != "name"]  # declared by some, for type checkers
        return Signature(sorted([*parameters, keyword], key=lambda p: p.kind))

    def __call__(cls: type[T], *args: Any, name: str | None = None, **options: Any) -> T:
        _count_layer()
        kind: Any = cls
        layer = object.__new__(kind)
        layer.__dict__.update(_children=LayerMap(), tags={}, name=name, arguments=(args, options), location=NOWHERE)
        hints = getattr(cls, "argument_hints", {})
        try:
            check_call(cls.__name__, constructor(kind), args, options, hints, types=is_ours(cls), extra=("name",))
        except OptionError as error:
            raise ModelError(error.what, facts=[f"at {user_location()}", *error.facts], hint=error.hint) from None
        try:
            layer.__init__(*args, **options)
        except ModelError as error:
            raise error.with_facts(f"in {cls.__name__} at {user_location()}") from None
        return cast("T", layer)


class Layer(metaclass=LayerMeta):
    """A building block of models. Subclasses declare their terminals and implement ``build``.

    The inputs are ``input``, or the parameters of ``build`` if there are several, unless ``inputs`` names them;
    parameters that default to None are ``optional``.

    ``build`` runs when the shapes of the inputs are known. Within it, ``self.param`` returns a parameter,
    ``self.training`` is True in a training graph, and layers stored as attributes can be called like functions.

    ``pretrained`` holds arrays for parameters and states, by name relative to the layer (``"blocks.0.weight"``). They
    replace the random initial values, and a compiled model whose parameters are all pretrained starts with them bound.
    """

    inputs: tuple[str, ...] = ("input",)
    outputs: tuple[str, ...] = ("output",)
    optional: tuple[str, ...] = ()  # inputs that may be unconnected: ``build`` receives None
    weights: tuple[str, ...] = ()  # parameters that a connection can replace
    scalars = False  # whether ``build`` accepts Python numbers instead of values
    output_alias = False  # "output" also refers to the first output, regardless of its name

    pretrained: Mapping[str, Any] = MappingProxyType({})
    _is_replacement = False  # whether ``replace`` put it in place of a layer that it does not contain
    frozen: tuple[str, ...] = ()  # patterns of parameters that are not trained; ``freeze`` adds them
    name: str | None
    tags: dict[str, Any]
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    location: SourceLocation  # line of the user's layer that applied this one, for messages
    _children: LayerMap[str]  # names of layers inside that are not those of their attributes

    if TYPE_CHECKING:

        def __init__(self, *, name: str | None = None) -> None:
            """Accept the name that the metaclass sets."""

    if not TYPE_CHECKING:  # type checkers know all attributes

        def __getattr__(self, name: str) -> Any:
            instead = phrase_here(name, METHODS)
            text = f"{type(self).__name__} has no attribute '{name}'{f'; use {instead}' if instead else ''}"
            raise AttributeError(text, name=name, obj=self)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # by the code object: inspect.signature would take a share of the import for each layer of the library
        code = getattr(cls.__dict__.get("build"), "__code__", None)
        is_declared = cls.optional or cls.inputs is not Layer.inputs
        if is_declared or code is None or code.co_flags & CO_VARARGS:
            return
        names, defaults = code.co_varnames[1 : code.co_argcount], cls.build.__defaults__ or ()
        required = names[: len(names) - len(defaults)]
        # The only input is "input", whatever build calls it: layers of a chain are exchangeable.
        if len(required) > 1:
            cls.inputs = required
        if all(default is None for default in defaults):
            cls.optional = names[len(required) :]

    def __fingerprint__(self) -> tuple[Any, ...]:
        # the fields repeat the arguments; the location, the names of children and the values of parameters do not
        # affect programs, but layers take sizes from their shapes
        settings = fields(self, skip=("location", "arguments", "_children", "pretrained"))
        return (*settings, shapes_of(self.pretrained)) if isinstance(self.pretrained, dict) else settings

    def build(self, *inputs: Any, **unused: Any) -> Any:  # type checkers let methods with any parameters override it
        """Build the operations of the layer and return its outputs."""
        other = next((name for name in ("forward", "call") if callable(getattr(self, name, None))), None)
        hint = "define build(self, ...)" if other is None else f"rename its method '{other}' to build"
        raise ModelError(f"{type(self).__name__} has no build method", hint=hint)

    def expects(self, terminal: str) -> tuple[tuple[Any, ...] | None, Any] | None:
        """Return the expected shape (None for any size) and dtype of an input, or None if unknown before tracing."""
        return None

    @classmethod
    def constructor_parameters(cls) -> list[Parameter]:
        """Return the parameters of the constructor, without ``self``."""
        return [p for n, p in signature(constructor(cls)).parameters.items() if n != "self"]

    # -- for use in build ---------------------------------------------------------------------------------------------
    @property
    def context(self) -> Context:
        """The current trace."""
        return active(self)

    def param(self, name: str, shape: Iterable[Any], init: str = "zeros", dtype: Any = None) -> Value:
        """Return a parameter of this layer, with an initializer such as ``"normal(std=0.02)"``."""
        return self.context.param(self, name, tuple(shape), init, dtype)

    def given_shape(self, name: str) -> tuple[Any, ...] | None:
        """Return the shape of the array that this parameter has already: connected or pretrained; else None."""
        context = current()
        if context is not None:
            return context.given_shape(self, name)
        array = self.pretrained.get(name)
        return None if array is None else tuple(np.shape(array))

    def state(self, name: str, shape: Iterable[Any], init: str = "zeros", dtype: Any = None) -> Value:
        """Return the current value of a state, a tensor that persists between calls."""
        return self.context.state(self, name, tuple(shape), init, dtype)

    def update_state(self, name: str, value: Value) -> None:
        """Set the value of a state after this call."""
        self.context.update_state(self, name, value)

    def cache(
        self, keys: Value, values: Value, *, length: int, window: int | None = None
    ) -> tuple[Value, Value, Value]:
        """Return keys, values and mask for causal attention: those of this call and of all tokens before.

        ``keys`` and ``values`` are [batch, heads, length, size]. Those of ``length`` positions are states, which a call
        writes at the position of the model. With ``window`` each token attends to that many positions. The mask is
        bool and broadcasts to [batch, heads, queries, keys]. Training graphs attend to the tokens of the call only.
        """
        from mithril.models.language import caching

        return caching.cached(self, keys, values, length, window)

    def first_position(self, x: Value) -> Value:
        """Return the position of the first token of ``x`` [batch, length, ...]: [batch], in training graphs [].

        It is the model's input ``position`` if there is one, else a state, to which each call adds its tokens.
        """
        return self.context.position(*x.shape[:2])

    def token_counts(self, x: Value) -> Value | None:
        """Return how many tokens of each row of ``x`` [batch, length, ...] to read, None for all; others are padding.

        Recurrent layers need it to generate from prompts of different lengths: ``LSTM(8)(x, lengths=...)``.
        """
        return self.context.token_counts(*x.shape[:2])

    def add_loss(self, loss: Value) -> None:
        """Add a scalar to the loss of training, such as a penalty on activations; other programs do not compute it."""
        self.context.add_loss(loss)

    def key(self) -> Value:
        """Return a new random key, used nowhere else in the model."""
        return self.context.key()

    @property
    def training(self) -> bool:
        """Whether the current trace builds a training graph."""
        return self.context.training

    # -- attributes --------------------------------------------------------------------------------------------------
    def set_attribute(self, name: str, value: Any) -> Layer:
        """Set a tag on all nodes that this layer builds, and return the layer."""
        if not name.isidentifier():
            raise ModelError(
                f"'{name}' cannot name an attribute", facts=[f"at {user_location()}"], hint="use an identifier"
            )
        if not isinstance(value, (str, bool, int, float)):
            raise ModelError(
                f"attribute '{name}' cannot be {value!r}",
                facts=[f"at {user_location()}", "accepted: strings, numbers, bools"],
            )
        self.tags[name] = value
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Layer:
        """Return a copy with separate parameters; child layers keep their names."""
        copy = object.__new__(type(self))
        memo[id(self)] = copy
        memo[id(self.pretrained)] = self.pretrained  # arrays are shared: nothing writes to them
        copy.__dict__.update({n: deepcopy(v, memo) for n, v in self.__dict__.items() if n != "_children"})
        names = ((memo[id(old)], name) for old, name in self._children.items() if id(old) in memo)
        copy.__dict__["_children"] = LayerMap(names)
        return copy

    def child_name(self, child: Layer) -> str:
        """Return the name of a layer in this one: that of its attribute, else its own name."""
        name = self.part_name(child)
        return name if name is not None else child.name or snake_case(type(child).__name__)

    def part_name(self, child: Layer) -> str | None:
        """Return the name of a layer in an attribute, or None if ``build`` created it."""
        return self._children[child] if child in self._children else self.part_names().get(child)

    def part_names(self) -> LayerMap[str]:
        """Return the names of the layers in attributes; the last of two attributes with one layer names it."""
        names = ((part, slot(attribute, keys)) for attribute, keys, part in parts(self, Layer))
        return LayerMap((*names, *self._children.items()))

    # -- surgery -----------------------------------------------------------------------------------------------------
    def walk(self) -> Iterator[tuple[str, Layer]]:
        """Yield every layer within this one with its path, parents first."""
        from mithril.models.language import surgery

        return surgery.walk(self)

    @checked()
    def find(self, target: str | type) -> dict[str, Layer]:
        """Return the layers within this one by path that match a pattern such as ``"*.attention"`` or a class."""
        from mithril.models.language import surgery

        return surgery.find(self, target)

    @checked()
    def replace(self, target: str | type | Layer, replacement: Callable[[Layer], Any] | Layer) -> Self:
        """Replace the matching layers in place, and return this one.

        ``replacement`` is a function of the old layer, or a layer of which each match gets a copy. The new layers keep
        the paths, and parameters of equal names keep their names.
        """
        from mithril.models.language import surgery

        surgery.replace(self, target, replacement)
        return self

    def accept_child(self, old: Layer, new: Layer) -> None:
        """Raise ModelError if a layer directly within this one cannot be replaced by another one."""

    @checked()
    def freeze(self, *patterns: str) -> Self:
        """Do not train the parameters that match a pattern, or are within a layer that does. Returns this layer.

        ``model.freeze("model.layers.[0-9]")`` freezes ten layers; ``trainable=`` selects among the other parameters.
        """
        if not patterns:
            raise ModelError("freeze requires a pattern", hint="write freeze('*') for all parameters")
        self.frozen = (*self.frozen, *patterns)
        return self

    # -- files -------------------------------------------------------------------------------------------------------
    def to_dict(self) -> dict[str, Any]:
        """Return the structure as JSON values: layers with their arguments, connections, names, but no parameters."""
        from mithril.models.saving.writing import to_dict

        return to_dict(self)

    @checked()
    def to_json(self, path: str | Path | None = None) -> str:
        """Return ``to_dict`` as text; with ``path``, also write it to this file."""
        from mithril.models.saving.writing import to_json

        return to_json(self, path)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], layers: Iterable[type[Layer]] = ()) -> Self:
        """Return the model that ``to_dict`` described; ``layers`` are classes of layers outside of the library."""
        from mithril.models.saving.reading import from_dict

        return cls._as_this_class(from_dict(data, layers), "from_dict")

    @classmethod
    def from_json(cls, text: str | Path, layers: Iterable[type[Layer]] = ()) -> Self:
        """Return the model of ``to_json``, given as text or as the path of its file. No code of the file runs."""
        from mithril.models.saving.reading import from_json

        return cls._as_this_class(from_json(text, layers), "from_json")

    @classmethod
    def _as_this_class(cls, layer: Layer, reader: str) -> Self:
        if not isinstance(layer, cls):
            raise ModelError(
                f"the file describes {layer!r:.80}, not a {cls.__name__}",
                hint=f"use {type(layer).__name__}.{reader}, or Layer.{reader} for layers of any class",
            )
        return layer

    # -- calling -----------------------------------------------------------------------------------------------------
    @property
    def default_bindings(self) -> Mapping[str, Any]:
        """Connections passed to the constructor, for terminals that the call does not mention."""
        return {}

    @property
    def implicit_names(self) -> Mapping[str, str]:
        """Default names of outputs in the enclosing model, for outputs that the call does not name."""
        return {}

    @property
    def standard(self) -> tuple[str, ...]:
        """The inputs that ``+=`` may connect to the previous layer."""
        return self.inputs

    def terminals(self) -> list[str]:
        """Return all names that a call can bind."""
        return [*self.inputs, *self.optional, *self.weights, *self.outputs]

    def _check_values(self, args: tuple[Any, ...], bindings: Mapping[str, Any]) -> None:
        inputs = self.inputs + self.optional
        facts = [f"inputs: {', '.join(inputs)}"]
        if len(args) > len(inputs):
            raise ModelError(
                f"{self!r} takes {len(inputs)} input{'s' * (len(inputs) != 1)}, got {len(args)}",
                facts=facts,
                hint="a layer such as LSTM returns several values: output, *states = layer(x)",
            )
        if missing := [n for n in self.inputs[len(args) :] if n not in bindings]:
            raise ModelError(f"{self!r} lacks its input '{missing[0]}'", facts=facts)

    def __call__(self, *args: Any, **bindings: Any) -> Any:
        """Wire the layer: bind its terminals to names, connections, IOKeys or constants.

        Returns the output connection, or a tuple of them. Called on values in a build method, builds immediately.
        Called on arrays alone, outside of a model, it computes at once, with pretrained or initial parameters: by
        NumPy, or on ``backend=`` (a name or an instance), whose arrays it then returns. A list of connections is
        the same as several arguments: ``Add()([x, y])``.
        """
        if len(args) == 1 and isinstance(args[0], (list, tuple)) and any(map(_is_tensor, args[0])):
            args = tuple(args[0])
        if any(isinstance(a, Value) for a in args) or any(isinstance(b, Value) for b in bindings.values()):
            self._check_values(args, bindings)
            return self.context.call(self, args, bindings, caller_location())
        terminals = (*self.inputs, *self.optional)
        arrays = {**dict(zip(terminals, args, strict=False)), **bindings}
        backend = arrays.pop("backend", None) if "backend" in bindings and "backend" not in self.terminals() else None
        is_complete = set(self.inputs) - {TRAINING_FLAG} <= set(arrays) and len(args) <= len(terminals)
        if is_complete and arrays and all(map(_is_array, arrays.values())) and not is_building():
            from mithril.models.language.eager import compute

            return compute(self, arrays, backend)
        step = Step(self, args, bindings, user_location())
        outputs = tuple(step.results.values())
        step.attach_to_model()
        return outputs[0] if len(outputs) == 1 else Connections(outputs)

    @checked()
    def summary(
        self,
        shapes: Mapping[str, Any] | None = None,
        *,
        types: Mapping[str, Any] | None = None,
        width: int | None = None,
    ) -> str:
        """Return a table of the layers; with ``shapes`` of the inputs also results, parameters, flops and memory."""
        from mithril.models.language.model_summary import summarize

        return summarize(self, shapes, types, width)

    def _repr_html_(self) -> str:
        return notebook.heading(repr(self).strip("<>")) + _tree(list(self.walk()))

    def __repr__(self) -> str:
        args, options = self.arguments
        shown = [_short(a) for a in args] + [f"{k}={_short(v)}" for k, v in options.items()]
        return visible(f"{type(self).__name__}({', '.join(shown)})")


def _tree(layers: list[tuple[str, Layer]]) -> str:
    """Return nested sections of layers by path, which open by a click."""
    content = ""
    while layers:
        path, layer = layers.pop(0)
        inner = []
        while layers and layers[0][0].startswith(f"{path}."):
            inner.append(layers.pop(0))
        title = f"{path}: {layer!r}"
        below = [(p[len(path) + 1 :], x) for p, x in inner]
        content += notebook.folded(title, _tree(below)) if inner else f"<div>{html.escape(title)}</div>"
    return content


def _is_tensor(x: Any) -> bool:
    return isinstance(x, (Value, Connection, np.ndarray))


def _is_array(x: Any) -> bool:
    return hasattr(x, "shape") and hasattr(x, "dtype") and not isinstance(x, Connection)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
