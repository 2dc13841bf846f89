"""The two programs of a site, for WebGPU and for WebAssembly, from the graph of one compiled model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from mithril.backend import BuildOptions, declared_defaults, memory_plan
from mithril.compiler import CompiledModel
from mithril.graph import Graph, InputError, MemoryLimitError, UnsupportedError, symbols
from mithril_cbackend.backend import CBackend
from mithril_cbackend.bundle import c_export
from mithril_cbackend.bundle.export_contents import Contents
from mithril_cbackend.devices.build import written
from mithril_cbackend.devices.model import BROWSER
from mithril_cbackend.devices.program import DeviceProgram
from mithril_webgpu.backend import WebGPUBackend

SHARED = 1 << 10  # bytes from which a float constant is stored once, for both programs
REMEDY = "compute it in Python and pass it as an input, or compose it of other operations"


def graph_of(compiled: CompiledModel) -> tuple[Graph, dict[str, Any]]:
    """Return the graph of the latest program, whose embedded weights are parameters, and these."""
    if not compiled.programs:
        hint = "pass shapes=, or call the model once"
        raise InputError("cannot export: no program has been compiled yet", hint=hint)
    program = compiled.programs[-1]
    if program.request.bound is not None:  # its parameters are expressions of those of the model
        program = compiled.program_with_params() or program
    graph = program.graph
    for i in graph.inputs:
        if symbols(*i.type.shape):
            hint = "compile with shapes= of numbers, such as shapes={'input': [1, 28, 28]}"
            raise UnsupportedError(f"cannot export to the web: '{i.name}' has an open size: {i.type}", hint=hint)
    embedded = {
        i.name: np.asarray(i.data)
        for i in graph.with_role("constant")
        if i.type.dtype.is_float and np.asarray(i.data).nbytes >= SHARED
    }
    inputs = [replace(i, role="param", data=None) if i.name in embedded else i for i in graph.inputs]
    return c_export.without_donations(graph.replaced(inputs=tuple(inputs))), embedded


def browser_program(graph: Graph, compiled: CompiledModel) -> DeviceProgram:
    """Return the kernels and steps for WebGPU with the limits that every browser grants."""
    backend, options = WebGPUBackend(), BuildOptions(compiled.options)
    backend.check(graph)
    program = written(backend.decomposed(graph, options), BROWSER, options)
    if program.calls:
        node = program.calls[0]
        raise UnsupportedError(
            f"cannot export to the web: '{node.op.name}' runs as a Python function",
            facts=[line for line in [str(node.origin)] if line],
            hint=REMEDY,
        )
    for size in buffer_sizes(program):
        if BROWSER.binding is not None and size > BROWSER.binding:
            raise MemoryLimitError(
                f"cannot export to the web: an array takes {memory_plan.format_bytes(size)}",
                facts=[f"browsers bind arrays of at most {memory_plan.format_bytes(BROWSER.binding)}"],
                hint="compile with smaller shapes, or divide the weight into several",
            )
    return program


def buffer_sizes(program: DeviceProgram) -> list[int]:
    """Return the bytes of all buffers, whose elements are words."""
    graph = program.graph
    sizes = dict(program.sizes)
    sizes |= {n: bytes_of(value.shape) for n, (value, _) in program.constants.items()}
    sizes |= {program.arguments[i.name]: bytes_of(i.type.shape) for i in graph.arguments}
    sizes |= {program.results[r.name]: bytes_of(r.type.shape) for r in graph.results if r.name in program.results}
    return [sizes.get(k, 0) for k in range(program.buffers)]


def bytes_of(shape: Any) -> int:
    return 4 * int(np.prod(shape, dtype=np.int64))


def c_contents(
    graph: Graph,
    compiled: CompiledModel,
    params: Mapping[str, Any],
    inputs: Mapping[str, Any] | None,
) -> Contents:
    """Return the program in C for WebAssembly with the weights, and the results of the check."""
    backend = CBackend()
    settings = {"mobile_options": {"arch": "wasm32"}, "target_hardware": None, "cpu_options": {}, "num_threads": 1}
    nothing_stored = {name: default for name, default in declared_defaults().items() if name in ("cache", "file_path")}
    options = BuildOptions({**compiled.options, **settings, **nothing_stored})
    executable = backend.build(backend.decomposed(graph, options), options)
    weights = c_export.parameters(executable, params)
    state = compiled.initial_state() if executable.graph.with_role("state") else {}
    test_inputs = partial(c_export.test_inputs_of, executable, inputs)
    return Contents(executable, weights, test_inputs, state, "model", {})
