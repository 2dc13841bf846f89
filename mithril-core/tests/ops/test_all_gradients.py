"""Every operation's gradient, on its own samples, against central differences in float64; some of second order."""

from __future__ import annotations

import numpy as np
import pytest

from mithril.autodiff import gradients
from mithril.graph.registry import operations
from mithril.ops.evaluate import evaluate
from mithril.testing.cases import Case
from mithril.types import float64

STEP = 1e-5


def cases():
    for name, op in sorted(operations().items()):
        if name in ("fake_quantize", "stop_gradient"):  # straight-through, and cut: not what differences measure
            continue
        if "mithril/ops/" not in op.declared_at.replace("\\", "/"):  # a plugin's own
            continue
        for number, sample in enumerate(op.samples):
            case = Case(op, sample, number, float64)
            try:
                graph = case.graph()
            except Exception:
                continue
            floats = [i for i in graph.inputs if i.type.dtype is float64 and 0 < np.prod(i.type.shape) <= 200]
            if sample.gradient and floats and any(v.dtype is float64 for v in graph.outputs):
                yield case


CASES = list(cases())


def differentiated(graph):
    of = [n for n, v in zip(graph.output_names, graph.outputs) if v.dtype is float64]
    wrt = [i.name for i in graph.inputs if i.type.dtype is float64]
    return gradients(graph, of, wrt), of, wrt


def cotangents(graph, of, seed=0):
    rng = np.random.default_rng(seed)
    types = dict(zip(graph.output_names, graph.outputs))
    return {f"grad/{n}": rng.uniform(0.5, 1.5, types[n].shape) for n in of}


def check(graph, inputs):
    backward, of, wrt = differentiated(graph)
    weights = cotangents(graph, of)
    found = evaluate(backward, {**inputs, **weights})

    def loss(changed):
        made = evaluate(graph, changed)
        return sum(float((made[n] * weights[f"grad/{n}"]).sum()) for n in of)

    rng = np.random.default_rng(1)
    for name in wrt:
        gradient, x = found[f"grad/{name}"], inputs[name]
        assert gradient.shape == x.shape
        for flat in rng.permutation(x.size)[:6]:
            at = np.unravel_index(flat, x.shape)
            up, down = x.copy(), x.copy()
            up[at] += STEP
            down[at] -= STEP
            measured = (loss({**inputs, name: up}) - loss({**inputs, name: down})) / (2 * STEP)
            if np.isfinite(measured):  # outside of some operations' domain there is no difference to measure
                assert gradient[at] == pytest.approx(measured, rel=2e-4, abs=2e-6), f"{name}{list(map(int, at))}"


@pytest.mark.parametrize("case", CASES, ids=[c.id for c in CASES])
def test_gradient(case):
    check(case.graph(), case.inputs())


SECOND = (
    "exp",
    "tanh",
    "mul",
    "div",
    "matmul",
    "softmax",
    "layer_norm",
    "gelu",
    "silu",
    "sigmoid",
    "linear",
    "logsumexp",
)


@pytest.mark.parametrize("name", SECOND)
def test_second_order(name):
    case = next(c for c in CASES if c.op.name == name)
    backward, _, wrt = differentiated(case.graph())
    inputs = {**case.inputs(), **cotangents(case.graph(), list(case.graph().output_names))}
    again = backward.replaced(
        outputs=tuple(v for n, v in zip(backward.output_names, backward.outputs) if n == f"grad/{wrt[0]}"),
        output_names=("s",),
    )
    check(again, {i.name: np.asarray(inputs[i.name], np.float64) for i in again.arguments})
