"""The nodes of an ONNX graph, nested by the modules that their names contain."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import accumulate, count
from typing import Any

from mithril_importing.layers import ImportedLayer, Run
from mithril_importing.regions import Operation, Param, Read, Region, Scope, nested
from mithril_onnx.importer import module_of

KINDS = {"MatMul": "matmul", "Add": "add"}


def region_of(graph: Any, inputs: Sequence[str], paths: Mapping[str, str]) -> Region:
    """Return the nodes of a graph; ``paths`` are the names of parameters by that of their initializer."""
    operations: list[Operation] = []
    computed, modules = set(inputs), modules_with_weights(graph)
    for k, node in enumerate(graph.node):
        results = tuple(name for name in node.output if name)
        reads = tuple(dict.fromkeys(name for name in operands_of(node) if name in computed))
        computed.update(results)
        operands = tuple(Param(paths[name]) if name in paths else Read(name) for name in node.input)
        operations.append(Operation(k, scopes_of(node, modules), reads, results, _kind(node), operands))
    return nested(operations, [o.name for o in graph.output])


def scopes_of(node: Any, names: Collection[str]) -> tuple[Scope, ...]:
    """Return the modules around a node, outermost first; ``names`` are those of all modules with weights."""

    def join(outer: str, name: str) -> str:
        # PyTorch writes the third layer of a Sequential 'mlp' as /mlp/mlp.2, and its weight as mlp.2.weight
        full, parent = f"{outer}.{name}", outer.rpartition(".")[2]
        repeats = name.startswith(f"{parent}.") and full not in names
        return f"{outer}.{name.removeprefix(f'{parent}.')}" if repeats else full

    return tuple(Scope(path) for path in accumulate(module_of(node.name), join))


def modules_with_weights(graph: Any) -> set[str]:
    """Return the paths of modules in the names of weights."""
    return {name for t in graph.initializer for name in accumulate(t.name.split(".")[:-1], lambda a, b: f"{a}.{b}")}


def operands_of(node: Any) -> Iterator[str]:
    """Yield the names that a node and its inner graphs read."""
    yield from node.input
    for a in node.attribute:
        for inner in [*([a.g] if a.HasField("g") else []), *a.graphs]:
            for child in inner.node:
                yield from operands_of(child)
            yield from (o.name for o in inner.output)


def _kind(node: Any) -> str:
    if node.op_type == "Gemm":
        attributes = {a.name: a.f or a.i for a in node.attribute}
        is_linear = {"alpha": 1.0, "beta": 1.0, "transB": 0, **attributes} == {"alpha": 1.0, "beta": 1.0, "transB": 1}
        return "linear" if is_linear else ""
    return KINDS.get(node.op_type, "") if not node.domain else ""


def module_names(graph: Any, variables: Sequence[str]) -> dict[str, str]:
    """Return names for weights that the exporter named by a number, as in ``onnx::MatMul_123``: of their module.

    A weight that several modules read, such as that of a tied head, has the name of the first.
    """
    modules, used_names = modules_with_weights(graph), set(variables)
    source = {n.output[0]: n.input[0] for n in graph.node if n.op_type == "Identity"}  # copies of shared weights
    scopes: dict[str, tuple[Scope, ...]] = {}
    for node in graph.node:
        for name in operands_of(node):
            if around := scopes_of(node, modules):
                scopes.setdefault(source.get(name, name), around)
    names: dict[str, str] = {}
    for name in variables:
        if name.startswith("onnx::") and name in scopes:
            stem = f"{scopes[name][-1].path}.weight"
            names[name] = next(full for k in count() if (full := f"{stem}_{k}" if k else stem) not in used_names)
            used_names.add(names[name])
    return names


class GraphRun(Run):
    """One run over an ONNX graph; ``import_node`` imports the node of a position."""

    def __init__(self, root: ImportedLayer, values: dict[str, Any], import_node: Callable[[int], None]) -> None:
        super().__init__(root, values)
        self.import_node = import_node

    def execute(self, source: int) -> None:
        self.import_node(source)
