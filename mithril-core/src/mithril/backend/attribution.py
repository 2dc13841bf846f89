"""Errors raised by code of plugins, which name the plugin."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar

from mithril import plugins
from mithril.graph import MithrilError, PluginError
from mithril.plugins import Plugin

F = TypeVar("F", bound=Callable[..., Any])


@contextmanager
def attributed(part: str, plugin: Plugin) -> Iterator[None]:
    """Name the plugin in errors of code that the compiler calls: ``part`` is, for example, ``"the frontend 'x'"``."""
    try:
        yield
    except MithrilError as error:
        raise error.with_facts(f"in {part} of {plugin.origin}") from None
    except Exception as cause:
        raise PluginError(
            f"{part} of {plugin.origin} failed: {type(cause).__name__}: {cause}",
            hint=f"report it to the authors of {plugin.distribution}; {plugin.disable_hint()}",
        ) from cause


def annotated(function: F, part: str, plugin: Plugin) -> F:
    """Return a function that users call, with a note that names the plugin in its errors; their types do not change."""
    if not callable(function) or isinstance(function, type) or plugin.first_party:
        return function

    @wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        try:
            return function(*arguments, **options)
        except Exception as error:
            error.add_note(f"in {part} of {plugin.origin}")
            raise

    return call  # type: ignore[return-value]


def third_parties() -> Mapping[str, Plugin]:
    """Return the plugins of third parties by the top-level packages of their code."""
    for plugin in plugins.found():
        if not plugin.first_party and plugin.usable:
            return plugins.default.packages()
    return {}


def plugin_of(module: str) -> Plugin | None:
    """Return the third-party plugin whose distribution contains a module, or None."""
    return third_parties().get(module.partition(".")[0])
