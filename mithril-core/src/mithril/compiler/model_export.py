"""``compiled.export``: model files in the formats of plugins."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mithril import plugins
from mithril.backend import Backend, annotated, check_call, format_bytes
from mithril.compiler.program import Compiled
from mithril.graph import Decisions, UnsupportedError


@dataclass(frozen=True)
class Exported:
    """A written file or folder, and the decisions on the way. Formats add what else they know in a subclass."""

    path: Path
    decisions: Decisions = field(default_factory=Decisions, kw_only=True)

    def __fspath__(self) -> str:
        return str(self.path)

    @property
    def bytes(self) -> int:
        """The size of the file, or of all files in the folder."""
        files = self.path.rglob("*") if self.path.is_dir() else [self.path]
        return sum(file.stat().st_size for file in files if file.is_file())

    def __str__(self) -> str:
        return f"{self.path}: {format_bytes(self.bytes)}"


def export(compiled: Compiled, path: str | os.PathLike[str], *, format: str | None = None, **options: Any) -> Exported:
    """Export a compiled model; directories use the backend's format, or the only directory format."""
    text = os.fspath(path)
    if format is None and _is_folder(text):
        format = _folder_format(compiled.backend)
    name = plugins.format_of(text, format)
    if name.spec.backends and not compiled.backend.names() & set(name.spec.backends):
        raise UnsupportedError(
            f"files of the format '{name.spec.name}' cannot be written for backend '{compiled.backend.name}'",
            facts=[f"provided by {name.origin} for: {', '.join(name.spec.backends)}"],
            hint=f"compile the model for backend '{name.spec.backends[0]}'",
        )
    function = annotated(plugins.load_format(name, "saves"), f"the file format '{name.spec.name}'", name.plugin)
    check_call(f"format '{name.spec.name}'", function, (compiled, path), options, {})
    exported = function(compiled, path, **options)
    return exported if isinstance(exported, Exported) else Exported(Path(text))


def _folder_format(backend: Backend) -> str | None:
    """Return the name of the directory format for the backend, or None if there is no unique one."""
    folders = {name: set(entry.spec.backends) for name, entry in plugins.formats().items() if not entry.spec.suffixes}
    native = [name for name, backends in folders.items() if backends & backend.names()]
    preferred = [name for name in native if plugins.formats()[name].spec.backends[0] in backend.names()]
    candidates = preferred or native or list(folders)
    return candidates[0] if len(candidates) == 1 else None


def _is_folder(path: str) -> bool:
    """Whether a path is a directory or has no suffix (numbers as in ``build-1.0`` are not suffixes)."""
    suffix = os.path.splitext(path)[1]
    return os.path.isdir(path) or path.endswith(os.sep) or not suffix.strip(".0123456789")
