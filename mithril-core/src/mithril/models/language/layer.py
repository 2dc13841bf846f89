"""Layers: a class that declares terminals and builds operations from typed values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from typing import Any

from mithril.backend import check_call, constructor, is_ours
from mithril.base import ModelError, OptionError, fields
from mithril.ir import Value
from mithril.models.language.connection import Connections, Step, snake_case
from mithril.models.language.source_location import NOWHERE, Place, caller, here
from mithril.models.language.trace_context import Context, active


class LayerType(type):
    """Gives every layer ``name=`` and turns wrong constructor arguments into errors with the user's line."""

    def __call__(cls, *args: Any, name: str | None = None, **options: Any) -> Any:
        made: Any = object.__new__(cls)  # type: ignore[arg-type]  # mypy takes the metaclass for the class
        made.__dict__.update(_children={}, tags={}, name=name, arguments=(args, options), place=NOWHERE)
        try:
            check_call(cls.__name__, constructor(cls), args, options, {}, types=is_ours(cls), extra=("name",))
        except OptionError as error:
            raise ModelError(error.what, facts=[f"at {here()}", *error.facts], hint=error.hint) from None
        try:
            made.__init__(*args, **options)
        except ModelError as error:
            raise error.with_facts(f"in {cls.__name__} at {here()}") from None
        return made


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
        return active(self)

    def param(self, name: str, shape: Iterable[Any], init: str = "zeros", dtype: Any = None) -> Value:
        """A parameter of this layer, made by the named initializer: ``"normal(std=0.02)"``."""
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
