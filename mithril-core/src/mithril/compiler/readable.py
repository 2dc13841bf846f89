"""Options whose values a function reads: a mistake is an error before the first program is compiled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from mithril.backend import mismatch


@dataclass(frozen=True)
class Readable:
    """Values that a function reads without an error: ``Annotated[float | str, Readable(parse_bytes)]``."""

    read: Callable[[Any], Any]


def read_value(value: Any, annotation: Any) -> None:
    """Call the functions of ``Readable`` on a value that matches the annotation; they raise the error of a mistake."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        read_value(value, next(argument for argument in arguments if mismatch(value, argument) is None))
    elif origin is Annotated:
        for note in arguments[1:]:
            if isinstance(note, Readable):
                note.read(value)
