"""Kernel selection: measure the variants of each large operation on the backend, and cache the fastest."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable
from typing import Any

from mithril import Graph, Node, pass_
from mithril.backend import Backend, BuildOptions
from mithril.graph import Builder, Editor, OptionError, flops, is_product, numel
from mithril.passes import PassContext, random_arguments
from mithril.system import Store, fingerprint, package_version_key, time_interleaved
from mithril_passes.operation_forms.op_variants import Variant, is_measurable, variants_of
from mithril_passes.operation_forms.specialization import targets_own_device

OWN = "as it is"
MARGIN = 0.1  # of the time: smaller gains are noise
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
    for key, nodes in sorted(groups.items(), key=lambda item: -_size(item[1][0]))[:MOST]:
        choice = _choice(key, nodes[0], backend, store, context)
        if choice is not None:
            editor = editor or graph.edit()
            for node in nodes:
                current = editor.producer(node.result) or node  # with replaced operands
                with editor.before(current):
                    editor.replace_value(node.result, choice.make(current, *current.operands))
                editor.erase_dead(current)
    return graph if editor is None else editor.freeze()


def _size(node: Node) -> int:
    """Return the multiply-adds of a product, or the elements that another operation accesses."""
    if is_product(node):
        return int(flops(node)) // 2
    return sum(int(numel(v.shape)) for v in (*node.operands, *node.results) if v is not None)


def _key(node: Node, backend: Backend) -> str:
    """Return a key of everything that the result depends on."""
    types = [None if v is None else str(v.type) for v in node.operands]
    package = type(backend).__module__.partition(".")[0]
    machine = [platform.machine(), platform.node(), os.cpu_count(), os.environ.get("OMP_NUM_THREADS")]
    versions = [package_version_key(p) for p in ("mithril", "mithril_passes", package)]
    names = [w.name for w in variants_of(node)]
    return fingerprint(
        "kernel", node.op.name, dict(node.attributes), types, names, backend.identity(), machine, versions
    )


def _choice(key: str, node: Node, backend: Backend, store: Store, context: PassContext) -> Variant | None:
    """Return the fastest variant, or None if the operation itself is fastest."""
    candidates: dict[str, Variant] = {w.name: w for w in variants_of(node)}
    stored = _read(store.get(key))
    times = stored if stored is not None else measured(node, candidates.values(), backend, context)
    if stored is None:
        try:
            store.put(key, {"times": json.dumps(times).encode()})
        except OptionError as error:  # if the directory cannot be written, the next compilation measures again
            context.record("choice", f"the measurement cannot be stored: {error.what}")
    best = min(times, key=lambda name: times[name])
    if best not in candidates or times[best] > (1 - MARGIN) * times[OWN]:
        return None
    gain = times[OWN] / times[best]
    sizes = ", ".join(str(v.type) for v in node.operands if v is not None)
    context.record("choice", f"'{node.op.name}' of {sizes} as {best}: {gain:.2f} times as fast, measured", node.origin)
    return candidates[best]


def measured(node: Node, candidates: Iterable[Variant], backend: Backend, context: PassContext) -> dict[str, float]:
    """Return the seconds of each variant, timed interleaved."""
    calls = {OWN: _runner(node, None, backend, context)}
    for one in candidates:
        calls[one.name] = _runner(node, one, backend, context)
    return time_interleaved(calls, seconds=SECONDS, rounds=ROUNDS)


def _runner(node: Node, variant: Variant | None, backend: Backend, context: PassContext) -> Any:
    """Return a call of the backend's program for this operation only."""
    op = node.op
    with Builder(op.name) as b:
        operands = [None if v is None else b.input(f"x{k}", v.shape, v.dtype) for k, v in enumerate(node.operands)]
        y = op(*operands, **node.attributes) if variant is None else variant.make(node, *operands)
    graph = b.build({"y": y})
    inputs = {name: backend.array(a) for name, a in random_arguments(graph).items()}
    options = BuildOptions(jit=context.option("jit"), num_threads=context.option("num_threads"))
    program = backend.build(backend.decomposed(graph, options), options)

    def call() -> None:
        backend.synchronize(program({}, inputs))

    return call


def _read(parts: Any) -> dict[str, float] | None:
    try:
        times = {str(n): float(t) for n, t in json.loads(parts["times"]).items()}
    except (ValueError, KeyError, TypeError):
        return None
    return times if OWN in times else None
