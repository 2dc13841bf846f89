"""``ml.load``: model files in the formats of plugins."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from mithril import plugins
from mithril.backend import annotated, check_call, checked
from mithril.graph import InputError

if TYPE_CHECKING:
    from mithril.compiler.compiled_model import CompiledModel


@checked()
def load(path: str | os.PathLike[str], *, format: str | None = None, **options: Any) -> CompiledModel:
    """Load a model with bound parameters from a file or directory.

    The suffix or ``format`` selects the format. ``options`` belong to the format, such as ``backend=``.
    """
    compiled: CompiledModel = read_model_file(path, format, "loads", options)
    return compiled


def read_model_file(path: str | os.PathLike[str], format: str | None, way: str, options: dict[str, Any]) -> Any:
    """Call a function of a file format: `loads` or `models`."""
    text = os.fspath(path)
    if not os.path.exists(text):
        raise InputError(f"there is no file '{text}'")
    name = plugins.format_of(text, format)
    function = annotated(plugins.load_format(name, way), f"the file format '{name.spec.name}'", name.plugin)
    check_call(f"format '{name.spec.name}'", function, (path,), options, {})
    return function(path, **options)
