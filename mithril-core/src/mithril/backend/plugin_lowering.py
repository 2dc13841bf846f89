"""Lowerings of plugins, imported on first use and named in the errors that they raise."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from mithril.graph import MithrilError, Node, PluginError
from mithril.plugins import Plugins, default


@dataclass(frozen=True, slots=True)
class Label:
    """The description of a lowering in errors: operation, backend, distribution with version, and user's layer."""

    op: str
    backend: str
    origin: str
    where: str = ""

    def error(self, message: str, *facts: str, hint: str = "") -> PluginError:
        """Return an error that names the lowering."""
        return PluginError(
            f"the lowering of '{self.op}' on '{self.backend}' by {self.origin} {message}",
            facts=[f"in {self.where}" if self.where else "", *facts],
            hint=hint or f"report it to the authors of {self.origin.split(' ')[0]}, or disable that plugin",
        )


@contextmanager
def lowering_error_context(label: Label) -> Iterator[None]:
    """Turn an exception of a lowering into an error that names it."""
    try:
        yield
    except MithrilError as error:
        raise error.with_facts(f"in the lowering of '{label.op}' on '{label.backend}' by {label.origin}") from None
    except Exception as cause:
        raise label.error(f"failed: {type(cause).__name__}: {cause}") from cause


@dataclass(frozen=True, eq=False)
class PluginLowering:
    """The lowering of one operation on one backend by one plugin."""

    op: str
    backend: str
    origin: str  # distribution and version
    loads: str
    when: str | None = None  # path of a predicate of the node
    clash: Callable[[], PluginError] | None = None  # error if several plugins provide the lowering and none owns it
    _loaded: dict[str, Any] = field(default_factory=dict, repr=False)

    def label(self, node: Node | None = None) -> Label:
        """Return the description of this lowering at a node."""
        return Label(self.op, self.backend, self.origin, "" if node is None else str(node.origin))

    def applies(self, node: Node) -> bool:
        """Whether this lowering applies to the node."""
        if self.clash is not None:
            raise self.clash()
        if self.when is None:
            return True
        with lowering_error_context(self.label(node)):
            return bool(self._import(self.when)(node))

    @property
    def target(self) -> Any:
        """The object named by ``loads``: a template, a function that writes code, or a kernel on arrays."""
        with lowering_error_context(self.label()):
            target = self._import(self.loads)
        if not isinstance(target, str) and not callable(target):
            raise self.label().error(f"is not a function: {self.loads} is a {type(target).__name__}")
        return target

    def _import(self, path: str) -> Any:
        if path not in self._loaded:
            module, _, name = path.partition(":")
            value: Any = importlib.import_module(module)
            for part in name.split("."):
                value = getattr(value, part)
            self._loaded[path] = value
        return self._loaded[path]

    def is_writer(self, parameter: str) -> bool:
        """Whether the first parameter has this name, which marks functions that write code for a backend."""
        return not isinstance(self.target, str) and next(iter(_parameters(self.target)), "") == parameter

    def arguments(self, node: Node, operands: Sequence[Any], values: Mapping[str, Any]) -> list[tuple[str, Any]]:
        """Match the kernel's parameters with operands, attributes, ``shape`` and ``dtype`` by name.

        Positional arguments have an empty keyword.
        """
        op = node.op
        values_by_name = {**values, **({} if op.variadic else dict(zip(op.operands, operands, strict=True)))}
        arguments: list[tuple[str, Any]] = []
        for parameter in _parameters(self.target).values():
            if parameter.kind is parameter.VAR_POSITIONAL:
                arguments += [("", operand) for operand in operands]
            elif parameter.name in values_by_name:
                keyword = parameter.name if parameter.kind is parameter.KEYWORD_ONLY else ""
                arguments.append((keyword, values_by_name[parameter.name]))
            elif parameter.kind is not parameter.VAR_KEYWORD and parameter.default is parameter.empty:
                raise self.label(node).error(
                    f"has the parameter '{parameter.name}', which is neither an operand nor an attribute",
                    f"known: {', '.join(values_by_name)}",
                )
        return arguments


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # compiled functions without a signature take the operands in order
        return {"operands": inspect.Parameter("operands", inspect.Parameter.VAR_POSITIONAL)}


def applicable(lowerings: Mapping[str, Sequence[PluginLowering]], node: Node) -> PluginLowering | None:
    """Return the plugin lowering of a node, or None."""
    return next((one for one in lowerings.get(node.op.name, ()) if one.applies(node)), None)


def plugin_lowerings(backend: str, source: Plugins = default) -> Mapping[str, tuple[PluginLowering, ...]]:
    """Return the plugins' lowerings for a backend by operation. A lowering with several owners raises on use."""
    return _lowerings(backend, source, source.generation())


@lru_cache(maxsize=64)
def _lowerings(backend: str, source: Plugins, generation: object) -> Mapping[str, tuple[PluginLowering, ...]]:
    return {
        op: tuple(PluginLowering(op, backend, o.origin, o.spec.loads, o.spec.when, o.clash) for o in offers)
        for op, offers in source.lowerings(backend).items()
    }
