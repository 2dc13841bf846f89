"""Variables of a file, which are states of the model: their values before the first call."""

from __future__ import annotations

import re

import numpy as np

from mithril.graph import UnsupportedError
from mithril_tflite.flatbuffer import Array
from mithril_tflite.reading import Graph, TfliteFile


def variable_name(shared_name: str) -> str:
    """Return the name of the state of a variable."""
    return re.sub(r"[^\w\-.]", "_", shared_name.replace("/", "."))


def initial_values(file: TfliteFile) -> dict[str, Array]:
    """Return the values that graphs that run once assign to variables, by name."""
    values: dict[str, Array] = {}
    for graph in file.graphs:
        for node in graph.nodes:
            if node.name == "CALL_ONCE" and 0 <= node.options["init_subgraph_index"] < len(file.graphs):
                values |= _assigned(file, file.graphs[node.options["init_subgraph_index"]])
    return values


def _assigned(file: TfliteFile, graph: Graph) -> dict[str, Array]:
    handles: dict[int, str] = {}
    values = {}
    for node in graph.nodes:
        if node.name == "VAR_HANDLE":
            handles[node.outputs[0]] = variable_name(node.options["shared_name"])
        elif node.name == "ASSIGN_VARIABLE" and node.inputs[0] in handles:
            array = file.constant(graph.tensors[node.inputs[1]])
            if array is None:
                raise UnsupportedError(
                    f"the variable '{handles[node.inputs[0]]}' of '{file.name}' has a computed initial value",
                    facts=["accepted: constants"],
                    hint="convert the model with a constant initial value",
                )
            values[handles[node.inputs[0]]] = np.asarray(array)
    return values
