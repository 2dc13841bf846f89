"""What a helper, a function whose text goes into generated files, needs beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


def needs(*functions: Callable[..., Any], imports: tuple[str, ...] = ()) -> Callable[[Function], Function]:
    """Say which other helpers a helper calls, and which lines of import it wants beyond its backend's."""

    def mark(function: Function) -> Function:
        function.__dict__.update(needs=functions, imports=imports)
        return function

    return mark
