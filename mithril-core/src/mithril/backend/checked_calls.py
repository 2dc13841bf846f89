"""Argument checks of public calls: errors name the invalid argument, similar names and a remedy."""

from __future__ import annotations

import functools
import inspect
from abc import ABCMeta
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar, Unpack, cast, get_origin, get_type_hints

from mithril.backend.annotations import mismatch as misfit
from mithril.graph import OptionError, closest, phrase_here

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
Mismatch = tuple[str, list[str], str | None]  # message, facts, hint


def mismatch(
    title: str,
    signature: inspect.Signature,
    args: Sequence[Any],
    options: Mapping[str, Any],
    *,
    extra: Sequence[str] = (),
    hints: Mapping[str, str] | None = None,
) -> Mismatch | None:
    """Return the mismatch between arguments and a signature (without ``self``), or None if they match.

    ``extra`` are additional keywords that the caller accepts; ``hints`` are remedies for keywords of other frameworks
    and, under ``"*"``, for too many positional arguments.
    """
    try:
        # Python decides first: the reasons below are needed for calls that fail only.
        signature.bind(*args, **{n: x for n, x in options.items() if n not in extra})
    except TypeError:
        pass
    else:
        return None
    parameters = signature.parameters.values()
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    keywords = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    accepted = [*keywords, *extra]
    several = [p.name for p in parameters if p.kind is p.VAR_POSITIONAL and p.name != "args"]
    facts = [f"accepted: {', '.join([*several, *accepted])}"]
    is_open = any(p.kind is p.VAR_KEYWORD for p in parameters)
    wrong = next((n for n in options if n not in accepted), None)
    if wrong in several:
        return f"{title} takes '{wrong}' by position", facts, f"write {title}(...) without '{wrong}='"
    if wrong is not None and not is_open:
        return f"{title} has no argument '{wrong}'", facts, _remedy(wrong, accepted, hints or {})
    if len(args) > len(positional) and not any(p.kind is p.VAR_POSITIONAL for p in parameters):
        surplus = ", ".join(_short(x) for x in args[len(positional) :])
        names = f" ({', '.join(positional)})" if positional else ""
        count = "1 argument" if len(positional) == 1 else f"{len(positional)} arguments"
        message = f"{title} takes {count} by position{names}, got {len(args)}, surplus: {surplus}"
        return message, facts, (hints or {}).get("*", "pass the others by name")
    twice = next((n for n in positional[: len(args)] if n in options), None)
    if twice is not None:
        value = _short(args[positional.index(twice)])
        hint = (hints or {}).get("*")
        return f"{title} got '{twice}' twice: {value} by position and {_short(options[twice])} by name", facts, hint
    missing = [p.name for p in parameters if _is_missing(p, positional[: len(args)], options)]
    return f"{title} requires '{missing[0] if missing else '?'}'", facts, None


def _is_missing(p: inspect.Parameter, by_position: Sequence[str], options: Mapping[str, Any]) -> bool:
    variadic = p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    return not variadic and p.default is p.empty and p.name not in by_position and p.name not in options


def _remedy(wrong: str, accepted: Sequence[str], hints: Mapping[str, str]) -> str | None:
    if wrong in hints:
        return hints[wrong]
    suggestions = closest(wrong, accepted, 1)
    return f"did you mean '{suggestions[0]}'?" if suggestions else None


def _short(value: Any) -> str:
    text = type(value).__name__ if hasattr(value, "shape") else repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def check_call(
    title: str,
    function: Callable[..., Any],
    args: Sequence[Any],
    options: Mapping[str, Any],
    hints: Mapping[str, str],
    *,
    types: bool = True,
    extra: Sequence[str] = (),
) -> None:
    """Raise OptionError unless the arguments match the signature of a function and, with ``types``, its annotations."""
    signature = _signature(function)
    if error := mismatch(title, signature, args, options, hints=hints, extra=extra):
        raise OptionError(error[0], facts=error[1], hint=error[2])
    if not types:
        return
    annotations = {n: a for n, a in _annotations(function).items() if get_origin(a) is not Unpack}
    for name, value in signature.bind(*args, **options).arguments.items():
        items: dict[str, Any] = {name: value}
        if (kind := signature.parameters[name].kind) is inspect.Parameter.VAR_POSITIONAL:
            items = {f"{name}[{k}]": item for k, item in enumerate(value)}
        elif kind is inspect.Parameter.VAR_KEYWORD:
            items = value
        for argument, item in items.items() if name in annotations else ():
            if wrong := misfit(item, annotations[name]):
                remedy = _unquoted(argument, item, annotations[name]) or hints.get(name)
                raise OptionError(f"{title}: {argument}: {wrong}", hint=remedy)


def reject_surplus(
    title: str,
    function: Callable[..., Any],
    args: Sequence[Any],
    options: Mapping[str, Any],
    hints: Mapping[str, str] | None = None,
) -> None:
    """Raise for surplus arguments of ``*args, **options``; cheaper in hot calls than a checking wrapper."""
    signature = _signature(function)
    explicit = [p for p in signature.parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if error := mismatch(title, signature.replace(parameters=explicit), args, options, hints=hints):
        raise OptionError(error[0], facts=error[1], hint=error[2])


def _unquoted(name: str, value: Any, annotation: Any) -> str | None:
    """Return the remedy for a number passed as a string."""
    for convert in (int, float):
        with suppress(TypeError, ValueError):
            if isinstance(value, str) and misfit(convert(value), annotation) is None:
                return f"write {name}={value}"
    return None


@functools.cache
def _signature(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a function, without ``self`` for a method."""
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())
    return signature.replace(parameters=parameters[1:]) if _is_method(function) else signature


def _is_method(function: Callable[..., Any]) -> bool:
    return next(iter(inspect.signature(function).parameters), "") in ("self", "cls")


@functools.cache
def _annotations(function: Callable[..., Any]) -> Mapping[str, Any]:
    """Return the annotations that resolve at run time, without names imported for type checkers only."""
    try:
        return get_type_hints(function, include_extras=True)
    except NameError:
        pass
    # One name that only type checkers import would otherwise leave all arguments unchecked.
    readable: dict[str, Any] = {}
    for name, text in function.__annotations__.items():
        with suppress(NameError):
            holder = type("_", (), {"__annotations__": {name: text}, "__module__": function.__module__})
            readable[name] = get_type_hints(holder, function.__globals__, include_extras=True)[name]
    return readable


def _nothing(self: Any) -> None:
    """Provide the signature of a class without a constructor."""


@functools.cache
def constructor(kind: Any) -> Callable[..., Any]:
    """Return ``__init__`` of a class, with the keywords of its bases as far as it forwards ``**options`` to them."""
    if kind.__init__ is object.__init__:
        return _nothing
    chain: list[Callable[..., Any]] = []
    for base in kind.__mro__[:-1]:
        if "__init__" in base.__dict__:
            chain.append(base.__dict__["__init__"])
            # A constructor without ``**options`` passes nothing on: keywords of its bases are not
            # accepted.
            if all(p.kind is not p.VAR_KEYWORD for p in inspect.signature(chain[-1]).parameters.values()):
                break
    if len(chain) < 2:
        return _with_self(kind.__init__)
    parameters: dict[str, inspect.Parameter] = {}
    annotations: dict[str, Any] = {}
    forwards = True  # whether positional arguments reach this constructor
    for function in chain:
        annotations = {**_annotations(function), **annotations}
        current = inspect.signature(_with_self(function)).parameters.values()
        for p in current:
            if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
                parameters.setdefault(p.name, p if forwards or p.name == "self" else p.replace(kind=p.KEYWORD_ONLY))
        several = [p for p in current if p.kind is p.VAR_POSITIONAL]
        forwards = forwards and bool(several)
    if forwards:
        parameters["*"] = several[0]
    ordered = sorted(parameters.values(), key=lambda p: (p.kind, p.default is not p.empty and p.kind < p.KEYWORD_ONLY))

    def merged(self: Any, **options: Any) -> None:
        """Provide the signature of all constructors in the chain."""

    return _described(merged, inspect.Signature(ordered), annotations)


def _with_self(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a constructor whose first parameter, the instance, is named ``self``."""
    signature = inspect.signature(function)
    first, *rest = signature.parameters.values()
    if first.name == "self" or first.kind is first.VAR_POSITIONAL:
        return function

    def renamed(self: Any, **options: Any) -> None:
        """Provide the signature of the constructor."""

    parameters = [first.replace(name="self"), *rest]
    return _described(renamed, signature.replace(parameters=parameters), _annotations(function))


def _described(
    function: Callable[..., Any], signature: inspect.Signature, annotations: Mapping[str, Any]
) -> Callable[..., Any]:
    """Return the function with another signature."""
    function.__signature__ = signature  # type: ignore[attr-defined]
    function.__annotations__ = dict(annotations)
    return function


def is_ours(kind: type) -> bool:
    """Whether a class belongs to this project, so that its annotations can be checked."""
    return kind.__module__.partition(".")[0].startswith("mithril")


class CheckedType(ABCMeta):
    """Metaclass of classes whose constructors raise OptionError for invalid arguments.

    ``argument_hints`` of the class maps arguments, and keywords of other frameworks, to remedies, ``elsewhere`` their
    methods. Only the annotations of this project's classes are checked. A class with abstract methods has no instances.
    """

    if not TYPE_CHECKING:  # type checkers know all attributes

        def __getattr__(cls, name: str) -> Any:
            instead = phrase_here(name, cls.elsewhere) if name != "elsewhere" and hasattr(cls, "elsewhere") else None
            text = f"type object '{cls.__name__}' has no attribute '{name}'{f'; use {instead}' if instead else ''}"
            raise AttributeError(text, name=name, obj=cls)

    @property
    def __signature__(cls) -> inspect.Signature:
        """The parameters of the constructor, for ``help`` and for editors."""
        return _signature(constructor(cls))

    def __call__(cls: type[T], *args: Any, **options: Any) -> T:
        kind: Any = cls  # type checkers read the class of the instance from ``type[T]``, which has no attributes
        if missing := sorted(kind.__abstractmethods__):
            names = ", ".join(missing)
            raise OptionError(f"{cls.__name__} is abstract", hint=f"define {names} in it or in a class derived from it")
        check_call(
            cls.__name__, constructor(kind), args, options, getattr(cls, "argument_hints", {}), types=is_ours(cls)
        )
        return cast("T", type.__call__(kind, *args, **options))


def checked(by_position: str = "pass the others by name", **hints: str) -> Callable[[F], F]:
    """Decorate a method or function so that invalid arguments raise OptionError.

    ``hints`` are remedies by argument, ``by_position`` the remedy for too many positional arguments.
    """
    remedies = {"*": by_position, **hints}

    def decorate(function: F) -> F:
        if _is_method(function):

            @functools.wraps(function)
            def call(self: Any, *args: Any, **options: Any) -> Any:
                check_call(f"{type(self).__name__}.{function.__name__}", function, args, options, remedies)
                return function(self, *args, **options)

        else:

            @functools.wraps(function)
            def call(*args: Any, **options: Any) -> Any:
                check_call(function.__name__, function, args, options, remedies)
                return function(*args, **options)

        return cast("F", call)

    return decorate
