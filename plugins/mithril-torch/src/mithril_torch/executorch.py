"""``compiled.export("model.pte")``: a program for ExecuTorch, which runs on telephones and small devices.

The generated function is captured by ``torch.export`` with the weights inside, and lowered by ExecuTorch's own tools.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from mithril.backend import human
from mithril.base import BackendError, InputError, OptionError, UnsupportedError, files, symbols
from mithril.ir import Graph

DELEGATES = (None, "xnnpack")


@dataclass(frozen=True)
class Exported:
    """What was written. The method ``forward`` takes the inputs, and gives the outputs, in these orders."""

    path: Path
    bytes: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.path}: {human(self.bytes)}, forward({', '.join(self.inputs)}) -> ({', '.join(self.outputs)})"


class _Program(torch.nn.Module):  # type: ignore[misc]
    """The generated function with its weights, taking inputs by place."""

    def __init__(self, graph: Graph, forward: Any, weights: Mapping[str, Any]) -> None:
        super().__init__()
        self.function = forward
        self.params = {i.name: f"weight_{k}" for k, i in enumerate(graph.with_role("param"))}
        self.states = {i.name: f"state_{k}" for k, i in enumerate(graph.with_role("state"))}
        self.inputs = tuple(i.name for i in graph.with_role("input"))
        self.outputs = tuple(r.name for r in graph.results if r.role != "state")
        for name, buffer in {**self.params, **self.states}.items():
            self.register_buffer(buffer, weights[name].detach())

    def forward(self, *given: Any) -> tuple[Any, ...]:
        params = {name: getattr(self, buffer) for name, buffer in self.params.items()}
        states = {name: getattr(self, buffer) for name, buffer in self.states.items()}
        made = self.function(params, {**states, **dict(zip(self.inputs, given, strict=True))})
        return tuple(made[name] for name in self.outputs)


def export(
    compiled: Any,
    path: str | os.PathLike[str],
    params: Mapping[str, Any] | None = None,
    *,
    state: Mapping[str, Any] | None = None,
    delegate: str | None = None,
) -> Exported:
    """Write the newest inference program of a model compiled for PyTorch.

    Parameters are the bound ones if none are given. ``delegate="xnnpack"`` hands what it can to XNNPACK's kernels.
    """
    if find_spec("executorch") is None:
        raise BackendError("writing .pte files needs ExecuTorch", hint="pip install executorch")
    if delegate not in DELEGATES:
        raise OptionError(f"delegate='{delegate}' is not known", facts=['accepted: None, "xnnpack"'])
    graph, forward = _inference(compiled)
    chosen = params if params is not None else compiled.params
    if chosen is None and graph.with_role("param"):
        raise InputError(
            "there are no parameters to export",
            hint="compiled.export(path, params=params), or compiled.bind(params) before",
        )
    states = dict(state) if state is not None else compiled.initial_state() if graph.with_role("state") else {}
    program = _Program(graph, forward, {**(chosen or {}), **states}).eval()
    examples = tuple(
        torch.zeros(tuple(map(int, i.type.shape)), dtype=compiled.backend.native_dtype(i.type.dtype))
        for i in graph.with_role("input")
    )
    file = files.write(path, _lowered(program, examples, delegate))
    return Exported(file, file.stat().st_size, program.inputs, program.outputs)


def _inference(compiled: Any) -> tuple[Graph, Any]:
    """The graph that runs, and the generated function."""
    found = [p for p in compiled.programs if not p.request.kind.of and not p.request.kind.training]
    if not found:
        raise InputError("no inference program has been made yet", hint="give shapes= to ml.compile, or run the model")
    graph: Graph = found[-1].executable.graph
    unknown = symbols(*(n for i in graph.inputs for n in i.type.shape))
    if unknown:
        raise InputError(
            f"the size {unknown[0].name} is not known, and ExecuTorch's programs have fixed shapes",
            hint="compile with numbers in shapes=",
        )
    return graph, found[-1].executable.forward


def _lowered(program: torch.nn.Module, examples: tuple[Any, ...], delegate: str | None) -> bytes:
    try:
        from executorch.exir import to_edge_transform_and_lower

        partitioners = []
        if delegate == "xnnpack":
            from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner

            partitioners.append(XnnpackPartitioner())
    except ImportError as error:
        raise BackendError(f"ExecuTorch is not complete here: {error}", hint="pip install executorch") from error
    try:
        with torch.no_grad():
            captured = torch.export.export(program, examples)
        made = to_edge_transform_and_lower(captured, partitioner=partitioners).to_executorch()
    except Exception as error:
        raise UnsupportedError(
            f"ExecuTorch cannot take this program: {str(error).strip().splitlines()[0]}",
            hint="the C backend exports programs for the same devices: compile with backend 'c'",
        ) from error
    return bytes(made.buffer)
