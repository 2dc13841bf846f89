"""Layers: a class that declares terminals and builds operations from typed values, and its applications (steps)."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping
from copy import deepcopy
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np

from mithril.base.checked_calls import mismatch
from mithril.base.errors import ModelError, closest
from mithril.base.fingerprint import fields
from mithril.ir import Value
from mithril.models.language.connection import Connection, IOKey
from mithril.models.language.source_location import NOWHERE, Place, caller, here

if TYPE_CHECKING:
    from mithril.models.language.model import Model
    from mithril.models.language.trace_context import Context

_serial = count()
_WORDS = re.compile(r"(?<=[a-z0-9])(?=[A-Z][a-z])|(?<=[a-z])(?=[A-Z])")


def snake_case(name: str) -> str:
    """``GlobalAvgPool2d`` as ``global_avg_pool2d``."""
    return _WORDS.sub("_", name).lower()


class LayerType(type):
    """Gives every layer ``name=`` and turns wrong constructor arguments into errors with the user's line."""

    def __call__(cls, *args: Any, name: str | None = None, **options: Any) -> Any:
        made: Any = object.__new__(cls)  # type: ignore[arg-type]  # mypy takes the metaclass for the class
        made.__dict__.update(_children={}, tags={}, name=name, arguments=(args, options), place=NOWHERE)
        try:
            made.__init__(*args, **options)
        except ModelError as error:
            raise error.with_facts(f"in {cls.__name__} at {here()}") from None
        except TypeError as error:
            raise _constructor_error(cls, args, options, error) from error
        return made


def _constructor_error(cls: type, args: Any, options: Mapping[str, Any], error: TypeError) -> Exception:
    signature = inspect.signature(cls.__init__)  # type: ignore[misc]
    bound = signature.replace(parameters=list(signature.parameters.values())[1:])
    wrong = mismatch(cls.__name__, bound, args, options, extra=("name",))
    if wrong is None:
        return error  # not about the call: a mistake inside the constructor
    message, facts, hint = wrong
    return ModelError(message, facts=[f"at {here()}", *facts], hint=hint)


class Layer(metaclass=LayerType):
    """A building block. Subclasses name their terminals and say in ``build`` what is computed.

    ``build`` is run when the shapes of the inputs are known; inside, ``self.param`` asks for a parameter,
    ``self.training`` says which graph is being made, and other layers kept as attributes are called like functions.
    """

    inputs: tuple[str, ...] = ("input",)
    outputs: tuple[str, ...] = ("output",)
    optional: tuple[str, ...] = ()  # inputs that may stay unconnected: build gets None
    weights: tuple[str, ...] = ()  # parameters that a connection may take the place of
    scalars = False  # build takes Python numbers as they are
    output_alias = False  # "output" also means the first output, whatever its name

    name: str | None
    tags: dict[str, Any]
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    place: Place  # where the layer was applied by a layer of the user's, for messages
    _children: dict[int, str]

    def __fingerprint__(self) -> tuple[Any, ...]:
        # the arguments are in the fields again; the place and the names of children are no part of the meaning
        return fields(self, skip=("place", "arguments", "_children"))

    def build(self, *inputs: Any) -> Any:
        """The outputs for these inputs."""
        raise ModelError(f"{type(self).__name__} has no build method", hint="define build(self, ...)")

    def expects(self, terminal: str) -> tuple[tuple[Any, ...] | None, Any] | None:
        """Shape (None for any size) and dtype that an input should have, as far as the layer knows beforehand."""
        return None

    # -- what build may ask for --------------------------------------------------------------------------------------
    @property
    def context(self) -> Context:
        """The trace that is running."""
        from mithril.models.language.trace_context import active

        return active(self)

    def param(self, name: str, shape: Iterable[Any], init: str = "zeros", dtype: Any = None) -> Value:
        """A parameter of this layer, made by the named initialiser: ``"normal(std=0.02)"``."""
        return self.context.param(self, name, tuple(shape), init, dtype)

    def state(self, name: str, shape: Iterable[Any], init: str = "zeros", dtype: Any = None) -> Value:
        """A tensor the layer carries from call to call."""
        return self.context.state(self, name, tuple(shape), init, dtype)

    def update_state(self, name: str, value: Value) -> None:
        """What a state is after this call."""
        self.context.update_state(self, name, value)

    def key(self) -> Value:
        """A random key of this application's own."""
        return self.context.key()

    @property
    def training(self) -> bool:
        """Whether the graph being made is for training."""
        return self.context.training

    # -- attributes --------------------------------------------------------------------------------------------------
    def set_attribute(self, name: str, value: Any) -> Layer:
        """Mark everything inside: nodes keep it as a tag."""
        if not name.isidentifier():
            raise ModelError(f"'{name}' cannot name an attribute", facts=[f"at {here()}"], hint="use an identifier")
        if not isinstance(value, (str, bool, int, float)):
            raise ModelError(
                f"attribute '{name}' cannot be {value!r}", facts=[f"at {here()}", "accepted: strings, numbers, bools"]
            )
        self.tags[name] = value
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        """Layers kept as attributes, alone or in lists, are named after them."""
        if isinstance(value, Layer):
            self._children[id(value)] = name
        elif isinstance(value, (list, tuple)):
            for k, item in enumerate(value):
                if isinstance(item, Layer):
                    self._children[id(item)] = f"{name}.{k}"
        self.__dict__[name] = value

    def __deepcopy__(self, memo: dict[int, Any]) -> Layer:
        """A layer of the same kind with parameters of its own; the layers inside keep their names."""
        made = object.__new__(type(self))
        memo[id(self)] = made
        made.__dict__.update({n: deepcopy(v, memo) for n, v in self.__dict__.items() if n != "_children"})
        made.__dict__["_children"] = {id(memo[old]): name for old, name in self._children.items() if old in memo}
        return made

    def child_name(self, child: Layer) -> str:
        """The name under which another layer is kept here."""
        return self._children.get(id(child)) or child.name or snake_case(type(child).__name__)

    # -- calling -----------------------------------------------------------------------------------------------------
    @property
    def default_bindings(self) -> Mapping[str, Any]:
        """Connections given when the layer was made, for terminals not mentioned in the call."""
        return {}

    @property
    def implicit_names(self) -> Mapping[str, str]:
        """Names that outputs have in the enclosing model where the call gives none."""
        return {}

    @property
    def standard(self) -> tuple[str, ...]:
        """The inputs that ``+=`` may connect to the previous layer."""
        return self.inputs

    def terminals(self) -> list[str]:
        """Every name a call may mention."""
        return [*self.inputs, *self.optional, *self.weights, *self.outputs]

    def __call__(self, *args: Any, **bindings: Any) -> Any:
        """Wire the layer: terminals by name, to names, connections, IOKeys or constants.

        Gives the output connection (several: a tuple). With values, inside a build method, it builds at once.
        """
        if any(isinstance(a, Value) for a in args) or any(isinstance(b, Value) for b in bindings.values()):
            return self.context.call(self, args, bindings, caller())
        step = Step(self, args, bindings, here())
        made = tuple(step.results.values())
        step.settle()
        return made[0] if len(made) == 1 else Connections(made)

    def __repr__(self) -> str:
        args, options = self.arguments
        shown = [_short(a) for a in args] + [f"{k}={_short(v)}" for k, v in options.items()]
        return f"{type(self).__name__}({', '.join(shown)})"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


class Connections(tuple[Connection, ...]):
    """The outputs of a layer that has several."""

    __slots__ = ()


class Constant:
    """A number or array given where a connection could stand."""

    __slots__ = ("data",)

    def __init__(self, data: Any) -> None:
        self.data = data


class Step:
    """One application of a layer: where its inputs come from and what it gives."""

    __slots__ = ("bindings", "layer", "model", "name", "place", "results", "serial", "wanted")

    def __init__(self, layer: Layer, args: tuple[Any, ...], bindings: dict[str, Any], place: Place) -> None:
        self.layer = layer
        self.place = place
        self.name = ""
        self.serial = next(_serial)
        self.model: Model | None = None
        self.bindings: dict[str, Any] = dict(layer.default_bindings)
        self.wanted: dict[str, Any] = {}  # output terminal -> name or IOKey
        self._bind(args, bindings)
        terminals = [*layer.outputs, *(t for t in self.wanted if t not in layer.outputs)]
        self.results = {t: Connection(self._wanted_name(t), step=self, terminal=t) for t in terminals}

    @property
    def label(self) -> str:
        return self.name or self.layer.name or snake_case(type(self.layer).__name__)

    def _wanted_name(self, terminal: str) -> str:
        wanted = self.wanted.get(terminal, "")
        return wanted if isinstance(wanted, str) else wanted.name

    def _bind(self, args: tuple[Any, ...], bindings: dict[str, Any]) -> None:
        layer = self.layer
        inputs = layer.inputs + layer.optional
        if len(args) > len(inputs):
            raise self._error(
                f"{layer!r} takes {len(inputs)} inputs, got {len(args)}", [f"inputs: {', '.join(inputs)}"]
            )
        for terminal, given in zip(inputs, args, strict=False):
            if given is not None:
                self.bindings[terminal] = self._checked(terminal, given)
        outputs = layer.outputs
        for terminal, given in bindings.items():
            if terminal in inputs or terminal in layer.weights:
                if terminal in inputs[: len(args)]:
                    raise self._error(f"{layer!r} got its input '{terminal}' twice", [])
                if given is not None:
                    self.bindings[terminal] = self._checked(terminal, given)
            elif terminal in outputs:
                self.wanted[terminal] = self._checked_output(terminal, given)
            elif terminal == "output" and layer.output_alias:
                self.wanted[outputs[0]] = self._checked_output(terminal, given)
            elif terminal in layer.terminals():
                self.wanted[terminal] = self._checked_output(terminal, given)
            else:
                known = layer.terminals()
                near = closest(terminal, known, 1)
                raise self._error(
                    f"{layer!r} has no terminal '{terminal}'",
                    [f"terminals: {', '.join(known)}"],
                    f"did you mean '{near[0]}'?" if near else None,
                )

    def _checked(self, terminal: str, given: Any) -> Any:
        if isinstance(given, (str, Connection, Constant)):
            return given
        if isinstance(given, (bool, int, float, np.ndarray, np.generic, list)):
            return Constant(given)
        if isinstance(given, Connections):
            names = ", ".join(c.terminal for c in given)
            raise self._error(
                f"input '{terminal}' of {self.layer!r} got {len(given)} connections",
                [f"'{given[0].step.label if given[0].step else ''}' has the outputs {names}"],
                "take one of them: y, *rest = layer(x)",
            )
        raise self._error(
            f"input '{terminal}' of {self.layer!r} cannot be a {type(given).__name__}",
            ["accepted: a name, a connection, an IOKey, a number, a NumPy array"],
        )

    def _checked_output(self, terminal: str, given: Any) -> Any:
        if isinstance(given, (str, IOKey)):
            return given
        raise self._error(
            f"output '{terminal}' of {self.layer!r} cannot be a {type(given).__name__}", ["accepted: a name, an IOKey"]
        )

    def _error(self, what: str, facts: list[str], hint: str | None = None) -> ModelError:
        return ModelError(what, facts=[f"at {self.place}", *facts], hint=hint)

    def sources(self) -> Iterable[Connection]:
        """The connections among the bindings."""
        return (b for b in self.bindings.values() if isinstance(b, Connection))

    def settle(self) -> None:
        """Where an input already belongs to a model, so does this step."""
        for source in self.sources():
            model = source.origin.model
            if model is not None:
                model.adopt(self)
                return
