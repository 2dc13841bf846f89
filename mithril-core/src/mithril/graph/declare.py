"""Declaration of operations: ``@op``, ``@composite``, and ``unary`` and ``binary`` for tables of element-wise ones."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from types import NoneType, UnionType
from typing import Any, TypedDict, Union, Unpack, get_args, get_origin

from mithril.graph.attribute_types import NORMALIZERS
from mithril.graph.axes_notation import parse_axes
from mithril.graph.core import Op
from mithril.graph.declaration import NOTHING, Attribute
from mithril.graph.errors import OperationError
from mithril.graph.registry import register
from mithril.graph.type_rules import broadcast, floating, like


class Facts(TypedDict, total=False):
    """Facts that every kind of declaration may give; ``Declaration`` describes them."""

    samples: Sequence[Any]
    tolerance: float
    moves: bool
    linear: str
    precision: str | None
    activation: str | None


class CallFacts(Facts, total=False):
    """Facts of operations whose operands and attributes are those of a function."""

    results: tuple[str, ...]
    promotes: str | None
    promoted: tuple[str, ...] | None
    random: bool
    labels: str | None


def _read(
    function: Callable[..., Any], name: str
) -> tuple[tuple[str, ...], frozenset[str], bool, dict[str, Attribute]]:
    """Return operands, optional operands, whether it is variadic, and attributes of a signature."""
    operands: list[str] = []
    optional: set[str] = set()
    attributes: dict[str, Attribute] = {}
    variadic = False
    for p in inspect.signature(function).parameters.values():
        if p.kind is p.VAR_POSITIONAL:
            variadic = True
            operands.append(p.name)
        elif p.kind is p.KEYWORD_ONLY:
            if p.name == "regions":
                continue
            is_bare = p.annotation is p.empty  # then the default tells the type
            annotation = type(p.default).__name__ if is_bare else _annotation_text(p.annotation)
            if annotation not in NORMALIZERS:
                problem = "needs an annotation" if is_bare else f"is annotated '{annotation}'"
                raise OperationError(
                    f"operation '{name}': attribute '{p.name}' {problem}",
                    facts=["known: " + ", ".join(NORMALIZERS)],
                    hint=f"write {p.name}: float"
                    if is_bare
                    else "declare operations in files with 'from __future__ import annotations'",
                )
            default = NOTHING if p.default is p.empty else p.default
            attributes[p.name] = Attribute(p.name, annotation, default)
        elif p.kind is p.VAR_KEYWORD:
            raise OperationError(f"operation '{name}': attributes must be named, not **{p.name}")
        else:
            operands.append(p.name)
            if p.default is None:
                optional.add(p.name)
            elif p.default is not p.empty:
                raise OperationError(
                    f"operation '{name}': operand '{p.name}' has the default {p.default!r}; it may only be None",
                    hint=f"write *, {p.name}={p.default!r} for an attribute",
                )
    for attribute in attributes.values():
        if attribute.default is not NOTHING:
            canonical = NORMALIZERS[attribute.annotation](attribute.default)
            attributes[attribute.name] = Attribute(attribute.name, attribute.annotation, canonical)
    return tuple(operands), frozenset(optional), variadic, attributes


def _annotation_text(annotation: Any) -> str:
    """Return an annotation as text, also if Python has evaluated it (no ``from __future__ import annotations``)."""
    if isinstance(annotation, str):
        return annotation
    if isinstance(annotation, UnionType) or get_origin(annotation) is Union:
        return " | ".join("None" if a is NoneType else _annotation_text(a) for a in get_args(annotation))
    if get_origin(annotation) is not None:
        return str(annotation)
    return str(getattr(annotation, "__name__", annotation))


def _place(depth: int = 2) -> str:
    frame = sys._getframe(depth)
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _check_axes(called: str, axes: Any, function: Callable[..., Any], place: str) -> None:
    """Check the axes at declaration, so that errors point to it."""
    if not isinstance(axes, str):
        return
    try:
        declaration = parse_axes(axes)
    except OperationError as error:
        raise error.with_facts(f"operation '{called}' at {place}") from None
    operands, _, variadic, attributes = _read(function, called)
    factors = {n for term in (*declaration.operands, *declaration.results) for a in term for n in a.names}
    unknown_names = declaration.attributes - set(attributes) - factors
    unknown_names |= {c.operand for c in declaration.clauses if c.operand} - set(operands)
    if unknown_names:
        raise OperationError(
            f"axes '{axes}' of operation '{called}' name '{min(unknown_names)}', which is not an attribute or operand",
            facts=[f"operands: {', '.join(operands)}", f"attributes: {', '.join(attributes)}", place],
        )
    if not variadic and len(declaration.operands) != len(operands):
        raise OperationError(
            f"axes '{axes}' describe {len(declaration.operands)} operands, operation '{called}' has {len(operands)}",
            facts=[f"operands: {', '.join(operands)}", place],
        )


def _declare(
    function: Callable[..., Any],
    name: str | None,
    place: str,
    axes: str | Callable[..., Any] | None,
    facts: CallFacts,
    **rules: Any,
) -> Op:
    """Register the operation that a function declares by its signature and docstring."""
    called = name or function.__name__
    _check_axes(called, axes, function, place)
    doc = inspect.cleandoc(function.__doc__ or "") or f"Operation '{called}', without a docstring."
    declared = Op(called, *_read(function, called), function, place, doc, declared_axes=axes, **rules, **facts)
    register(declared)
    return declared


def op(
    function: Callable[..., Any] | None = None,
    *,
    shape: Callable[..., Any] | None = None,
    dtype: Callable[..., Any] | None = None,
    infer: Callable[..., Any] | None = None,
    canonical: Callable[..., dict[str, Any]] | None = None,
    flops: Callable[..., Any] | float | None = None,
    name: str | None = None,
    opaque: bool = False,
    axes: str | Callable[..., Any] | None = None,
    no_axes: str = "",
    **facts: Unpack[CallFacts],
) -> Callable[[Callable[..., Any]], Op]:
    """Declare a primitive: the decorated function names it and is its reference implementation on NumPy arrays.

    Positional parameters are operands (optional if their default is None), keyword-only parameters are attributes.
    ``flops`` is the number of floating-point operations per element of the result, or a function of types, result types
    and attributes. Undeclared, it is the sum over the body of a composite, that of a product by its axes, else one.
    ``canonical(types, attributes)`` canonicalizes attributes, for example a ``-1`` in a shape, before any other use.
    Declare the gradient afterwards with ``@name.vjp`` or ``name.no_vjp("reason")``.

    ``@op(shape=broadcast, dtype=floating)``, with rules of ``mithril.graph``, declares an element-wise operation, and
    ``vjp(g, y, x)`` returns a tuple with the cotangent of each operand.
    """
    place = _place()
    if function is not None:
        called = name or getattr(function, "__name__", str(function))
        raise OperationError(
            f"@op of '{called}' needs a shape rule and a dtype rule",
            facts=[place, "rules of mithril.graph: broadcast, like, floating, always(dtype)"],
            hint="write @op(shape=broadcast, dtype=floating), or @composite for a function of other operations",
        )
    rules = {"shape_rule": shape, "dtype_rule": dtype, "infer_rule": infer, "canonical_rule": canonical, "cost": flops}

    def declare(function: Callable[..., Any]) -> Op:
        if infer is None and (shape is None or dtype is None):
            called = name or function.__name__
            raise OperationError(f"operation '{called}' needs a shape rule and a dtype rule", facts=[place])
        return _declare(function, name, place, axes, facts, opaque=opaque, no_axes=no_axes, **rules)

    return declare


def composite(
    function: Callable[..., Any] | None = None,
    *,
    name: str | None = None,
    canonical: Callable[..., dict[str, Any]] | None = None,
    flops: Callable[..., Any] | float | None = None,
    elementwise: bool = False,
    axes: str | Callable[..., Any] | None = None,
    **facts: Unpack[CallFacts],
) -> Callable[..., Any]:
    """Declare an operation composed of others; shape, dtype, gradient and reference follow from the body."""
    place = _place()
    rules = {"composite": True, "canonical_rule": canonical, "cost": flops, "elementwise": elementwise}

    def declare(body: Callable[..., Any]) -> Op:
        return _declare(body, name, place, axes, facts, **rules)

    return declare if function is None else declare(function)


def _elementwise(
    name: str,
    operands: tuple[str, ...],
    reference: Callable[..., Any],
    place: str,
    doc: str,
    facts: Facts,
    **rules: Any,
) -> Op:
    """Register an element-wise operation without attributes."""
    rules |= {"shape_rule": broadcast, "elementwise": True, **facts}
    declared = Op(name, operands, frozenset(), False, {}, reference, place, doc, **rules)
    register(declared)
    return declared


def unary(
    name: str,
    reference: Callable[..., Any],
    doc: str,
    *,
    dtype: Callable[..., Any] = floating,
    flops: float = 1.0,
    vjp: Callable[..., Any] | None = None,
    no_vjp: str = "",
    **facts: Unpack[Facts],
) -> Op:
    """Declare an element-wise operation of one operand; ``vjp(g, y, x)`` returns the cotangent of x."""
    promotes = "float" if dtype is floating else "same"
    rules = {"dtype_rule": dtype, "promotes": promotes, "cost": flops, "gradient": vjp, "gradient_reason": no_vjp}
    return _elementwise(name, ("x",), reference, _place(), doc, facts, **rules)


def binary(
    name: str,
    reference: Callable[..., Any],
    doc: str,
    *,
    dtype: Callable[..., Any] = like,
    flops: float = 1.0,
    commutative: bool = False,
    promotes: str = "same",
    vjp: Callable[..., Any] | None = None,
    no_vjp: str = "",
    **facts: Unpack[Facts],
) -> Op:
    """Declare a broadcasting operation of two operands; ``vjp(g, y, a, b)`` returns both cotangents.

    Cotangents may have the shape of the result: they are summed over the broadcast axes afterwards.
    """
    rules = {"dtype_rule": dtype, "promotes": promotes, "cost": flops, "gradient": vjp, "gradient_reason": no_vjp}
    return _elementwise(name, ("a", "b"), reference, _place(), doc, facts, commutative=commutative, **rules)
