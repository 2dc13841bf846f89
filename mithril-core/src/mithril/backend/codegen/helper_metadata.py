"""Dependencies of helpers, the functions whose source is copied into generated files."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


def needs(*functions: Callable[..., Any], imports: tuple[str, ...] = ()) -> Callable[[Function], Function]:
    """Declare the helpers that a helper calls, and its import lines in addition to those of the backend."""

    def mark(function: Function) -> Function:
        function.__dict__.update(needs=functions, imports=imports)
        return function

    return mark
