"""Run-time checks of values against type annotations, and descriptions of annotations for messages."""

from __future__ import annotations

import numbers
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import EllipsisType, NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints, is_typeddict

from mithril.graph import OptionError, closest


@dataclass(frozen=True)
class Least:
    """A lower bound for a number: ``Annotated[int, Least(1)]``; ``open`` excludes the bound itself."""

    number: float
    open: bool = False

    def __str__(self) -> str:
        return f"above {self.number:g}" if self.open else f"of at least {self.number:g}"

    def holds(self, value: Any) -> bool:
        """Whether ``value`` is large enough."""
        return bool(value > self.number) if self.open else bool(value >= self.number)


# Annotation of an option: an integer of at least 1.
Positive = Annotated[int, Least(1)]
# Annotation of an option: one pattern of layer names, or several.
Layers = Annotated[str | Sequence[str], "patterns of layer names, each of which must match one"]


def mismatch(value: Any, annotation: Any) -> str | None:
    """Return the mismatch, for example ``"expected int, got 'x' (str)"``, or None if the value matches."""
    if _fits(value, annotation):
        return None
    origin, arguments = get_origin(annotation), get_args(annotation)
    if is_typeddict(annotation) and isinstance(value, Mapping):
        return _mapping_mismatch(value, get_type_hints(annotation))
    if origin in (Union, UnionType):
        containers = [a for a in arguments if _holds(value, a)]
        if len(containers) == 1:  # the container type matches, so report the mismatching item
            return mismatch(value, containers[0])
    elif _holds(value, annotation):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in items:
            key_type, item_type = arguments if len(arguments) == 2 else (Any, arguments[0])
            if wrong := mismatch(key, key_type) or mismatch(item, item_type):
                return f"at [{key!r}]: {wrong}"
    return f"expected {describe(annotation)}, got {_short(value)}"


def _mapping_mismatch(value: Mapping[Any, Any], keys: Mapping[str, Any]) -> str | None:
    for key, item in value.items():
        if key not in keys:
            suggestions = closest(str(key), keys)
            hint = f"did you mean '{suggestions[0]}'?" if suggestions else "known: " + ", ".join(keys)
            return f"unknown key {key!r}; {hint}"
        if wrong := mismatch(item, keys[key]):
            return f"at [{key!r}]: {wrong}"
    return None


def _holds(value: Any, annotation: Any) -> bool:
    """Whether ``value`` has the container type of ``annotation``, regardless of its items."""
    origin = get_origin(annotation)
    if not isinstance(origin, type) or not issubclass(origin, Collection) or isinstance(value, (str, bytes)):
        return False
    return isinstance(value, origin) and bool(get_args(annotation))


def _fits(value: Any, annotation: Any) -> bool:
    if annotation is Any:
        return True
    origin, arguments = get_origin(annotation), get_args(annotation)
    if is_typeddict(annotation):
        return isinstance(value, Mapping) and _mapping_mismatch(value, get_type_hints(annotation)) is None
    if origin is Annotated:
        limits = [a for a in arguments[1:] if isinstance(a, Least)]
        return _fits(value, arguments[0]) and all(limit.holds(value) for limit in limits)
    if origin in (Union, UnionType):
        return any(_fits(value, argument) for argument in arguments)
    if origin is Literal:
        return any(type(value) is type(choice) and value == choice for choice in arguments)
    if origin is Callable or annotation is Callable:
        return callable(value)
    if origin is not None:
        return _fits_container(value, origin, arguments)
    return _fits_class(value, annotation)


def _fits_container(value: Any, origin: Any, arguments: tuple[Any, ...]) -> bool:
    if not isinstance(value, origin) or isinstance(value, (str, bytes)):
        return False
    if issubclass(origin, Mapping):
        return all(_fits(k, arguments[0]) and _fits(v, arguments[1]) for k, v in value.items())
    if origin is tuple and arguments[-1] is not Ellipsis:
        return len(value) == len(arguments) and all(map(_fits, value, arguments))
    if issubclass(origin, Collection):
        return all(_fits(item, arguments[0]) for item in value)
    return True


def _fits_class(value: Any, annotation: Any) -> bool:
    if annotation is None or annotation is NoneType:
        return value is None
    if annotation in (int, float) and isinstance(value, bool):
        return False  # bool is a subclass of int, but num_threads=True is a mistake
    if annotation is int:
        return isinstance(value, numbers.Integral)
    if annotation is float:
        return isinstance(value, numbers.Real)
    return isinstance(value, annotation)


def _short(value: Any) -> str:
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"


def describe(annotation: Any) -> str:
    """Describe an annotation in words: ``"'low' or 'high'"``, ``"a mapping of str to int"``."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return " ".join([describe(arguments[0]), *(str(a) for a in arguments[1:] if isinstance(a, Least))])
    if origin in (Union, UnionType):
        return " or ".join(describe(argument) for argument in arguments)
    if origin is Literal:
        return " or ".join(map(repr, arguments))
    if origin is Callable or annotation is Callable:
        return "a function"
    if origin is os.PathLike or annotation is os.PathLike:
        return "a path"
    if is_typeddict(annotation):
        return "a dictionary of " + ", ".join(annotation.__annotations__)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return (
            "a mapping" if arguments[1] is Any else f"a mapping of {describe(arguments[0])} to {describe(arguments[1])}"
        )
    if origin is tuple and arguments[-1] is not Ellipsis:
        return "a tuple (" + ", ".join(map(describe, arguments)) + ")"
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return "a list" if arguments[0] is Any else f"a list of {describe(arguments[0])}"
    if annotation is Any:
        return "anything"
    if annotation is NoneType or annotation is None:
        return "None"
    if annotation is EllipsisType:
        return "..."
    return getattr(annotation, "__name__", str(annotation))


def matches(name: str, pattern: str) -> bool:
    """Whether a name equals the pattern (names may contain brackets) or matches it as in a shell."""
    return name == pattern or fnmatchcase(name, pattern)


def covers(pattern: str, path: str) -> bool:
    """Whether a pattern matches the path of a parameter or layer, or that of a layer around it."""
    parts = path.split(".")
    return any(matches(".".join(parts[: k + 1]), pattern) for k in range(len(parts)))


def require_match(where: str, kind: str, pattern: str, names: Iterable[str]) -> None:
    """Raise unless the pattern of option ``where`` covers one of the names; ``kind`` describes them."""
    candidates = sorted(n for n in names if n)
    if any(covers(pattern, name) for name in candidates):
        return
    suggestions = closest(pattern, candidates)
    listed = [*suggestions, *(n for n in candidates if n not in suggestions)][:12]
    raise OptionError(
        f"'{pattern}' in {where} matches no {kind}",
        facts=[f"the model has: {', '.join(listed) or 'none'}"],
        hint=f"did you mean '{suggestions[0]}'?" if suggestions else None,
    )
