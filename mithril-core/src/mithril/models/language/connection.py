"""Connections: the tensors of a model that is being wired, before anything is known of their shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any

from mithril.base.dtypes import dtype as as_dtype
from mithril.base.errors import ModelError, OperationError
from mithril.base.registry import operation
from mithril.ir.operator_overloads import Operators
from mithril.models.language.source_location import NOWHERE, Place, here
from mithril.models.language.symbolic_sizes import ShapeOf

if TYPE_CHECKING:
    from mithril.base.dtypes import DType
    from mithril.models.language.layer import Step
    from mithril.models.language.model import Model


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

    def __init__(self, name: str = "", *, step: Step | None = None, terminal: str = "") -> None:
        self.name = name
        self.step = step  # the layer application that makes it; None for inputs
        self.terminal = terminal
        self.model: Model | None = None
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

    def __mithril_apply__(self, op: Any, operands: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
        from mithril.models.language.apply_op import apply

        return apply(op, operands, attributes)

    def __getitem__(self, index: Any) -> Any:
        from mithril.models.language.apply_op import apply_index

        return apply_index(self, index)

    def __eq__(self, other: object) -> Any:
        return self is other if other is None else operation("equal")(self, other)

    def __ne__(self, other: object) -> Any:
        return self is not other if other is None else operation("not_equal")(self, other)

    __hash__ = object.__hash__

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            op = operation(name)
        except OperationError as error:
            raise AttributeError(str(error)) from None

        def method(*operands: Any, **attributes: Any) -> Any:
            return op(self, *operands, **attributes)

        return method

    def reshape(self, *shape: Any) -> Any:
        """The same elements in another shape; one size may be -1."""
        return operation("reshape")(self, shape=_unpacked(shape))

    def transpose(self, *perm: Any) -> Any:
        """Axes in another order; without arguments, reversed."""
        return operation("transpose")(self, perm=_unpacked(perm) or None)

    @property
    def T(self) -> Any:
        return self.transpose()

    def sum(self, axis: Any = None, keepdims: bool = False) -> Any:
        return operation("sum")(self, axis=axis, keepdims=keepdims)

    def mean(self, axis: Any = None, keepdims: bool = False) -> Any:
        return operation("mean")(self, axis=axis, keepdims=keepdims)

    def max(self, axis: Any = None, keepdims: bool = False) -> Any:
        return operation("max")(self, axis=axis, keepdims=keepdims)

    def min(self, axis: Any = None, keepdims: bool = False) -> Any:
        return operation("min")(self, axis=axis, keepdims=keepdims)

    def prod(self, axis: Any = None, keepdims: bool = False) -> Any:
        return operation("prod")(self, axis=axis, keepdims=keepdims)

    def var(self, axis: Any = None, keepdims: bool = False, ddof: int = 0) -> Any:
        return operation("var")(self, axis=axis, keepdims=keepdims, ddof=ddof)

    def astype(self, dtype: Any) -> Any:
        """The same elements in another dtype."""
        return operation("cast")(self, dtype=dtype)

    def __repr__(self) -> str:
        made = f" from {self.step.label}" if self.step is not None else ""
        return f"<{type(self).__name__} '{self.label}'{made}>"


class IOKey(Connection):
    """A named input or output of a model and what is declared of it.

    ``shape`` may hold numbers, names, ``Dim``s and None; ``trainable`` makes an input a parameter; ``expose`` makes a
    terminal an output of the model; an input with a ``default`` need not be given.
    """

    __slots__ = ("default", "dtype_declared", "expose", "init", "made", "shape_declared", "trainable")

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
    from mithril.base.dims import Dim

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


def _unpacked(sizes: tuple[Any, ...]) -> Any:
    """``f(2, 3)`` and ``f((2, 3))`` mean the same."""
    if len(sizes) == 1 and isinstance(sizes[0], (tuple, list, ShapeOf)):
        return sizes[0]
    return sizes
