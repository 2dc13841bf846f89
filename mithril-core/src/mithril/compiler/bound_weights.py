"""Expressions of bound parameters, which ``bind`` computes once instead of each call: ``inference=True``.

A program is split after the passes, and again after decomposition, which transposes weights. An early graph depends on
parameters, statistics and constants only; its results are parameters of the late graph, which calls run. The reference
implementations compute them, as constant folding does for ``static_inference=True``: both give the same numbers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from mithril.backend import Backend, BuildOptions, format_bytes, nbytes
from mithril.compiler.option_table import declared_options
from mithril.compiler.pass_pipeline import optimization_level
from mithril.compiler.program import BoundArrays, Program
from mithril.graph import LEVELS, Builder, Decisions, Graph, Input, Node, Value, evaluate, numel, result, to_text
from mithril.ops import FOLD_LIMIT, is_foldable, transpose
from mithril.system import fingerprint


def folds_parameters(backend: Backend, options: Mapping[str, Any], decisions: Decisions) -> bool:
    """Whether programs with these options compute expressions of bound parameters in advance."""
    switches = [options["optimizations"].get(name) for name in ("constant_folding", "constant-folding")]
    if not options["inference"] or options["static_inference"] or False in switches:
        return False
    if optimization_level(options) == LEVELS[0]:
        return False
    return backend.has_whole_parameters(BuildOptions(options, inference=True, decisions=decisions))


def is_built_at_once(options: Mapping[str, Any]) -> bool:
    """Whether options request a result or an error of the first program when the model is compiled."""
    steps = [option.name for option in declared_options() if option.needs_steps]
    return any(options[name] for name in ("file_path", "max_memory_gb", "strict", "target_hardware", *steps))


def split_off(graph: Graph, backend: Backend, statistics: Collection[str], early: list[Graph]) -> Graph:
    """Append the expressions of parameters and ``statistics`` to ``early``, and return the rest of the graph.

    The rest keeps views of parameters, which cost nothing, except transposes: products read the others faster.
    """
    parameters = {i.value for i in graph.inputs if i.role == "param" or i.name in statistics}
    limit = max([FOLD_LIMIT, *(int(numel(v.shape)) for v in parameters)])
    dependent: set[Value | None] = set(parameters)
    available: set[Value | None] = dependent | {i.value for i in graph.inputs if i.role == "constant"}
    candidates: list[Node] = []
    returned = set(graph.outputs)  # results are arrays of the caller
    for node in graph.nodes:
        if not node.operands and not node.regions and not node.op.opaque:
            available.update(node.results)
        elif (
            is_foldable(node, available, limit)
            and not dependent.isdisjoint(node.operands)
            and returned.isdisjoint(node.results)
        ):
            candidates.append(node)
            available.update(node.results)
            dependent.update(node.results)
    selected = set(candidates)
    read = returned | {v for node in graph.nodes if node not in selected for v in node.operands if v is not None}
    for node in reversed(candidates):
        if backend.is_view(node) and node.op is not transpose and not read.isdisjoint(node.results):
            selected.discard(node)
            read.update(v for v in node.operands if v is not None)
    computed = [v for node in candidates if node in selected for v in node.results if v in read]
    if not computed:
        return graph
    # Names of values may repeat, but not those of inputs.
    names = Builder(graph.name)
    for i in graph.inputs:
        names.unique(i.name)
    passed = {v: Value(names.unique(v.name), v.type) for v in computed}
    results = tuple(result("output", passed[v].name, v) for v in computed)
    late = graph.replaced(
        inputs=(*graph.inputs, *(Input(v, "param") for v in passed.values())),
        nodes=tuple(_with_operands(node, passed) for node in graph.nodes if node not in selected),
    )
    early.append(_needed(graph.replaced(results=results, guards=()), roles=()))
    return _needed(late, roles=("input",))


def marked(graph: Graph) -> Graph:
    """Return the graph with parameters marked as those of one binding, which one backend may store in another form."""
    inputs = tuple(replace(i, tags={**i.tags, "bound": True}) if i.role == "param" else i for i in graph.inputs)
    return graph.replaced(inputs=inputs)


def _with_operands(node: Node, values: Mapping[Value, Value]) -> Node:
    operands = tuple(None if v is None else values.get(v, v) for v in node.operands)
    return node if operands == node.operands else node.replaced(operands=operands)


def _needed(graph: Graph, *, roles: Collection[str]) -> Graph:
    """Return the graph without nodes that its results do not need, and without such inputs of other roles."""
    needed = set(graph.outputs)
    nodes = []
    for node in reversed(graph.nodes):
        if not needed.isdisjoint(node.results):
            nodes.append(node)
            needed.update(v for v in node.operands if v is not None)
    inputs = tuple(i for i in graph.inputs if i.value in needed or i.role in roles)
    return graph.replaced(nodes=tuple(reversed(nodes)), inputs=inputs)


def note_early(early: Sequence[Graph], decisions: Decisions) -> None:
    """Record the expressions of parameters that calls do not compute."""
    count = sum(bool(node.operands) for graph in early for node in graph.nodes)
    size = sum(nbytes(v.type) for graph in early for v in graph.outputs)
    decisions.record(
        "choice", f"inference=True: bind computes {count} operations of parameters, to {format_bytes(size)} of weights"
    )


def rebound(program: Program, number: int, arrays: BoundArrays) -> Program:
    """Return the program with the weights of a binding."""
    request = replace(program.request, binding=number, bound=arrays)
    result = replace(program, request=request)
    key = _key(result)
    result.weights = program.pack(plain_weights(result), arrays.forms.setdefault(key, WeakValueDictionary()))
    identities = set(map(id, result.weights.values()))
    if any(id(x) not in identities for x in arrays.computed[key].values()):
        del arrays.computed[key]  # the program reads other forms of them
    return result


def plain_weights(program: Program) -> dict[str, Any]:
    """Return the parameters of a program by name: bound ones, and results of their expressions."""
    arrays = program.request.bound
    assert arrays is not None
    key = _key(program)
    computed = arrays.computed.get(key)
    if computed is None:
        computed = arrays.computed[key] = _results([graph.get() for graph in program.folded], program, arrays)
    weights = {**arrays.params, **computed}
    return {name: weights[name] for name in program.interface.params}


def _key(program: Program) -> str:
    return fingerprint(*(to_text(graph.get(), origins=False) for graph in program.folded))


def _results(graphs: Sequence[Graph], program: Program, arrays: BoundArrays) -> dict[str, Any]:
    """Return the results of graphs that calls read: a graph may read results of those before it."""
    values = {**arrays.params, **arrays.statistics}
    names: dict[str, None] = {}
    for graph in graphs:
        # by the backend: MLX has no buffer of bfloat16 that NumPy could read
        results = evaluate(graph, {i.name: program.backend.to_numpy(values[i.name]) for i in graph.arguments})
        values |= {name: program.backend.array(np.asarray(x, order="C")) for name, x in results.items()}
        names |= dict.fromkeys(results)
    return {name: values[name] for name in names if name in program.interface.params}
