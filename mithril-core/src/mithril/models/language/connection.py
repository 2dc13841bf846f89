"""Connections, the tensors of a model that is being wired, and steps, the layer applications that produce them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from itertools import count
from typing import Any, ClassVar, Protocol

import numpy as np

from mithril.backend import checked
from mithril.base import DType, ModelError, Operators, closest, dtype as as_dtype, operation
from mithril.ir import Op
from mithril.models.language.source_location import NOWHERE, Place, here
from mithril.models.language.symbolic_sizes import ShapeOf

_serial = count()
_WORDS = re.compile(r"(?<=[a-z0-9])(?=[A-Z][a-z])|(?<=[a-z])(?=[A-Z])")


class Wirable(Protocol):
    """The part of a layer that wiring reads."""

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
    """A model, as its connections and steps know it."""

    def adopt(self, step: Step) -> None: ...


class _Nothing(Enum):
    """An enum's member stays itself when copied or pickled."""

    NO_DEFAULT = "no default"


NO_DEFAULT = _Nothing.NO_DEFAULT


class Connection(Operators):
    """One tensor of a model: an input, or what a layer gives. Operations on it make layers.

    ``x + 1``, ``x @ w``, ``x[:, 0]``, ``x.sum(axis=1)``, ``x.reshape(x.shape[0], -1)``: every operation is also a
    method. A connection is found again under its name with ``model["name"]``.
    """

    __slots__ = ("__weakref__", "alias", "key", "model", "name", "step", "terminal")
    # Operations and indexing on connections; filled by ``apply_op``.
    _apply: ClassVar[Callable[[Any, Sequence[Any], Mapping[str, Any]], Any]]
    _index: ClassVar[Callable[[Connection, Any], Any]]

    def __init__(self, name: str = "", *, step: Step | None = None, terminal: str = "") -> None:
        self.name = name
        self.step = step  # the layer application that makes it; None for inputs
        self.terminal = terminal
        self.model: Owner | None = None
        self.alias: Connection | None = None  # what it turned out to be
        self.key: IOKey | None = None  # what was declared of it

    def __fingerprint__(self) -> tuple[Any, ...]:
        return ()  # its identity is enough: the wiring is in the slots of the flat model

    @property
    def origin(self) -> Connection:
        """The connection this one stands for."""
        found = self
        while found.alias is not None:
            found = found.alias
        return found

    @property
    def label(self) -> str:
        """A name for messages."""
        if self.name:
            return self.name
        return f"{self.step.label}.{self.terminal}" if self.step is not None else "an unnamed input"

    @property
    def place(self) -> Place:
        if self.step is not None:
            return self.step.place
        key = self if isinstance(self, IOKey) else self.key
        return key.made if key is not None else NOWHERE

    # -- as a tensor -------------------------------------------------------------------------------------------------
    @property
    def declared_shape(self) -> tuple[Any, ...] | None:
        origin = self.origin
        key = origin if isinstance(origin, IOKey) else origin.key
        return key.shape_declared if key is not None else None

    @property
    def shape(self) -> ShapeOf:
        """The shape as far as it is known: index it, compute with its sizes, give them to other operations."""
        return ShapeOf(((self, slice(None)),))

    def __mithril_apply__(self, op: Op, operands: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
        return Connection._apply(op, operands, attributes)

    def __getitem__(self, index: Any) -> Any:
        return Connection._index(self, index)

    def __eq__(self, other: object) -> Any:
        return self is other if other is None else operation("equal")(self, other)

    def __ne__(self, other: object) -> Any:
        return self is not other if other is None else operation("not_equal")(self, other)

    __hash__ = object.__hash__

    def __repr__(self) -> str:
        made = f" from {self.step.label}" if self.step is not None else ""
        return f"<{type(self).__name__} '{self.label}'{made}>"


class IOKey(Connection):
    """A named input or output of a model and what is declared of it.

    ``shape`` may hold numbers, names, ``Dim``s and None; ``trainable`` makes an input a parameter; ``expose`` makes a
    terminal an output of the model; an input with a ``default`` need not be given.
    """

    __slots__ = ("default", "dtype_declared", "expose", "init", "made", "shape_declared", "trainable")

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
    ) -> None:
        super().__init__(name)
        self.shape_declared = None if shape is None else tuple(shape)
        self.dtype_declared: DType | None = None if dtype is None else as_dtype(dtype)
        self.trainable = trainable
        self.expose = expose
        self.default = default
        self.init = init
        self.made = here()
        if self.shape_declared is not None:
            _check_shape(name, self.shape_declared, self.made)

    def __fingerprint__(self) -> tuple[Any, ...]:
        return (self.name, self.shape_declared, self.dtype_declared, self.trainable, self.default, self.init)

    def merged(self, later: IOKey) -> IOKey:
        """Both declarations together; a disagreement is an error."""
        shape = _merged_shape(self, later)
        if self.dtype_declared is not None and later.dtype_declared not in (None, self.dtype_declared):
            raise ModelError(
                f"'{self.name}' is declared with two dtypes",
                facts=[f"{self.dtype_declared} at {self.made}", f"{later.dtype_declared} at {later.made}"],
            )
        both = IOKey(self.name or later.name, trainable=self.trainable or later.trainable)
        both.shape_declared = shape
        both.dtype_declared = self.dtype_declared or later.dtype_declared
        both.expose = self.expose or later.expose
        both.default = self.default if later.default is NO_DEFAULT else later.default
        both.init = later.init or self.init
        both.made = self.made
        return both


def _check_shape(name: str, shape: tuple[Any, ...], made: Place) -> None:
    from mithril.base import Dim

    for size in shape:
        if isinstance(size, bool) or not (size is None or isinstance(size, (int, str, Dim))):
            raise ModelError(
                f"'{name}' cannot have the size {size!r}",
                facts=[f"declared at {made}", "accepted: numbers, names, ml.Dim(...) and None for any size"],
            )


def _merged_shape(first: IOKey, later: IOKey) -> tuple[Any, ...] | None:
    a, b = first.shape_declared, later.shape_declared
    if a is None or b is None:
        return a if b is None else b
    fits = len(a) == len(b) and all(
        not (isinstance(m, int) and isinstance(n, int)) or m == n for m, n in zip(a, b, strict=True)
    )
    if not fits:
        raise ModelError(
            f"'{first.name}' is declared with two shapes",
            facts=[f"{list(a)} at {first.made}", f"{list(b)} at {later.made}"],
        )
    return tuple(n if m is None else m for m, n in zip(a, b, strict=True))


def snake_case(name: str) -> str:
    """``GlobalAvgPool2d`` as ``global_avg_pool2d``."""
    return _WORDS.sub("_", name).lower()


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

    def __init__(self, layer: Wirable, args: tuple[Any, ...], bindings: dict[str, Any], place: Place) -> None:
        self.layer = layer
        self.place = place
        self.name = ""
        self.serial = next(_serial)
        self.model: Owner | None = None
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
