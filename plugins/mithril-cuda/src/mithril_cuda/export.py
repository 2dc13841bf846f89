"""Export of the kernels of a program as NVIDIA's assembly, PTX."""

from __future__ import annotations

import os

from mithril.compiler import CompiledModel, Exported
from mithril.graph import InputError
from mithril.system import files
from mithril_cuda import nvrtc


def export(compiled: CompiledModel, path: str | os.PathLike[str]) -> Exported:
    """Write the kernels of the latest program to a file, for its target or device."""
    if not compiled.programs:
        raise InputError("cannot export: no program has been compiled yet", hint="pass shapes=, or call the model once")
    executable = compiled.programs[-1].executable
    texts = [launch.text for launch in executable.program.launches]
    return Exported(files.write(path, nvrtc.compiled(texts, executable.host.capability, assembly=True), "path"))
