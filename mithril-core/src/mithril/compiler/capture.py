"""Capture of intermediate values at run time."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from mithril.backend import BuildOptions, ExactSizesRequired
from mithril.compiler.program import Compiled
from mithril.compiler.weight_files import save_file
from mithril.graph import Graph, Input, InputError, Output, Value, bind, substitute_sizes, unknown


def capture(
    model: Compiled,
    params: Mapping[str, Any] | None,
    inputs: Mapping[str, Any],
    names: Collection[str] | None,
    *,
    state: Mapping[str, Any] | None = None,
    training: bool = False,
) -> dict[str, Any]:
    """Run the traced graph, before any pass, with these values as its outputs."""
    program, arguments = model.bound_call(params, inputs, state=state, training=training)
    graph = program.traced
    inner_inputs = {i.name for i in graph.inputs}
    inner = {v.name: v for node in graph.nodes for v in node.results if v.name not in inner_inputs}
    inner |= {n: v for n, v in zip(graph.output_names, graph.outputs, strict=True) if n not in inner_inputs}
    requested = list(names) if names is not None else [n for n in model.get_shapes() if n in inner]
    for name in requested:
        if name not in inner:
            message, facts, hint = unknown("value of the model", name, list(inner))
            raise InputError(message, facts=facts, hint=hint)
    part = subgraph_to(graph, [inner[n] for n in requested], requested)
    options = BuildOptions(jit=False)
    try:
        executable = model.backend.build(model.backend.decomposed(part, options), options)
    # The arguments of this call tell the sizes.
    except ExactSizesRequired:
        shapes = {i.name: tuple(arguments[i.name].shape) for i in part.arguments}
        part = substitute_sizes(part, bind({i.name: i.type.shape for i in part.arguments}, shapes))
        executable = model.backend.build(model.backend.decomposed(part, options), options)
    needed = {i.name: i.role for i in part.arguments}
    needed_params = {n: arguments[n] for n, role in needed.items() if role == "param"}
    results: dict[str, Any] = executable(
        needed_params, {n: arguments[n] for n, role in needed.items() if role != "param"}
    )
    folder = model.options.get("intermediate_dir")
    if model.options.get("save_intermediates") and folder is not None:
        arrays = {n: model.backend.to_numpy(a) for n, a in results.items()}
        Path(folder).mkdir(parents=True, exist_ok=True)
        save_file(arrays, Path(folder) / "values.safetensors", {"format": "mithril"})
    return results


def subgraph_to(graph: Graph, values: Collection[Value], names: Collection[str]) -> Graph:
    """Return the subgraph that computes `values`, with these values as its outputs."""
    needed, nodes = set(values), []
    for node in reversed(graph.nodes):
        if any(r in needed for r in node.results):
            nodes.append(node)
            needed.update(v for v in node.operands if v is not None)
    inputs: tuple[Input, ...] = tuple(i for i in graph.inputs if i.value in needed)
    results = tuple(Output(v, name) for name, v in zip(names, values, strict=True))
    return Graph(inputs, tuple(reversed(nodes)), results, graph.name, graph.guards)
