"""The operators of a file, nested by the modules that the names of their results contain."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from mithril_importing.layers import ImportedLayer, Run
from mithril_importing.names import unique_names
from mithril_importing.regions import Operation, Param, Read, Region, Scope, nested
from mithril_tflite.importer import Importer, product_key
from mithril_tflite.reading import Graph, Node
from mithril_tflite.table import OPERATORS

# A fused operator has the names of its parts, separated by ";": these belong to the layer with the weights.
PRODUCTS = re.compile(r"/(Conv\w*|conv\w*|depthwise\w*|MatMul\w*|Tensordot\w*|BiasAdd\w*)(/|:|$)", re.IGNORECASE)


def modules(name: str) -> tuple[str, ...]:
    """Return the names of the modules in the name of a tensor: ``model/conv1/Conv2D``, outermost first."""
    parts = name.split(";")
    part = next((p for p in reversed(parts) if PRODUCTS.search(p)), next((p for p in parts if "/" in p), parts[0]))
    around = [p for p in part.split("/")[:-1] if p]
    return tuple(re.sub(r"[^\w\-]", "_", p) for p in around)


def scopes_of(graph: Graph, node: Node) -> tuple[Scope, ...]:
    """Return the modules around a node, outermost first; one with weights that none has is a module itself."""
    name = graph.tensors[node.outputs[0]].name if node.outputs else ""
    around = modules(name)
    if not around and name and "weight" in OPERATORS[node.name].signature.names:
        around = modules(f"{name.split(';')[0]}/")
    return tuple(Scope(path) for path in accumulate(around, lambda a, b: f"{a}.{b}"))


def parameter_names(graph: Graph, nodes: Iterable[Node], constants: Mapping[int, Any]) -> dict[str, str]:
    """Return names of float constants that are parameters, by key: of the module that reads them first.

    Those with several elements are, unless an operator needs their elements at import.
    """
    names: dict[str, str] = {}
    fixed = set()
    copies: dict[int, int] = {}  # results of conversions, by the constant that they convert
    for node in nodes:
        row = OPERATORS[node.name].signature
        scopes = scopes_of(graph, node)
        if node.name in ("DENSIFY", "DEQUANTIZE"):
            copies[node.outputs[0]] = copies.get(node.inputs[0], node.inputs[0])
            continue
        for k, index in enumerate(node.inputs):
            index = copies.get(index, index)
            if index not in constants:
                continue
            key = graph.keys[index]
            if row.kind(k) in ("Known", "Sizes"):
                fixed.add(key)
            label = row.names[k] if row.kind(k) == "Weight" and len(row.names[k]) > 1 else "constant"
            stem = f"{scopes[-1].path}.{label}" if scopes else re.sub(r"[^\w\-]+", "_", key.split(";")[0]).strip("_")
            names.setdefault(key, stem)
    return unique_names((key for key in names if key not in fixed), lambda key: names[key] or "_")


def region_of(graph: Graph, nodes: Sequence[Node], parameters: Mapping[str, str], outputs: Sequence[int]) -> Region:
    """Return the nodes of a graph, of whose inputs the environment holds the values.

    A product with a fused activation is two operations, of which the first is a layer that LoRA knows.
    """
    computed = {graph.keys[k] for k in graph.inputs}
    operations: list[Operation] = []
    for node in nodes:
        results = tuple(graph.keys[k] for k in node.outputs)
        scopes = scopes_of(graph, node)
        names = [graph.keys[k] for k in node.inputs if k >= 0]
        reads = tuple(dict.fromkeys(name for name in names if name in computed))
        operands = tuple(Param(parameters[name]) if name in parameters else Read(name) for name in names)
        kind = _kind(graph, node)
        if kind and node.options["activation"] and scopes:
            product = product_key(graph, node)
            operations.append(Operation((node, "product"), scopes, reads, (product,), kind, operands))
            operations.append(Operation((node, "activation"), scopes[:-1], (product,), results))
        else:
            operations.append(Operation((node, ""), scopes, reads, results, kind, operands))
        computed.update(results)
    return nested(operations, [graph.keys[k] for k in outputs])


def _kind(graph: Graph, node: Node) -> str:
    """Return "linear" for a product of floats that is one of all leading axes."""
    if node.name != "FULLY_CONNECTED":
        return ""
    tensors = [graph.tensors[k] for k in (*node.inputs, *node.outputs) if k >= 0]
    is_plain = all(t.quantization is None and t.shape is not None for t in tensors)
    is_matrix = node.options["keep_num_dims"] or len(tensors[0].shape or ()) == 2
    return "linear" if is_plain and is_matrix and not node.options["weights_format"] else ""


def reads_of(graph: Graph, nodes: Iterable[Node]) -> Iterator[int]:
    for node in nodes:
        yield from (k for k in node.inputs if k >= 0)


class GraphRun(Run):
    """One run over the operators of a file."""

    def __init__(self, root: ImportedLayer, values: dict[str, Any], importer: Importer, graph: Graph) -> None:
        super().__init__(root, values)
        self.importer, self.graph = importer, graph

    def execute(self, source: tuple[Node, str]) -> None:
        node, part = source
        self.importer.step(self.graph, node, self.values, part)
