"""Export of a compiled model for browsers: WebGPU kernels, the same model as WebAssembly, a page that checks both."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files as resources
from typing import Any

from mithril.compiler import CompiledModel, Exported
from mithril.graph import InputError
from mithril.system import files
from mithril_webgpu.web import package
from mithril_webgpu.web.description import Description
from mithril_webgpu.web.program import browser_program, c_contents, graph_of
from mithril_webgpu.web.webassembly import module

NAME = re.compile(r"(@[a-z0-9][a-z0-9._-]*/)?[a-z0-9][a-z0-9._-]{0,100}")


@dataclass(frozen=True)
class ExportedSite(Exported):
    """An exported folder, with the bytes of its files."""

    sizes: Mapping[str, int]

    def __str__(self) -> str:
        lines = [f"{self.path}: a page (python -m http.server -d {self.path}) and a package of npm"]
        return "\n".join([*lines, *(f"  {name:<14}{size:>14,} bytes" for name, size in self.sizes.items())])


def export(
    compiled: CompiledModel,
    directory: str | os.PathLike[str],
    params: Mapping[str, Any] | None = None,
    inputs: Mapping[str, Any] | None = None,
    *,
    name: str = "model",
    webassembly: bool = True,
) -> ExportedSite:
    """Write the latest program of a model for browsers.

    ``params`` defaults to the bound parameters. ``inputs`` are those of the check on the page, random by default.
    ``name`` is the name of the package. Without ``webassembly`` the model needs a browser with WebGPU.
    """
    if not NAME.fullmatch(name):
        hint = "pass lower-case letters, digits, '-', '_' and '.', such as name='digits' or '@company/digits'"
        raise InputError(f"export: name={name!r} is not a valid name of a package of npm", hint=hint)
    graph, embedded = graph_of(compiled)
    program = browser_program(graph, compiled)
    arrays = {**(params if params is not None else compiled.params or {}), **embedded}
    contents = c_contents(graph, compiled, arrays, inputs)
    description = Description(program, contents)
    texts: dict[str, files.Data] = {
        "model.wgsl": description.kernels(),
        "model.weights": bytes(description.weights),
        "model.check": bytes(description.expected),
        "model.json": json.dumps(description.values(name, webassembly), separators=(",", ":")),
        "model.d.ts": package.types(description),
        "package.json": package.manifest(name, webassembly),
        "README.md": package.readme(name, description),
    }
    for file in ("model.js", "index.html"):
        texts[file] = (resources(__package__) / file).read_bytes()
    if webassembly:
        texts["model.wasm"] = module(contents)
    folder = files.write_folder(directory, texts)
    return ExportedSite(folder, {n: (folder / n).stat().st_size for n in sorted(texts)})
