"""Calls whose arguments do not fit the signature: errors that name the argument, the nearest name and the remedy."""

from __future__ import annotations

import functools
import inspect
from abc import ABCMeta
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mithril.base.errors import OptionError, closest

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
    """Describe why arguments do not fit a signature (without ``self``), or None if they do.

    ``extra`` are further keywords that the caller takes; ``hints`` are remedies for keywords of other frameworks.
    """
    try:
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
    if wrong is not None and not is_open:
        return f"{title} has no argument '{wrong}'", facts, _remedy(wrong, accepted, hints or {})
    if len(args) > len(positional) and not any(p.kind is p.VAR_POSITIONAL for p in parameters):
        surplus = ", ".join(_short(x) for x in args[len(positional) :])
        names = f" ({', '.join(positional)})" if positional else ""
        count = "1 argument" if len(positional) == 1 else f"{len(positional)} arguments"
        message = f"{title} takes {count} by position{names}, got {len(args)}: {surplus} is too much"
        return message, facts, "write the others by name"
    twice = next((n for n in positional[: len(args)] if n in options), None)
    if twice is not None:
        value = _short(args[positional.index(twice)])
        hint = (hints or {}).get(twice)
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


class CheckedType(ABCMeta):
    """Metaclass of classes whose constructors report wrong arguments as OptionError.

    ``argument_hints`` of the class maps keywords of other frameworks to remedies.
    """

    def __call__(cls, *args: Any, **options: Any) -> Any:
        try:
            return super().__call__(*args, **options)
        except TypeError:
            signature = inspect.signature(cls.__init__)
            bound = signature.replace(parameters=list(signature.parameters.values())[1:])
            error = mismatch(cls.__name__, bound, args, options, hints=getattr(cls, "argument_hints", None))
            if error is None:
                raise
            raise OptionError(error[0], facts=error[1], hint=error[2]) from None


def checked(**hints: str) -> Callable[[Callable[..., Any]], Any]:
    """Decorate a method so that wrong arguments raise OptionError; ``hints`` are remedies by keyword."""

    def decorate(function: Callable[..., Any]) -> Any:
        signature = inspect.signature(function)
        bound = signature.replace(parameters=list(signature.parameters.values())[1:])

        @functools.wraps(function)
        def call(self: Any, *args: Any, **options: Any) -> Any:
            try:
                return function(self, *args, **options)
            except TypeError:
                title = f"{type(self).__name__}.{function.__name__}"
                error = mismatch(title, bound, args, options, hints=hints)
                if error is None:
                    raise
                raise OptionError(error[0], facts=error[1], hint=error[2]) from None

        return call

    return decorate
