"""``compiled.export("model.pte")``: a program for ExecuTorch, which runs on mobile and embedded devices.

``torch.export`` captures the generated function together with its weights; ExecuTorch's own tools lower the result.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType
from typing import Any

import torch

from mithril.backend import format_bytes
from mithril.graph import BackendError, Graph, InputError, OptionError, UnsupportedError, symbols
from mithril.system import files

DELEGATES = (None, "xnnpack")


@dataclass(frozen=True)
class Exported:
    """A written .pte file. Its method ``forward`` takes ``inputs`` and returns ``outputs`` in these orders."""

    path: Path
    bytes: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def __str__(self) -> str:
        return (
            f"{self.path}: {format_bytes(self.bytes)}, forward({', '.join(self.inputs)}) -> ({', '.join(self.outputs)})"
        )


class _Program(torch.nn.Module):  # type: ignore[misc]
    """The generated function with its weights as buffers and its inputs as positional arguments."""

    def __init__(self, graph: Graph, forward: Any, weights: Mapping[str, Any]) -> None:
        super().__init__()
        self.function = forward
        self.params = {i.name: f"weight_{k}" for k, i in enumerate(graph.with_role("param"))}
        self.states = {i.name: f"state_{k}" for k, i in enumerate(graph.with_role("state"))}
        self.inputs = tuple(i.name for i in graph.with_role("input"))
        self.outputs = tuple(r.name for r in graph.results if r.role != "state")
        for name, buffer in {**self.params, **self.states}.items():
            self.register_buffer(buffer, weights[name].detach())

    def forward(self, *arguments: Any) -> tuple[Any, ...]:
        params = {name: getattr(self, buffer) for name, buffer in self.params.items()}
        states = {name: getattr(self, buffer) for name, buffer in self.states.items()}
        results = self.function(params, {**states, **dict(zip(self.inputs, arguments, strict=True))})
        return tuple(results[name] for name in self.outputs)


def export(
    compiled: Any,
    path: str | os.PathLike[str],
    params: Mapping[str, Any] | None = None,
    *,
    state: Mapping[str, Any] | None = None,
    delegate: str | None = None,
) -> Exported:
    """Write the latest inference program of a model compiled for PyTorch.

    ``params`` defaults to the bound parameters. ``delegate="xnnpack"`` runs the supported operations in XNNPACK.
    """
    if find_spec("executorch") is None:
        raise BackendError("writing .pte files requires ExecuTorch", hint="pip install executorch")
    if delegate not in DELEGATES:
        raise OptionError(f"unknown delegate '{delegate}'", facts=['accepted: None, "xnnpack"'])
    graph, forward = _inference(compiled)
    weights = params if params is not None else compiled.params
    if weights is None and graph.with_role("param"):
        raise InputError(
            "there are no parameters to export",
            hint="use compiled.export(path, params=params), or call compiled.bind(params) first",
        )
    states = dict(state) if state is not None else compiled.initial_state() if graph.with_role("state") else {}
    program = _Program(graph, forward, {**(weights or {}), **states}).eval()
    examples = tuple(
        torch.zeros(tuple(map(int, i.type.shape)), dtype=compiled.backend.native_dtype(i.type.dtype))
        for i in graph.with_role("input")
    )
    file = files.write(path, _lowered(program, examples, delegate))
    return Exported(file, file.stat().st_size, program.inputs, program.outputs)


def _inference(compiled: Any) -> tuple[Graph, Any]:
    """Return the graph of the latest inference program and its generated function."""
    candidates = [p for p in compiled.programs if not p.request.kind.of and not p.request.kind.training]
    if not candidates:
        raise InputError("no inference program is compiled yet", hint="pass shapes= to ml.compile, or run the model")
    graph: Graph = candidates[-1].executable.graph
    unknown = symbols(*(n for i in graph.inputs for n in i.type.shape))
    if unknown:
        raise InputError(
            f"size '{unknown[0].name}' is symbolic, but ExecuTorch requires static shapes",
            hint="compile with integers in shapes=",
        )
    return graph, _with_plain_kernels(candidates[-1].executable.forward)


def _with_plain_kernels(forward: Any) -> Any:
    """Return the function with its constants in a layout that other runtimes read, not packed for oneDNN."""
    constants = {
        name: x.to_dense() if isinstance(x, torch.Tensor) and x.is_mkldnn else x
        for name, x in forward.__globals__.items()
    }
    return FunctionType(forward.__code__, constants)


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
