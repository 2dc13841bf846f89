"""A compiled inference program with its weights as one module, which files of PyTorch contain."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch

from mithril.compiler import Exported
from mithril.graph import Graph, InputError, UnsupportedError, substitute, symbols


@dataclass(frozen=True)
class ExportedModule(Exported):
    """A written file. Its method ``forward`` takes ``inputs`` and returns ``outputs`` in these orders."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def __str__(self) -> str:
        return f"{super().__str__()}, forward({', '.join(self.inputs)}) -> ({', '.join(self.outputs)})"


class InferenceModule(torch.nn.Module):  # type: ignore[misc]
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


def inference_module(
    compiled: Any, params: Mapping[str, Any] | None, state: Mapping[str, Any] | None
) -> tuple[InferenceModule, Graph]:
    """Return the latest inference program as a module with the given or bound parameters, and its graph."""
    graph, forward = inference_program(compiled)
    weights = params if params is not None else compiled.params
    if weights is None and graph.with_role("param"):
        raise InputError(
            "there are no parameters to export",
            hint="use compiled.export(path, params=params), or call compiled.bind(params) first",
        )
    states = dict(state) if state is not None else compiled.initial_state() if graph.with_role("state") else {}
    arrays = {name: compiled.backend.array(x) for name, x in {**(weights or {}), **states}.items()}
    module: InferenceModule = InferenceModule(graph, forward, arrays).eval()
    return module, graph


def inference_program(compiled: Any) -> tuple[Graph, Any]:
    """Return the graph of the latest inference program and its generated function."""
    program = compiled.program_with_params()
    if program is None:
        raise InputError("no inference program is compiled yet", hint="pass shapes= to ml.compile, or run the model")
    forward = program.executable.forward
    if not isinstance(forward, FunctionType):
        raise UnsupportedError(
            "PyTorch exports one function, but this program runs on several devices",
            hint="compile for TorchBackend() without device_mesh=, and export that",
        )
    return program.executable.graph, _with_plain_kernels(forward)


def examples(compiled: Any, graph: Graph, sizes: Mapping[str, int]) -> tuple[Any, ...]:
    """Return zeros for the inputs of the program, with these values of its symbolic sizes."""
    return tuple(
        torch.zeros(
            tuple(int(substitute(n, sizes)) for n in i.type.shape), dtype=compiled.backend.native_dtype(i.type.dtype)
        )
        for i in graph.with_role("input")
    )


def require_static(graph: Graph, subject: str) -> None:
    """Raise InputError if a size of an input is symbolic."""
    unknown = symbols(*(n for i in graph.inputs for n in i.type.shape))
    if unknown:
        raise InputError(
            f"size '{unknown[0].name}' is symbolic, but {subject} requires static shapes",
            hint="compile with integers in shapes=",
        )


def _with_plain_kernels(forward: FunctionType) -> FunctionType:
    """Return the function with its constants in a layout that other runtimes read, not packed for oneDNN."""
    constants = {
        name: x.to_dense() if isinstance(x, torch.Tensor) and x.is_mkldnn else x
        for name, x in forward.__globals__.items()
    }
    return FunctionType(forward.__code__, constants)
