"""The public API of mithril; every name is imported at its first use.

``import mithril as ml`` imports no backend, no plugin and no other module of the core. A name is defined by the table
below or by an installed plugin (``ml.JaxBackend``); the error for a missing one names the distribution to install.
"""

from __future__ import annotations

from typing import Any

from mithril.graph import __version__ as __version__, registry

# Package -> the names it exports. ``__init__.pyi`` is generated from this table.
_HOME = {
    "compiler": ("compile", "grad", "gradients", "hessian", "hvp", "jacobian", "jvp", "parse", "vjp", "vmap", "load"),
    "graph": (
        *("BackendError", "CompileTimeoutError", "DType", "DTypeError", "Dim", "GradientError", "GraphError"),
        *("GuardError", "InputError", "MemoryLimitError", "MithrilError", "ModelError", "OperationError"),
        *("OptionError", "OptionWarning", "ParseError", "PassError", "PluginError", "RewriteError", "ShapeError"),
        *("StrictError", "TensorType", "UnsupportedError", "VerificationError", "bfloat16", "bool_", "dtype"),
        *("float16", "float32", "float64", "int16", "int32", "int64", "int8", "promote", "reader_limits", "uint16"),
        *("uint32", "uint64", "uint8", "Builder", "Graph", "Node", "Origin", "Value", "composite", "op"),
    ),
    "plugins": (
        *("Architecture", "BackendSpec", "Command", "CompileContext", "DeviceSpec", "Export", "FileFormat", "Found"),
        *(
            "FrontendSpec",
            "HardwareTarget",
            "Lowering",
            "MemoryLevel",
            "OpsSpec",
            "Option",
            "PassSpec",
            "PipelineDraft",
        ),
        *("ProfilerSpec", "hookimpl"),
    ),
    "models": ("Connection", "IOKey", "Model"),
    "passes": ("Pass", "PassManager", "pass_", "Rule", "RuleSet", "rule"),
    "backend": ("Backend",),
}
_UNCHECKED = ("dtype", "promote", "reader_limits")  # functions of layers below that of argument checks
_SUBMODULES = ("models", "ops")
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}


def _declare_core_operations(name: str | None) -> None:
    import mithril.derivatives  # gradients of bodies, in the bodies of operations
    import mithril.ops  # noqa: F401


def _declare_plugin_operation(name: str | None) -> None:
    from mithril import plugins

    if name is not None:
        plugins.import_op(name)


def _index(x: Any, positions: Any) -> Any:
    from mithril.ops import getitem

    return getitem(x, positions)


def _core_names() -> set[str]:
    """Return the public names that plugins cannot override."""
    from pkgutil import iter_modules

    return {*_MODULE_OF, *_SUBMODULES, *(module.name for module in iter_modules(__path__))}


def _with_checked_arguments(value: Any) -> Any:
    """Return a function that raises OptionError for invalid arguments; other values are returned unchanged."""
    from types import FunctionType

    from mithril.backend import checked

    is_function = isinstance(value, FunctionType) and not hasattr(value, "__wrapped__")
    return checked()(value) if is_function or hasattr(value, "cache_info") else value


def _name_elsewhere(name: str) -> str:
    """Return the hint for a misspelling, a layer, an operation, or a name of another framework."""
    from mithril import models
    from mithril.graph import LAYERS, OPERATIONS, PACKAGE, closest, expression_here, name_here, operations

    if instead := PACKAGE.get(name) or expression_here(name):
        return f"; use {instead}"
    similar = closest(name, __dir__(), 1)
    if similar and similar[0].casefold() == name.casefold():
        return f"; did you mean 'ml.{similar[0]}'?"
    layers = dict.fromkeys(dir(models), "") | LAYERS
    if layer := name_here(name, layers) if name[:1].isupper() else None:
        return f"; did you mean 'ml.models.{layer}'?"
    if operation := name_here(name, dict.fromkeys(operations(), "") | OPERATIONS):
        return f"; did you mean 'ml.ops.{operation}'?"
    return f"; did you mean 'ml.{similar[0]}'?" if similar else ""


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(f"module 'mithril' has no attribute '{name}'")
    from importlib import import_module
    from importlib.util import find_spec

    if module := _MODULE_OF.get(name):
        value = getattr(import_module(f"mithril.{module}"), name)
        value = _with_checked_arguments(value) if name in _UNCHECKED else value
    elif find_spec(f"mithril.{name}"):  # also reached by `from mithril import plugins`
        return import_module(f"mithril.{name}")
    else:
        try:
            value = _with_checked_arguments(import_module("mithril.plugins").export(name))
        except AttributeError as error:
            raise AttributeError(f"{error}{_name_elsewhere(name)}") from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    from mithril.plugins import exports

    return sorted({"__version__", *_MODULE_OF, *_SUBMODULES, *exports()})


def _project_packages() -> frozenset[str]:
    from mithril.plugins import pip_hints

    return frozenset(("mithril", *(name.replace("-", "_") for name in pip_hints.DISTRIBUTIONS)))


registry.host = registry.Host(
    sources=(_declare_core_operations, _declare_plugin_operation),
    index=_index,
    public_names=_core_names,
    project_packages=_project_packages,
    core_plugin="mithril.compiler.options",
)
