"""``compiled.export("model.pte")``: a program for ExecuTorch, which runs on mobile and embedded devices.

``torch.export`` captures the generated function together with its weights; ExecuTorch's own tools lower the result.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import torch

from mithril.graph import BackendError, OptionError, UnsupportedError
from mithril.system import files
from mithril_torch.inference_module import ExportedModule, examples, inference_module, require_static

DELEGATES = (None, "xnnpack")


def export(
    compiled: Any,
    path: str | os.PathLike[str],
    params: Mapping[str, Any] | None = None,
    *,
    state: Mapping[str, Any] | None = None,
    delegate: str | None = None,
) -> ExportedModule:
    """Write the latest inference program of a model compiled for PyTorch.

    ``params`` defaults to the bound parameters. ``delegate="xnnpack"`` runs the supported operations in XNNPACK.
    """
    if find_spec("executorch") is None:
        raise BackendError("writing .pte files requires ExecuTorch", hint="pip install executorch")
    if delegate not in DELEGATES:
        raise OptionError(f"unknown delegate '{delegate}'", facts=['accepted: None, "xnnpack"'])
    program, graph = inference_module(compiled, params, state)
    require_static(graph, "ExecuTorch")
    file = files.write(path, _lowered(program, examples(compiled, graph, {}), delegate))
    return ExportedModule(file, program.inputs, program.outputs)


def _lowered(program: torch.nn.Module, examples: tuple[Any, ...], delegate: str | None) -> bytes:
    try:
        from executorch.exir import to_edge_transform_and_lower

        partitioners = []
        if delegate == "xnnpack":
            from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner

            partitioners.append(XnnpackPartitioner())
    except ImportError as error:
        raise BackendError(f"ExecuTorch is only partly installed: {error}", hint="pip install executorch") from error
    try:
        with torch.no_grad():
            captured = torch.export.export(program, examples)
        executorch_program = to_edge_transform_and_lower(captured, partitioner=partitioners).to_executorch()
    except Exception as error:
        raise UnsupportedError(
            f"ExecuTorch cannot lower this program: {str(error).strip().splitlines()[0]}",
            hint="compile with backend 'c', which exports C programs for the same devices",
        ) from error
    return bytes(executorch_program.buffer)
