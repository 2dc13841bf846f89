"""Lazy exports of a package: each name is imported from its module at its first use."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

Homes = Mapping[str, tuple[str, ...]]


def lazy_exports(package: str, homes: Homes) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__all__``, ``__getattr__`` and ``__dir__`` of a package that exports names of the modules ``homes``.

    A home is a module below the package; ``"module:object"`` if the names are attributes of that object; empty, or a
    package with a trailing dot, if the names are modules themselves.
    """
    home_of = {name: home for home, names in homes.items() for name in names}

    def getattr_(name: str) -> Any:
        home = home_of.get(name)
        if home is None:
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        module, _, holder = home.partition(":")
        is_module = not module or module.endswith(".")
        try:
            value: Any = import_module(f"{package}.{module + name if is_module else module}")
        except AttributeError as error:  # `from package import name` would report a missing name
            raise ImportError(f"{package}.{module} failed: {error}") from error
        for part in filter(None, () if is_module else (holder, name)):
            value = getattr(value, part)
        setattr(sys.modules[package], name, value)
        return value

    return sorted(home_of), getattr_, lambda: sorted({*vars(sys.modules[package]), *home_of})
