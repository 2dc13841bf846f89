"""Values that are compared with their own maximum are computed once, although XLA computes cheap values again."""

from __future__ import annotations

import numpy as np
import pytest

import mithril as ml
from mithril import ops
from mithril.backend import compared_with_itself, with_stored_operands
from mithril.graph import Builder
from mithril.passes import random_arguments
from mithril_jax.backend import OWN_COMPARISONS
from mithril_jax.execution import PASSES_AGAINST_BARRIERS
from mithril_testing.levels import REFERENCE, Levels
from mithril_testing.random_graphs import WIDE, random_graph


@pytest.mark.parametrize("level", ["medium", "high"])
@pytest.mark.parametrize("options", [{}, {"xla_optimization_level": 0}], ids=["optimized", "not optimized"])
def test_gradients_of_a_maximum_find_it(level, options):
    """Reduce a convolution written as sums of products, which XLA fuses into two kernels."""
    graph = random_graph(271)
    levels = Levels(graph, ml.JaxBackend(), **options)
    assert levels.differences(level, random_arguments(graph, 271), gradient=True, base=REFERENCE) == []


def computed(x):
    """Return a value of several roundings, which XLA may fuse into each reader."""
    return ops.tanh(x * 1.7 + 0.3) * x + x * x * 0.21


@pytest.mark.parametrize(
    "compare",
    [
        lambda v: ops.equal(v, ops.max(v, axis=0)),
        lambda v: ops.equal(v - ops.max(v, axis=1, keepdims=True), 0.0),
        lambda v: ops.less(-v, ops.flip(v, axis=(0,))),
        lambda v: ops.greater_equal(v, ops.cummax(v, axis=0)),
        lambda v: ops.equal(ops.transpose(v, perm=(1, 0)), ops.sort(v, axis=0)),
    ],
)
def test_values_compared_with_their_own_elements_are_stored(compare):
    with Builder() as b:
        x = b.input("x", (4, 4))
        v = computed(x)
        graph = b.build({"y": compare(v)})
    assert compared_with_itself(graph) == {v}
    assert [n.op for n in with_stored_operands(graph).nodes].count(ops.barrier) == 1
    with Builder() as b:
        graph = b.build({"y": compare(b.input("x", (4, 4)))})
    assert not compared_with_itself(graph), "an argument is stored in any case"


def test_gradients_of_max_pool_find_the_maximum():
    """Pool a convolution written as sums of products; with these settings XLA computes it again for the comparison."""
    graph = random_graph(3294, sizes=WIDE)
    graph = graph.replaced(results=(graph.results[3],))
    settings = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}
    levels = Levels(graph, ml.JaxBackend(), jit_options={"compiler_options": settings})
    assert levels.differences("medium", random_arguments(graph, 3294), gradient=True, base=REFERENCE) == []


@pytest.mark.parametrize(
    "compute",
    [
        lambda v, w: ops.equal(v, ops.max(w, axis=0)),  # two computations, not one
        lambda v, w: ops.greater(v, 0.0),
        lambda v, w: ops.greater(v, ops.sum(v, axis=0)),  # rounded in any case
        lambda v, w: ops.softmax(v),
        lambda v, w: ops.max_pool_grad(v, ops.full(shape=(1, 4, 4), value=1.0), kernel=(1,)),  # v is the cotangent
    ],
)
def test_other_comparisons_store_nothing(compute):
    with Builder() as b:
        x = b.input("x", (1, 4, 4))
        w = ops.exp(x)
        graph = b.build({"y": compute(computed(x), w)})
    assert with_stored_operands(graph, OWN_COMPARISONS) is graph


@pytest.mark.parametrize("where", ["program", "loop"])
def test_a_mask_of_maxima_is_never_empty(where):
    """XLA fuses the sums of products into the maximum and into the comparison, with other rounding."""

    def mask(x, w):
        v = ops.conv(x, w, groups=4, padding=((1, 1), (1, 1))) * 0.3
        return ops.cast(ops.equal(v, ops.max(v, axis=(1, 2, 3), keepdims=True)), dtype="float32")

    with Builder() as b:
        xs, w = b.input("x", (20, 2, 4, 9, 9)), b.input("w", (4, 1, 3, 3))
        if where == "loop":
            _, masks = ops.scan(lambda carry, x: (carry, mask(x, carry)), w, xs)
        else:
            masks = mask(ops.reshape(xs, shape=(40, 4, 9, 9)), w)
        counts = ops.sum(ops.reshape(masks, shape=(40, 4 * 9 * 9)), axis=1)
    compiled = ml.compile(b.build({"n": counts}), "jax", optimization_level="medium", xla_optimization_level=0)
    rng = np.random.default_rng(0)
    arrays = {"x": rng.normal(size=(20, 2, 4, 9, 9)), "w": rng.normal(size=(4, 1, 3, 3))}
    counts = compiled.evaluate({}, {n: a.astype(np.float32) for n, a in arrays.items()})["n"]
    np.testing.assert_array_equal(counts, np.ones(40))
    executable = compiled.programs[-1].executable
    assert "lax.optimization_barrier" in executable.source
    assert all(name in str(executable.call.compiler_options) for name in PASSES_AGAINST_BARRIERS)


def test_recomputed_operands_are_compared_with_their_own_maximum():
    """Gradient checkpointing saves small maxima and recomputes their operands, which XLA may round differently."""
    with Builder() as b:
        x = b.input("x", (8, 4, 9, 9))
        for k in range(4):
            tiled = ops.broadcast_to(x, shape=(8, 4, 9, 9))
            v = ops.conv(tiled, b.input(f"w{k}", (4, 1, 3, 3)), groups=4, padding=((1, 1), (1, 1)))
            x = ops.max(v * 0.9, axis=(2,), keepdims=True)
        graph = b.build({"y": ops.mean(x)})
    rng = np.random.default_rng(0)
    arrays = {i.name: rng.normal(size=i.type.shape).astype(np.float32) for i in graph.arguments}
    gradients = []
    for checkpointing in (False, True):
        options = {"gradient_checkpointing": checkpointing, "xla_optimization_level": 0}
        compiled = ml.compile(graph, "jax", optimization_level="medium", **options)
        gradients.append(compiled.evaluate({}, arrays, {"y": np.float32(1.0)}, wrt=list(arrays))[1])
    for name, expected in gradients[0].items():
        np.testing.assert_allclose(gradients[1][name], expected, rtol=1e-4, atol=1e-5, err_msg=name)


def bounded(step, x):
    return ops.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, step(s[1])), (np.int32(0), x), max_trips=3)[1]


def scanned(step, x):
    carry, rows = ops.scan(lambda carry, row: (step(carry) + row, step(row)), x[0], x)
    return carry + rows


def conditional(step, x):
    return ops.cond(ops.sum(x) > 0.0, lambda: step(x), lambda: step(-x))


FLOWS = {
    "while": bounded,
    "scan": scanned,
    "cond": conditional,
    "cond in while": lambda step, x: bounded(lambda y: conditional(step, y), x),
    "while in scan": lambda step, x: scanned(lambda y: bounded(step, y), x),
    "scan in cond": lambda step, x: conditional(lambda y: scanned(step, y), x),
}
STEPS = {
    "max of a sine": lambda y: y - ops.max(ops.sin(y)),
    "min of a product": lambda y: y * 0.5 - ops.min(y * y * 0.3 + y),
}
CASES = [("max of a sine", 3, {}), ("min of a product", 3, {}), ("max of a sine", 700, {})]
CASES += [("max of a sine", 3, {"gradient_checkpointing": True})]


@pytest.mark.parametrize("step, width, options", CASES)  # XLA treats loops over small arrays on their own
@pytest.mark.parametrize("flow", FLOWS)
def test_barriers_in_control_flow(flow, step, width, options):
    with Builder() as b:
        x = b.param("x", (2, width))
        graph = b.build({"y": FLOWS[flow](STEPS[step], x)})
    arrays = {"x": np.random.default_rng(0).normal(size=(2, width)).astype(np.float32)}
    results = {}
    for backend in ("numpy", "jax"):
        compiled = ml.compile(graph, backend, **options)
        results[backend] = compiled.evaluate(arrays, {}, output_gradients={"y": np.ones((2, width), np.float32)})[1]
    np.testing.assert_allclose(results["jax"]["x"], results["numpy"]["x"], rtol=2e-4, atol=1e-4)
