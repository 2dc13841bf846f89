"""The declaration of an operation: operands, attributes, rules, traits, and queries that need no graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from inspect import Parameter, Signature
from typing import Any

import numpy as np

from mithril.graph.attribute_types import NORMALIZERS, attribute_error, attributes_text, normalize_axes, normalize_axis
from mithril.graph.dims import Dim, Size, TensorType, symbols
from mithril.graph.dtypes import DEFAULT_FLOAT, DType, dtype as as_dtype, promote, promote_scalar, scalar_dtype
from mithril.graph.errors import DTypeError, MithrilError, OperationError, unknown

ShapeRule = Callable[..., Any]
DTypeRule = Callable[[Sequence[DType | None], Mapping[str, Any]], Any]
NOTHING = Parameter.empty
SCALARS = (bool, int, float)  # without NumPy's scalars, which have a dtype
# Other frameworks draw from a hidden generator, so users leave the key out; "key" means nothing else in an operation.
RANDOM_KEY = "a random key is self.key() in a layer, step.key() in train_step, a row of ops.split_key(key) elsewhere"


@dataclass(frozen=True, slots=True)
class Attribute:
    """A keyword of an operation; its annotation selects the accepted values."""

    name: str
    annotation: str
    default: Any = NOTHING


@dataclass(eq=False)
class Declaration:
    """The declared properties of an operation; ``Op`` adds calls and inference."""

    name: str
    operands: tuple[str, ...]  # names; for a variadic operation the one name of the sequence
    optional: frozenset[str]  # operands that may be None
    variadic: bool
    attributes: dict[str, Attribute]
    reference: Callable[..., Any]  # the reference implementation on NumPy arrays
    declared_at: str
    doc: str
    shape_rule: ShapeRule | None = None
    dtype_rule: DTypeRule | None = None
    infer_rule: Callable[..., tuple[TensorType, ...]] | None = None  # replaces the two rules above: ops with regions
    canonical_rule: Callable[..., dict[str, Any]] | None = None  # canonicalizes attributes; must be idempotent
    results: tuple[str, ...] = ("result",)  # () if the number depends on the attributes
    promotes: str | None = None  # "same": operands get a common dtype; "float": a common float dtype
    promoted: tuple[str, ...] | None = None  # the promoted operands; None means all
    elementwise: bool = False  # broadcasts, one result element per element
    commutative: bool = False
    composite: bool = False  # the reference is composed of other operations
    cost: Callable[..., Size] | float | None = None  # of a result element, or of a call; None if undeclared
    samples: Sequence[Any] = ()
    tolerance: float = 1.0  # factor on the tolerances of the conformance kit
    gradient: Callable[..., Any] | None = None
    gradient_reason: str = ""  # the reason why there is no gradient
    batching: Callable[..., Any] | None = None  # the vmap rule, if it does not follow from the axes
    region_gradient: Callable[..., Any] | None = None  # of an operation with regions
    surrogate: bool = False  # the gradient deliberately differs from the derivative of the reference
    opaque: bool = False  # must not be folded, merged or moved: barriers
    declared_axes: str | Callable[..., Any] | None = None  # the axes that share a loop
    no_axes: str = ""  # the reason why no axes are declared: the operation needs its full operands
    moves: bool = False  # result elements are operand elements or a constant: no arithmetic
    linear: str = ""  # operands in which it is linear: "x", jointly "a b", separately "a | b"
    precision: str | None = None  # "low", "follow" or "full" under mixed precision; None: derived
    random: bool = False  # the results are random numbers
    activation: str | None = None  # its name in layers that take an activation
    labels: str | None = None  # the operand that holds classes or tokens

    def __post_init__(self) -> None:
        self.samples = tuple(self.samples)
        self.__doc__ = f"{self.name}{self.__signature__}\n\n{self.doc}"  # for help() and for editors

    @property
    def __signature__(self) -> Signature:
        """The operands and attributes, for editors and ``inspect.signature``."""
        kind = Parameter.VAR_POSITIONAL if self.variadic else Parameter.POSITIONAL_OR_KEYWORD
        operands = [Parameter(n, kind, default=None if n in self.optional else NOTHING) for n in self.operands]
        attributes = [(a, {"default": a.default, "annotation": a.annotation}) for a in self.attributes.values()]
        return Signature([*operands, *(Parameter(a.name, Parameter.KEYWORD_ONLY, **more) for a, more in attributes)])

    @cached_property
    def defaults(self) -> dict[str, Any]:
        return {a.name: a.default for a in self.attributes.values() if a.default is not NOTHING}

    # -- operands ----------------------------------------------------------------------------------------------------
    def bind(self, operands: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Move operands passed by keyword to their positions, and name the attributes that follow the operands."""
        operands, following = self._split_positional(operands)
        if len(following) > len(self.attributes):
            names = [*self.operands, *self.attributes]
            raise OperationError(
                f"operation '{self.name}' takes {len(names)} arguments, got {len(operands) + len(following)}",
                facts=[f"arguments: {', '.join(names)}"],
            )
        positional = dict(zip(self.attributes, following, strict=False))
        twice = [*(positional.keys() & keywords.keys()), *(n for n in self.operands[: len(operands)] if n in keywords)]
        if twice:
            raise OperationError(f"operation '{self.name}' got the argument '{twice[0]}' twice")
        keywords = {**positional, **keywords}
        by_name = [] if self.variadic else [name for name in self.operands if name in keywords]
        if not by_name:
            return operands, keywords
        slots = list(operands) + [None] * (len(self.operands) - len(operands))
        for name in by_name:
            slots[self.operands.index(name)] = keywords.pop(name)
        return tuple(slots), keywords

    def _split_positional(self, arguments: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Return the operands and the attributes of a call's positional arguments."""
        if not self.variadic:
            return arguments[: len(self.operands)], arguments[len(self.operands) :]
        first, rest = (arguments[0], arguments[1:]) if arguments else (None, ())
        if isinstance(first, str):  # einsum("ij,jk->ik", x, y)
            return rest, (first,)
        # concat([x, y], 1), as in NumPy and PyTorch; further lists are arrays of numbers
        if isinstance(first, (list, tuple)) and all(isinstance(x, (int, str)) for x in rest):
            return tuple(first), rest
        return arguments, ()

    def all_operands(self, operands: Sequence[Any]) -> list[Any]:
        """Return the operands, with None for absent optional ones."""
        if self.variadic:
            return list(operands)
        missing = [n for n in self.operands[len(operands) :] if n not in self.optional]
        slots = [*operands, *([None] * (len(self.operands) - len(operands)))]
        missing += [n for n, o in zip(self.operands, operands, strict=False) if o is None and n not in self.optional]
        if missing or len(operands) > len(self.operands):
            raise OperationError(
                f"operation '{self.name}' takes {len(self.operands)} operands, got {len(operands)}",
                facts=[f"operands: {', '.join(self.operands)}", f"missing: {', '.join(missing)}" if missing else ""],
                hint=RANDOM_KEY if "key" in missing else "",
            )
        return slots

    def operand_name(self, k: int) -> str:
        return f"{self.operands[0]}[{k}]" if self.variadic else self.operands[k]

    def is_promoted(self, k: int) -> bool:
        return self.promoted is None or self.operands[k] in self.promoted

    def common_dtype(self, operands: Sequence[Any]) -> DType | None:
        """Return the common dtype of the promoted operands; Python scalars never upcast arrays."""
        if self.promotes is None:
            return None
        common: DType | None = None
        scalars = []
        for k, operand in enumerate(operands):
            if operand is None or not self.is_promoted(k):
                continue
            if type(operand) in SCALARS:
                scalars.append(operand)
            else:
                attribute = getattr(operand, "dtype", None)
                kind = attribute if isinstance(attribute, DType) else as_dtype(np.asarray(operand).dtype)
                common = kind if common is None or common is kind else promote(common, kind)
        for scalar in scalars:
            common = scalar_dtype(scalar) if common is None else promote_scalar(common, scalar)
        if self.promotes == "float" and common is not None and not common.is_float:
            return DEFAULT_FLOAT
        return common

    # -- attributes --------------------------------------------------------------------------------------------------
    def complete(self, attributes: Mapping[str, Any]) -> dict[str, Any]:
        """Return all attributes in declared order, checked and converted, including defaults."""
        if not attributes.keys() <= self.attributes.keys():
            extra = next(name for name in attributes if name not in self.attributes)
            accepted = [*self.attributes, *(() if self.variadic else self.operands)]
            message, facts, hint = unknown(f"attribute of '{self.name}'", extra, accepted)
            raise OperationError(message, facts=facts, hint=hint)
        out = {}
        for name, declared in self.attributes.items():
            if name in attributes:
                value = attributes[name]
                if value is not declared.default or not isinstance(value, (bool, str)):
                    try:
                        value = NORMALIZERS[declared.annotation](value)
                    except (TypeError, ValueError, AttributeError) as cause:
                        raise attribute_error(self.name, name, value, declared.annotation, cause) from None
                out[name] = value
            elif declared.default is NOTHING:
                raise OperationError(
                    f"operation '{self.name}' needs the attribute '{name}' ({declared.annotation})",
                    facts=[f"arguments: {', '.join([*self.operands, *self.attributes])}"],
                    hint=RANDOM_KEY if "key" in self.operands else "",
                )
            else:
                out[name] = declared.default
        return out

    @cached_property
    def _axis_names(self) -> tuple[tuple[str, str], ...]:
        return tuple(
            (a.name, a.annotation) for a in self.attributes.values() if a.annotation in ("Axis", "Axes", "Axis | None")
        )

    def require_canonical_axes(self, attributes: Mapping[str, Any]) -> None:
        """Raise if an axis of a node is negative: references and lowerings rely on the canonical form."""
        for name, _ in self._axis_names:
            value = attributes[name]
            axes = value if isinstance(value, tuple) else () if value is None else (value,)
            if any(isinstance(axis, int) and axis < 0 for axis in axes):
                raise OperationError(
                    f"attribute '{name}' of '{self.name}' is {value!r}, expected non-negative axes",
                    facts=["calling the operation converts negative axes; a Node must be built with converted ones"],
                )

    def canonical(self, types: Sequence[TensorType | None], attributes: dict[str, Any]) -> dict[str, Any]:
        """Resolve axes by the rank of the first operand, then apply the operation's ``canonical_rule``."""
        try:
            if self._axis_names and types and types[0] is not None:
                rank = types[0].rank
                for name, annotation in self._axis_names:
                    value = attributes[name]
                    if annotation == "Axes":
                        attributes[name] = normalize_axes(value, rank)
                    elif value is not None:
                        attributes[name] = normalize_axis(value, rank)
            rule = self.canonical_rule
            return attributes if rule is None else self._rule("canonical", rule, types, attributes)
        except MithrilError as error:
            raise error.with_facts(self.call_text(types, attributes)) from None

    # -- types -------------------------------------------------------------------------------------------------------
    def _by_rules(self, types: Sequence[TensorType | None], attributes: Mapping[str, Any]) -> tuple[TensorType, ...]:
        """Return the result types by the shape and dtype rules; errors of the rules name their declaration."""
        assert self.shape_rule is not None
        assert self.dtype_rule is not None
        shapes = self._rule("shape", self.shape_rule, *[None if t is None else t.shape for t in types], **attributes)
        dtypes = self._rule("dtype", self.dtype_rule, [None if t is None else t.dtype for t in types], attributes)
        if len(self.results) == 1:
            shapes, dtypes = (shapes,), (dtypes,)
        elif isinstance(dtypes, DType) and isinstance(shapes, (tuple, list)):
            dtypes = (dtypes,) * len(shapes)
        if not isinstance(shapes, (tuple, list)) or not all(map(_is_shape, shapes)):
            raise self._rule_error("shape", f"returned {_one(shapes)!r}, expected sizes (int or Dim) for each result")
        if not isinstance(dtypes, (tuple, list)) or not all(isinstance(d, DType) for d in dtypes):
            raise self._rule_error("dtype", f"returned {_one(dtypes)!r}, expected a DType for each result")
        if len(shapes) != len(dtypes) or (self.results and len(shapes) != len(self.results)):
            counts = f"{len(shapes)} shapes and {len(dtypes)} dtypes"
            raise self._rule_error("shape", f"returned {counts}, expected {len(self.results)} results")
        return tuple(TensorType(d, tuple(s)) for d, s in zip(dtypes, shapes, strict=True))

    def _rule(self, kind: str, rule: Callable[..., Any], /, *arguments: Any, **attributes: Any) -> Any:
        try:
            return rule(*arguments, **attributes)
        except (MithrilError, IndexError, TimeoutError):
            raise
        except Exception as cause:
            raise self._rule_error(kind, f"failed: {type(cause).__name__}: {cause}") from cause

    def _rule_error(self, kind: str, message: str) -> OperationError:
        part = kind if kind == "body" else f"{kind} rule"
        return OperationError(
            f"the {part} of operation '{self.name}' {message}", facts=[f"declared at {self.declared_at}"]
        )

    def _check_operands(self, types: Sequence[TensorType | None]) -> None:
        if not self.variadic:
            for name, t in zip(self.operands, types, strict=True):
                if t is None and name not in self.optional:
                    raise OperationError(f"operation '{self.name}' needs its operand '{name}'")
        if self.promotes is not None:
            kinds = {t.dtype for k, t in enumerate(types) if t is not None and self.is_promoted(k)}
            if len(kinds) > 1:
                raise DTypeError(f"operation '{self.name}' needs operands of one dtype", hint="insert a cast")
            if self.promotes == "float" and any(not kind.is_float for kind in kinds):
                raise DTypeError(f"operation '{self.name}' needs floating point operands", hint="insert a cast")

    def call_text(self, types: Sequence[TensorType | None], attributes: Mapping[str, Any]) -> str:
        """Format a call for messages: ``in name(x: f32[2, 3], axis=1)``."""
        parts = [f"{self.operand_name(k)}: {t}" for k, t in enumerate(types) if t is not None]
        shown = attributes_text(attributes, self.defaults)
        return f"in {self.name}({', '.join([*parts, shown] if shown else parts)})"

    def own_error(
        self, message: str, fact: str, types: Sequence[TensorType | None], attributes: Mapping[str, Any]
    ) -> OperationError:
        """Return an error for a mistake in the operation's declaration, not in the call."""
        return OperationError(
            f"the reference of operation '{self.name}' {message}",
            facts=[fact, self.call_text(types, attributes), f"declared at {self.declared_at}"],
        )


def _one(values: Any) -> Any:
    return values[0] if isinstance(values, tuple) and len(values) == 1 else values


def _is_shape(shape: Any) -> bool:
    return isinstance(shape, (tuple, list)) and all(
        isinstance(size, (int, np.integer, Dim)) and not isinstance(size, bool) for size in shape
    )


def limits_of(types: Sequence[TensorType | None]) -> tuple[tuple[str, int, int | None], ...]:
    """Return the bounds of the symbols in the types: inference depends on them, but equality of sizes does not."""
    for t in types:
        if t is not None and not t.is_static:
            sizes = [d for t in types if t is not None for d in t.shape]
            return tuple((s.name, s.low, s.high) for s in symbols(*sizes))
    return ()


__all__ = ["NOTHING", "Attribute", "Declaration"]
