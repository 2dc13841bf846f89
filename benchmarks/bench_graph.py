"""Cost per node of the graph and its core transforms, and its growth from 100 to 50,000 nodes.

``python benchmarks/bench_graph.py``; ``--json`` for a script. All steps run interleaved in one process; the
best processor time of several rounds counts, garbage collection included (it makes large graphs more expensive per
node: switched off, the cost per node does not grow). The exponent is the slope from 1,000 to 50,000 nodes on doubly
logarithmic axes: 1.0 is linear.
"""

from __future__ import annotations

import gc
import json
import math
import sys
import time
from collections.abc import Callable
from typing import Any

import mithril.ops as ops
from mithril.derivatives import gradients
from mithril.graph import Builder, Graph, Origin, decompose, parse, structural_hash, verify
from mithril_passes.cleaning.cleanup import common_subexpression, constant_folding, dead_code_elimination

SIZES = (100, 1_000, 10_000, 50_000)
ROUNDS = {100: 15, 1_000: 9, 10_000: 3, 50_000: 2}
PER_LAYER = 7


def build(nodes: int) -> Graph:
    """Residual layers with a composite each, a third of their parameters shared; about ``nodes`` nodes."""
    with Builder() as b:
        x = b.input("x", (8, 16))
        weight = b.param("w", (16, 16))
        for k in range(nodes // PER_LAYER):
            with b.at(Origin(f"net.layers.{k}", "model.py", k % 100 + 1)):
                bias = b.param(f"layers.{k}.b", (16,))
                h = ops.square(x @ weight + bias)
                h = h / (ops.sum(h, axis=1, keepdims=True) + 1.0)
                x = x + ops.tanh(h)
    return b.build({"y": x})


def clean(graph: Graph) -> Graph:
    return dead_code_elimination(common_subexpression(constant_folding(graph)))


def steps(nodes: int) -> dict[str, tuple[int, Callable[[], Any]]]:
    """Return each step with the number of nodes that it processes."""
    graph = build(nodes)
    text = str(graph)
    backward = gradients(graph)
    n, num_total = len(graph.nodes), len(backward.nodes)
    return {
        "build": (n, lambda: build(nodes)),
        "verify": (n, lambda: verify(graph)),
        "print": (n, lambda: str(graph)),
        "parse and verify": (n, lambda: parse(text)),
        "structural hash": (n, lambda: structural_hash(graph)),
        "decompose": (n, lambda: decompose(graph, lambda node: not node.op.composite)),
        "differentiate": (n, lambda: gradients(graph)),
        "clean forward and backward": (num_total, lambda: clean(backward)),
        "edit: freeze after replacing every tenth": (n, lambda: edited(graph)),
    }


def edited(graph: Graph) -> Graph:
    editor = graph.edit()
    for k, node in enumerate(graph.nodes):
        if k % 10 == 0:
            with editor.before(node):
                replacement = ops.neg(ops.neg(node.operands[0])) if node.operands else None
            if replacement is not None:
                operands = (replacement, *node.operands[1:])
                editor.replace_node(node, node.replaced(operands=operands))
    return editor.freeze()


def measure() -> dict[str, dict[int, float]]:
    """Seconds per node by step and size."""
    timings: dict[str, dict[int, float]] = {}
    for size in SIZES:
        cases = steps(size)
        for _ in range(ROUNDS[size]):
            for name, (nodes, call) in cases.items():
                gc.collect()
                start = time.process_time()
                result = call()
                seconds = (time.process_time() - start) / nodes
                del result
                row = timings.setdefault(name, {})
                row[size] = min(seconds, row.get(size, math.inf))
    return timings


def exponent(row: dict[int, float]) -> float:
    """Growth of the whole time with the number of nodes."""
    a, b = SIZES[1], SIZES[-1]
    return 1 + math.log(row[b] / row[a]) / math.log(b / a)


def main() -> None:
    seconds = measure()
    if "--json" in sys.argv:
        rows = {name: {**row, "exponent": exponent(row)} for name, row in seconds.items()}
        print(json.dumps(rows, indent=2))
        return
    width = max(map(len, seconds))
    print(f"{'µs per node':<{width}}" + "".join(f"{size:>10,}" for size in SIZES) + f"{'exponent':>10}")
    for name, row in seconds.items():
        print(f"{name:<{width}}" + "".join(f"{1e6 * row[s]:>10.1f}" for s in SIZES) + f"{exponent(row):>10.2f}")


if __name__ == "__main__":
    main()
