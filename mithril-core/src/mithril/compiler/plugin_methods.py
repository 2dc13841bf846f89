"""Methods that plugins add to compiled models; their types are in a stub, which is generated from the registry."""

from __future__ import annotations

from functools import partial
from typing import Any

from mithril import plugins
from mithril.backend import annotated


class PluginMethod:
    """A method that a plugin adds with ``Export(name, loads, on="CompiledModel")``."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, compiled: Any, owner: type) -> Any:
        if compiled is None:
            return self
        function, plugin = plugins.extension("CompiledModel", self.name)
        return partial(annotated(function, f"the method '{self.name}'", plugin), compiled)


class PluginMethods:
    """Base of compiled models. A ``__getattr__`` would make access to any attribute slower."""

    @classmethod
    def add_plugin_methods(cls) -> None:
        """Add the methods of plugins to the class."""
        for name in {*plugins.extensions(), *plugins.pip_hints.METHODS}:
            if not any(name in vars(base) for base in cls.__mro__):
                setattr(cls, name, PluginMethod(name))
