"""Connections (symbolic tensors of a model) and steps (the layer applications that produce them)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from itertools import count
from typing import Any, Literal, Protocol, Self, cast

import numpy as np

from mithril.backend import checked
from mithril.compiler import declared_text, expanded
from mithril.graph import DType, ModelError, Op, Operators, closest, dtype as as_dtype, visible
from mithril.models.language.source_location import NOWHERE, SourceLocation, user_location
from mithril.models.language.symbolic_sizes import ShapeOf

_serial = count()
_WORDS = re.compile(r"(?<=[a-z0-9])(?=[A-Z][a-z])|(?<=[a-z])(?=[A-Z])")


class Wirable(Protocol):
    """The attributes of a layer that wiring uses."""

    name: str | None
    output_alias: bool
    tags: dict[str, Any]

    @property
    def standard(self) -> tuple[str, ...]: ...
    @property
    def implicit_names(self) -> Mapping[str, str]: ...
    @property
    def inputs(self) -> tuple[str, ...]: ...
    @property
    def optional(self) -> tuple[str, ...]: ...
    @property
    def weights(self) -> tuple[str, ...]: ...
    @property
    def outputs(self) -> tuple[str, ...]: ...
    @property
    def default_bindings(self) -> Mapping[str, Any]: ...
    def terminals(self) -> list[str]: ...


class Owner(Protocol):
    """The interface of a model that its connections and steps use."""

    def attach(self, step: Step) -> None: ...


class Unset(Enum):
    """Sentinel type; an enum member keeps its identity when copied or pickled."""

    NO_DEFAULT = "no default"


NO_DEFAULT: Unset = Unset.NO_DEFAULT


class Connection(Operators):
    """A symbolic tensor of a model: an input, or an output of a layer. Operations on it add layers.

    ``x + 1``, ``x @ w``, ``x[:, 0]``, ``x.sum(axis=1)``, ``x.reshape(x.shape[0], -1)``: every operation is also a
    method. ``model["name"]`` returns the connection of that name.
    """

    __slots__ = ("__weakref__", "alias", "key", "model", "name", "step", "terminal")

    def __init__(self, name: str = "", *, step: Step | None = None, terminal: str = "") -> None:
        self.name = name
        self.step = step  # the layer application that produces the connection; None for inputs
        self.terminal = terminal
        self.model: Owner | None = None
        self.alias: Connection | None = None  # the connection that replaced this one
        self.key: IOKey | None = None  # declared shape, dtype and role

    def __fingerprint__(self) -> tuple[Any, ...]:
        return ()  # the wiring is part of the flat model's fingerprint, as slots

    @property
    def origin(self) -> Connection:
        """The connection at the end of the chain of aliases."""
        origin = self
        while origin.alias is not None:
            origin = origin.alias
        return origin

    @property
    def label(self) -> str:
        """The name to use in messages."""
        if self.name:
            return self.name
        return f"{self.step.label}.{self.terminal}" if self.step is not None else "an unnamed input"

    @property
    def location(self) -> SourceLocation:
        if self.step is not None:
            return self.step.location
        key = self if isinstance(self, IOKey) else self.key
        return key.declared_at if key is not None else NOWHERE

    # -- as a tensor -------------------------------------------------------------------------------------------------
    @property
    def declared_shape(self) -> tuple[Any, ...] | None:
        origin = self.origin
        key = origin if isinstance(origin, IOKey) else origin.key
        return key.shape_declared if key is not None else None

    @property
    def shape(self) -> ShapeOf:
        """The symbolic shape. Its sizes can be indexed, computed with, and passed to other operations."""
        return ShapeOf(((self, slice(None)),))

    def __mithril_apply__(self, op: Op, operands: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
        from mithril.models.language.apply_op import apply

        return apply(op, operands, attributes)

    def __getitem__(self, index: Any) -> Self:
        from mithril.models.language.apply_op import apply_index

        return cast("Self", apply_index(self, index))

    def __repr__(self) -> str:
        producer = f" from {self.step.label}" if self.step is not None else ""
        return visible(f"<{type(self).__name__} '{self.label}'{producer}>")


class IOKey(Connection):
    """A declaration of a named input or output of a model.

    ``shape`` consists of ints, names, ``Dim``s, None (any size) and at most one ``...`` (any number of axes);
    ``trainable`` makes an input a parameter; ``expose`` makes a terminal an output of the model; an input with a
    ``default`` can be omitted in calls; ``sparse="csr"`` takes arrays of scipy.sparse in this format.
    """

    __slots__ = ("declared_at", "default", "dtype_declared", "expose", "init", "shape_declared", "sparse", "trainable")

    @checked()
    def __init__(
        self,
        name: str = "",
        *,
        shape: Sequence[Any] | None = None,
        dtype: Any = None,
        trainable: bool = False,
        expose: bool = False,
        default: Any = NO_DEFAULT,
        init: str = "",
        sparse: Literal["csr"] | None = None,
    ) -> None:
        super().__init__(name)
        self.shape_declared = None if shape is None else tuple(shape)
        self.dtype_declared: DType | None = None if dtype is None else as_dtype(dtype)
        self.trainable = trainable
        self.expose = expose
        self.default = default
        self.init = init
        self.sparse = sparse
        self.declared_at = user_location()
        if sparse is not None and trainable:
            raise ModelError(
                f"'{name}' cannot be both sparse and trainable: gradients of its zeros are not computed",
                facts=[f"declared at {self.declared_at}"],
                hint="declare it dense, or not trainable",
            )
        if self.shape_declared is not None:
            _check_shape(name, self.shape_declared, self.declared_at)

    def __fingerprint__(self) -> tuple[Any, ...]:
        declared = self.shape_declared, self.dtype_declared, self.trainable, self.default, self.init, self.sparse
        return (self.name, *declared)

    def merged(self, later: IOKey) -> IOKey:
        """Return one declaration that combines both; raise ModelError if they conflict."""
        shape = _merged_shape(self, later)
        if self.dtype_declared is not None and later.dtype_declared not in (None, self.dtype_declared):
            raise ModelError(
                f"'{self.name}' is declared with two dtypes",
                facts=[
                    f"{self.dtype_declared} at {self.declared_at}",
                    f"{later.dtype_declared} at {later.declared_at}",
                ],
            )
        merged = IOKey(self.name or later.name, trainable=self.trainable or later.trainable)
        merged.shape_declared = shape
        merged.dtype_declared = self.dtype_declared or later.dtype_declared
        merged.expose = self.expose or later.expose
        merged.default = self.default if later.default is NO_DEFAULT else later.default
        merged.init = later.init or self.init
        merged.sparse = later.sparse or self.sparse
        merged.declared_at = self.declared_at
        return merged


def _check_shape(name: str, shape: tuple[Any, ...], declared_at: SourceLocation) -> None:
    from mithril.graph import Dim

    for size in shape:
        if isinstance(size, bool) or not (size is None or size is ... or isinstance(size, (int, str, Dim))):
            raise ModelError(
                f"'{name}' cannot have the size {size!r}",
                facts=[
                    f"declared at {declared_at}",
                    "accepted: ints, names, ml.Dim(...), None for any size, ... for any axes",
                ],
            )
    if sum(size is ... for size in shape) > 1:
        raise ModelError(f"the shape of '{name}' has more than one ...", facts=[f"declared at {declared_at}"])


def _merged_shape(first: IOKey, later: IOKey) -> tuple[Any, ...] | None:
    a, b = first.shape_declared, later.shape_declared
    if a is None or b is None:
        return a if b is None else b
    places = [f"{declared_text(a)} at {first.declared_at}", f"{declared_text(b)} at {later.declared_at}"]
    if any(size is ... for size in a) and any(size is ... for size in b):
        if a == b:
            return a
        raise ModelError(
            f"'{first.name}' is declared with two shapes of unknown rank", facts=places, hint="declare one of them"
        )
    a, b = expanded(a, len(b)) or a, expanded(b, len(a)) or b
    fits = len(a) == len(b) and all(
        not (isinstance(m, int) and isinstance(n, int)) or m == n for m, n in zip(a, b, strict=True)
    )
    if not fits:
        raise ModelError(
            f"'{first.name}' is declared with two shapes",
            facts=places,
        )
    return tuple(n if m is None else m for m, n in zip(a, b, strict=True))


def snake_case(name: str) -> str:
    """Convert a class name to snake case: ``GlobalAvgPool2d`` becomes ``global_avg_pool2d``."""
    return _WORDS.sub("_", name).lower()


def _renaming(layer: Wirable, terminal: str) -> str | None:
    """Return the hint for a parameter of ``build`` that is not the name of its terminal."""
    code = getattr(getattr(type(layer), "build", None), "__code__", None)
    if code is None or code.co_varnames[1 : code.co_argcount] != (terminal,):
        return None
    return f"'{terminal}' of build is the input '{layer.inputs[0]}'; inputs = ({terminal!r},) in the class renames it"


class Connections(tuple[Connection, ...]):
    """The outputs of a layer with more than one output."""

    __slots__ = ()


class Constant:
    """A number or array passed in place of a connection."""

    __slots__ = ("data",)

    def __init__(self, data: Any) -> None:
        self.data = data


class Step:
    """One application of a layer: the sources of its inputs, and the connections of its outputs."""

    __slots__ = ("bindings", "layer", "location", "membership", "model", "name", "requested", "results", "serial")

    def __init__(
        self, layer: Wirable, args: tuple[Any, ...], bindings: dict[str, Any], location: SourceLocation
    ) -> None:
        self.layer = layer
        self.location = location
        self.name = ""
        self.serial = next(_serial)
        self.model: Owner | None = None
        self.membership: Connection | None = None  # the operand whose model it joined
        self.bindings: dict[str, Any] = dict(layer.default_bindings)
        self.requested: dict[str, Any] = {}  # output terminal -> name or IOKey
        self._bind(args, bindings)
        terminals = [*layer.outputs, *(t for t in self.requested if t not in layer.outputs)]
        self.results = {t: Connection(self._requested_name(t), step=self, terminal=t) for t in terminals}

    @property
    def label(self) -> str:
        return self.name or self.layer.name or snake_case(type(self.layer).__name__)

    def _requested_name(self, terminal: str) -> str:
        requested = self.requested.get(terminal, "")
        return requested if isinstance(requested, str) else requested.name

    def _bind(self, args: tuple[Any, ...], bindings: dict[str, Any]) -> None:
        layer = self.layer
        inputs = layer.inputs + layer.optional
        if len(args) > len(inputs):
            raise self._error(
                f"{layer!r} takes {len(inputs)} input{'s' * (len(inputs) != 1)}, got {len(args)}",
                [f"inputs: {', '.join(inputs)}"],
            )
        for terminal, argument in zip(inputs, args, strict=False):
            if argument is not None:
                self.bindings[terminal] = self._checked(terminal, argument)
        outputs = layer.outputs
        for terminal, argument in bindings.items():
            if terminal in inputs or terminal in layer.weights:
                if terminal in inputs[: len(args)]:
                    raise self._error(f"{layer!r} got its input '{terminal}' twice", [])
                if argument is not None:
                    self.bindings[terminal] = self._checked(terminal, argument)
            elif terminal in outputs:
                self.requested[terminal] = self._checked_output(terminal, argument)
            elif terminal == "output" and layer.output_alias:
                self.requested[outputs[0]] = self._checked_output(terminal, argument)
            elif terminal in layer.terminals():
                self.requested[terminal] = self._checked_output(terminal, argument)
            else:
                terminals = layer.terminals()
                suggestions = closest(terminal, terminals, 1)
                raise self._error(
                    f"{layer!r} has no terminal '{terminal}'",
                    [f"terminals: {', '.join(terminals)}"],
                    f"did you mean '{suggestions[0]}'?" if suggestions else _renaming(layer, terminal),
                )

    def _checked(self, terminal: str, argument: Any) -> Any:
        if isinstance(argument, (str, Connection, Constant)):
            return argument
        if isinstance(argument, (bool, int, float, np.ndarray, np.generic, list)):
            return Constant(argument)
        if isinstance(argument, Connections):
            names = ", ".join(c.terminal for c in argument)
            raise self._error(
                f"input '{terminal}' of {self.layer!r} got {len(argument)} connections",
                [f"'{argument[0].step.label if argument[0].step else ''}' has the outputs {names}"],
                "select one of them: y, *rest = layer(x)",
            )
        raise self._error(
            f"input '{terminal}' of {self.layer!r} cannot be a {type(argument).__name__}",
            ["accepted: a name, a connection, an IOKey, a number, a NumPy array"],
        )

    def _checked_output(self, terminal: str, argument: Any) -> Any:
        if isinstance(argument, (str, IOKey)):
            return argument
        raise self._error(
            f"output '{terminal}' of {self.layer!r} cannot be a {type(argument).__name__}",
            ["accepted: a name, an IOKey"],
        )

    def _error(self, message: str, facts: list[str], hint: str | None = None) -> ModelError:
        return ModelError(message, facts=[f"at {self.location}", *facts], hint=hint)

    @classmethod
    def restored(cls, layer: Wirable, name: str, model: Owner, location: SourceLocation) -> Step:
        """Return a step of a saved model, whose connections are still to be set."""
        step = object.__new__(cls)
        step.layer, step.name, step.model, step.location, step.serial = layer, name, model, location, next(_serial)
        step.membership, step.bindings, step.requested, step.results = None, {}, {}, {}
        return step

    def sources(self) -> Iterable[Connection]:
        """Return the connections among the bindings."""
        return (b for b in self.bindings.values() if isinstance(b, Connection))

    def reason_of_model(self) -> list[str]:
        """Return the fact that an operand put the step into its model, if one did."""
        if self.membership is None:
            return []
        return [f"it reads '{self.membership.label}' of that model, created at {self.membership.location}"]

    def attach_to_model(self) -> None:
        """Add the step to the model that one of its inputs already belongs to, if any.

        An IOKey that declares an input says nothing about the model: others may declare theirs by the same one.
        """
        for source in self.sources():
            model = source.origin.model
            if model is not None and not (isinstance(source, IOKey) and source.origin.step is None):
                self.membership = source
                model.attach(self)
                return
