"""``compiled.export("model.pt2")``: a program that ``torch.export.load`` reads, or compiled code of AOTInductor."""

from __future__ import annotations

import io
import os
import re
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from mithril.graph import BackendError, Graph, UnsupportedError, symbols
from mithril.system import files
from mithril_torch.inference_module import ExportedModule, examples, inference_module

EXAMPLE = 3  # of a symbolic size: torch.export treats 0 and 1 as constants, and 2 as a likely multiple


def export(
    compiled: Any,
    path: str | os.PathLike[str],
    params: Mapping[str, Any] | None = None,
    *,
    state: Mapping[str, Any] | None = None,
    aot: bool = False,
) -> ExportedModule:
    """Write the latest inference program of a model compiled for PyTorch; symbolic sizes of inputs stay symbolic.

    ``params`` defaults to the bound parameters. ``aot=True`` compiles it by AOTInductor, which needs a C++ compiler;
    ``torch._inductor.aoti_load_package`` and LibTorch run the result.
    """
    module, graph = inference_module(compiled, params, state)
    sizes, dynamic = _sizes(graph)
    try:
        with torch.no_grad():
            program = torch.export.export(module, examples(compiled, graph, sizes), dynamic_shapes=dynamic)
    except Exception as error:
        raise _refusal(error, graph) from error
    file = files.write(path, _package(program) if aot else _archive(program))
    return ExportedModule(file, module.inputs, module.outputs)


def _refusal(error: Exception, graph: Graph) -> UnsupportedError:
    """Return our error for an exception of torch.export, with open sizes by their names."""
    inputs, text = graph.with_role("input"), str(error)
    places = dict.fromkeys(re.findall(r"L\['arguments'\]\[(\d+)\]\.size\(\)\[(\d+)\]", text))
    names = dict.fromkeys(str(inputs[int(i)].type.shape[int(k)]) for i, k in places)
    if names:
        return UnsupportedError(
            f"torch.export makes open sizes of this program constant: {', '.join(names)}",
            facts=[
                "PyTorch unrolls loops whose number of steps is an open size, and some functions read sizes as numbers"
            ],
            hint="compile with integers for them in shapes=",
        )
    return UnsupportedError(f"torch.export cannot hold this program: {text.strip().splitlines()[0]}")


def _sizes(graph: Graph) -> tuple[dict[str, int], dict[str, Any] | None]:
    """Return values for the symbolic sizes, and which axes of the arguments they are."""
    inputs = graph.with_role("input")
    names = symbols(*(n for i in inputs for n in i.type.shape))
    if not names:
        return {}, None
    sizes = {s.name: max(EXAMPLE + k, s.low) for k, s in enumerate(names)}
    axes = tuple(
        {k: torch.export.Dim.DYNAMIC for k, n in enumerate(i.type.shape) if not isinstance(n, int)} for i in inputs
    )
    return sizes, {"arguments": axes}


def _archive(program: Any) -> bytes:
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    return buffer.getvalue()


def _package(program: Any) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "model.pt2"
        try:
            with warnings.catch_warnings():  # of torch._inductor about torch.jit, which it still imports (torch 2.13)
                warnings.simplefilter("ignore")
                torch._inductor.aoti_compile_and_package(program, package_path=str(package))
        except Exception as error:
            raise BackendError(
                "AOTInductor cannot compile this program",
                facts=str(error).strip().splitlines()[:4],
                hint="it requires a C++ compiler; without aot=True the file holds the program itself",
            ) from error
        return package.read_bytes()
