"""Kernel selection: measure the variants of each large operation on the backend, and cache the fastest.

Variants that are faster alone are used only if the whole graph is faster with them, too.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from mithril import Graph, Node, pass_
from mithril.backend import Backend, BuildOptions
from mithril.graph import Builder, Editor, OptionError, flops, is_product, numel, structural_hash
from mithril.passes import PassContext, random_arguments
from mithril.system import (
    Store,
    fingerprint,
    package_version_key,
    read_measured,
    save_measured,
    this_machine,
    time_interleaved,
)
from mithril_passes.operation_forms.op_variants import Variant, is_measurable, variants_of
from mithril_passes.operation_forms.specialization import targets_own_device

OWN = "as it is"
MARGIN = 0.1  # of the time: smaller gains are noise
LEAST_GAIN = 0.01  # of the time of the whole graph
SECONDS, ROUNDS = 0.05, 9  # for each measured operation
SMALL = 1 << 14  # elements read and multiplied; below, call overhead dominates
MOST = 64  # measured operations per compilation, the largest first


@pass_(name="kernel-choice", exact=False)
def kernel_choice(graph: Graph, context: PassContext) -> Graph:
    """Measure variants of the large operations and use those that are faster on this machine."""
    backend = context.backend
    if not isinstance(backend, Backend) or not (backend.capabilities.local and targets_own_device(context)):
        return graph
    store = Store(context.option("cache_dir"))
    groups: dict[str, list[Node]] = {}
    for node in graph.nodes:
        if node.tags.get("backend") is None and is_measurable(node) and _size(node) >= SMALL and variants_of(node):
            groups.setdefault(_key(node, backend), []).append(node)
    editor: Editor | None = None
    selected: list[tuple[Node, Variant]] = []
    for key, nodes in sorted(groups.items(), key=lambda item: -_size(item[1][0]))[:MOST]:
        choice = _choice(key, nodes[0], backend, store, context)
        if choice is not None:
            selected.append((nodes[0], choice))
            editor = editor or graph.edit()
            for node in nodes:
                current = editor.producer(node.result) or node  # with replaced operands
                with editor.before(current):
                    editor.replace_value(node.result, choice.make(current, *current.operands))
                editor.erase_dead(current)
    if editor is None:
        return graph
    after = editor.freeze()
    gain = _gain(graph, after, backend, store, context) if _is_timeable(graph) and _is_timeable(after) else None
    for node, choice in selected:
        sizes = ", ".join(str(v.type) for v in node.operands if v is not None)
        if gain is None:
            text = f"'{node.op.name}' of {sizes} stays: {choice.name} is faster alone, but the program cannot be timed"
        elif gain <= 1:
            text = f"'{node.op.name}' of {sizes} stays: {choice.name} is faster alone, but the program is not"
        else:
            text = f"'{node.op.name}' of {sizes} as {choice.name}: the program is {gain:.2f} times as fast, measured"
        context.record("choice", text, node.origin)
    return after if gain is not None and gain > 1 else graph


def _is_timeable(graph: Graph) -> bool:
    """Whether sizes are static, and all nodes are for this backend."""
    return all(n.tags.get("backend") is None and all(v.type.is_static for v in n.results) for n in graph.nodes)


def _gain(before: Graph, after: Graph, backend: Backend, store: Store, context: PassContext) -> float:
    """Return how many times as fast a graph is with the selected variants; 1 if it is not clearly faster."""
    key = fingerprint("kernels of a graph", structural_hash(before), structural_hash(after), _environment(backend))
    gain = read_measured(store, key)
    if gain is None:
        calls = {name: _caller(graph, backend, context) for name, graph in ((OWN, before), ("selected", after))}
        times = time_interleaved(calls, backend.synchronize, seconds=SECONDS, rounds=ROUNDS)
        gain = times[OWN] / times["selected"] if times.is_faster("selected", OWN, LEAST_GAIN) else 1.0
        _save(store, key, gain, context)
    return float(gain)


def _save(store: Store, key: str, result: Any, context: PassContext) -> None:
    try:
        save_measured(store, key, result)
    except OptionError as error:  # if the directory cannot be written, the next compilation measures again
        context.record("choice", f"the measurement cannot be stored: {error.what}")


def _size(node: Node) -> int:
    """Return the multiply-adds of a product, or the elements that another operation accesses."""
    if is_product(node):
        return int(flops(node)) // 2
    return sum(int(numel(v.shape)) for v in (*node.operands, *node.results) if v is not None)


def _key(node: Node, backend: Backend) -> str:
    """Return a key of everything that the result depends on."""
    types = [None if v is None else str(v.type) for v in node.operands]
    names = [w.name for w in variants_of(node)]
    return fingerprint("kernel", node.op.name, dict(node.attributes), types, names, _environment(backend))


def _environment(backend: Backend) -> list[Any]:
    """Return the machine, the backend and the versions, on which times depend."""
    package = type(backend).__module__.partition(".")[0]
    machine = [*this_machine(), os.environ.get("OMP_NUM_THREADS")]
    return [backend.identity(), machine, *(package_version_key(p) for p in ("mithril", "mithril_passes", package))]


def _choice(key: str, node: Node, backend: Backend, store: Store, context: PassContext) -> Variant | None:
    """Return the fastest variant, or None if the operation itself is fastest."""
    candidates: dict[str, Variant] = {w.name: w for w in variants_of(node)}
    best = read_measured(store, key)
    if best not in (OWN, *candidates):
        best = fastest(node, candidates.values(), backend, context)
        _save(store, key, best, context)
    return candidates.get(best)


def fastest(node: Node, candidates: Iterable[Variant], backend: Backend, context: PassContext) -> str:
    """Return the name of the fastest variant, timed interleaved; the operation itself unless one is clearly faster."""
    calls = {OWN: _runner(node, None, backend, context)}
    for one in candidates:
        calls[one.name] = _runner(node, one, backend, context)
    times = time_interleaved(calls, backend.synchronize, seconds=SECONDS, rounds=ROUNDS)
    best = min(times, key=lambda name: times[name])
    return best if times.is_faster(best, OWN, MARGIN) else OWN


def _runner(node: Node, variant: Variant | None, backend: Backend, context: PassContext) -> Any:
    """Return a call of the backend's program for this operation only."""
    op = node.op
    with Builder(op.name) as b:
        operands = [None if v is None else b.input(f"x{k}", v.shape, v.dtype) for k, v in enumerate(node.operands)]
        y = op(*operands, **node.attributes) if variant is None else variant.make(node, *operands)
    return _caller(b.build({"y": y}), backend, context)


def _caller(graph: Graph, backend: Backend, context: PassContext) -> Any:
    """Return a call of the backend's program for a graph on random arguments."""
    arguments = {name: backend.array(a) for name, a in random_arguments(graph).items()}
    options = BuildOptions(jit=context.option("jit"), num_threads=context.option("num_threads"))
    program = backend.build(backend.decomposed(graph, options), options)
    return lambda: program(arguments, arguments)
