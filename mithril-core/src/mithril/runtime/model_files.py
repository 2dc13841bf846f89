"""``ml.load`` and ``compiled.export``: models in files, in whatever formats plugins know."""

from __future__ import annotations

import os
from typing import Any

from mithril import plugins
from mithril.backend import Backend, check_call, checked
from mithril.base import InputError, UnsupportedError
from mithril.runtime.compiled import Compiled


@checked()
def load(path: str | os.PathLike[str], *, format: str | None = None, **options: Any) -> Any:
    """The model in a file or folder, its parameters bound: call it with inputs.

    The format is told by the suffix, or named. ``options`` are the format's own, such as ``backend=``.
    """
    text = os.fspath(path)
    if not os.path.exists(text):
        raise InputError(f"there is no file '{text}'")
    name = plugins.format_of(text, format)
    function = plugins.load_format(name, "loads")
    check_call(f"format '{name}'", function, (path,), options, {})
    return function(path, **options)


def export(compiled: Compiled, path: str | os.PathLike[str], *, format: str | None = None, **options: Any) -> Any:
    """Write a compiled model; a folder in its backend's own format, or else in the only format of folders."""
    text = os.fspath(path)
    if format is None and _is_folder(text):
        format = _folder_format(compiled.backend)
    name = plugins.format_of(text, format)
    if name.spec.backends and not compiled.backend.names() & set(name.spec.backends):
        raise UnsupportedError(
            f"files of the format '{name.spec.name}' cannot be written for backend '{compiled.backend.name}'",
            facts=[f"offered by {name.origin} for: {', '.join(name.spec.backends)}"],
            hint=f"compile the model for backend '{name.spec.backends[0]}'",
        )
    function = plugins.load_format(name, "saves")
    check_call(f"format '{name}'", function, (compiled, path), options, {})
    return function(compiled, path, **options)


def _folder_format(backend: Backend) -> str | None:
    """Return the name of the format that folders are written in, or None if none or several could be meant."""
    folders = {name: set(entry.spec.backends) for name, entry in plugins.formats().items() if not entry.spec.suffixes}
    native = [name for name, backends in folders.items() if backends & backend.names()]
    candidates = native or list(folders)
    return candidates[0] if len(candidates) == 1 else None


def _is_folder(path: str) -> bool:
    """Whether a path names a folder: it exists as one, or has no suffix but a number's, as ``build-1.0`` has."""
    suffix = os.path.splitext(path)[1]
    return os.path.isdir(path) or path.endswith(os.sep) or not suffix.strip(".0123456789")
