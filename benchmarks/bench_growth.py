"""Growth of costs with size: transforms of graphs and passes per node, building and compiling of models with depth.

``python benchmarks/bench_growth.py [graph] [models] [passes]``: processor time, the best of several rounds in one
process, garbage collection included (it makes large graphs more expensive per node: switched off, the cost per node
does not grow). The exponent is the slope of the complete time on doubly logarithmic axes, without the least size of
graphs and models, whose fixed costs count: 1.0 is linear.
"""

from __future__ import annotations

import gc
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import harness
from gpt import gpt

import mithril as ml
import mithril.ops as ops
from mithril import plugins
from mithril.compiler import installed
from mithril.derivatives import gradients
from mithril.graph import Builder, Graph, Origin, decompose, parse, structural_hash, verify
from mithril.models import Linear, Model, Relu
from mithril.passes import PassContext, PassManager
from mithril_passes.cleaning.cleanup import common_subexpression, constant_folding, dead_code_elimination

Steps = dict[str, tuple[int, Callable[[], Any]]]  # the nodes that a step processes, and the step


def grown(
    title: str, sizes: Sequence[int], steps: Callable[[int], Steps], rounds: Sequence[int], first: int = 1
) -> None:
    """Print seconds of each step, or microseconds per node if it has nodes, and exponents from the ``first`` size."""
    rows: dict[str, list[tuple[int, float]]] = {}
    for size, count in zip(sizes, rounds, strict=True):
        cases = steps(size)
        best = dict.fromkeys(cases, math.inf)
        for _ in range(harness.ROUNDS or count):
            for name, (_, call) in cases.items():
                gc.collect()
                start = time.process_time()
                result = call()
                best[name] = min(best[name], time.process_time() - start)
                del result
        for name, (nodes, _) in cases.items():
            rows.setdefault(name, []).append((nodes, best[name]))
    if "--json" in sys.argv:
        print(json.dumps({title: rows}, indent=2))
        return
    print(f"{title:<40}" + "".join(f"{size:>10,}" for size in sizes) + f"{'exponent':>10}")
    for name, row in rows.items():
        cells = "".join(f"{1e6 * s / n:>10.1f}" if n else f"{s:>9.3f}s" for n, s in row)
        slope = math.log(row[-1][1] / row[first][1]) / math.log(sizes[-1] / sizes[first])
        print(f"{name:<40}{cells}{slope:>10.2f}", flush=True)


# -- graphs -----------------------------------------------------------------------------------------------------------
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


def graph_steps(nodes: int) -> Steps:
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


def graph() -> None:
    grown("graphs, us per node", (100, 1_000, 10_000, 50_000), graph_steps, (15, 9, 3, 2))


# -- models -----------------------------------------------------------------------------------------------------------
def perceptron(depth: int) -> Model:
    model = Model()
    for _ in range(depth):
        model += Linear(16, 16)
        model += Relu()
    return model


def models() -> None:
    def steps(build: Callable[[int], Model], width: int) -> Callable[[int], Steps]:
        def of_depth(depth: int) -> Steps:
            shapes = {"input": [None, width]}
            compiled = lambda: ml.compile(build(depth), "numpy", shapes=shapes)  # noqa: E731
            return {"build": (0, lambda: build(depth)), "build and compile": (0, compiled)}

        return of_depth

    small = {"vocabulary": 64, "length": 32, "heads": 2, "features": 16}
    grown("Linear + Relu layers", (10, 50, 200, 1000), steps(perceptron, 16), (3, 3, 3, 2))
    grown("GPT blocks", (1, 4, 12, 24, 48), steps(lambda n: gpt(layers=n, **small), 32), (3, 3, 3, 3, 2))


# -- passes -----------------------------------------------------------------------------------------------------------
def chain(nodes: int) -> Graph:
    """Build a deep graph on which every pass finds some work."""
    with Builder("chain") as b:
        x = b.input("x", (4, 16))
        w, c = b.param("w", (16, 16)), b.param("c", (16,))
        y = x
        for k in range(nodes // 5):
            y = ops.relu(ops.linear(y, w, c)) if k % 2 else ops.layer_norm(y, c, c)
            y = ops.add(ops.mul(ops.tanh(y), 0.5), x)
    return b.build({"y": y})


def passes() -> None:
    """Run each pass on graphs of these sizes."""
    names = [n for n, entry in plugins.passes().items() if entry.spec.level in ("low", "medium", "high")]

    def steps(size: int) -> Steps:
        graph = chain(size)

        def run(name: str) -> Callable[[], Any]:
            return lambda: PassManager([installed(name)], check="none").run(graph, PassContext())

        return {name: (size, run(name)) for name in names}

    grown("passes, us per node", (1_000, 5_000, 20_000, 50_000), steps, (3, 3, 3, 3), first=0)


PARTS = {"graph": graph, "models": models, "passes": passes}

if __name__ == "__main__":
    harness.run_parts(__doc__, PARTS)
