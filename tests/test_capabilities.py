"""Claims of backends in use: training gives arrays over, preferred forms exist, identities name the settings."""

from __future__ import annotations

import os

import numpy as np
import pytest

import mithril as ml
from mithril import plugins
from mithril.backend import Form
from mithril.graph import Builder
from mithril.models import Linear, Model, Relu
from mithril.passes import PassContext
from mithril.system import time_interleaved
from mithril_passes.operation_forms.kernel_selection import OWN, ROUNDS, SECONDS, _runner
from mithril_passes.operation_forms.op_variants import WAYS, variants_of


def perceptron():
    model = Model()
    model += Linear(16)(input="input")
    model += Relu()
    model += Linear(3)
    return model


@pytest.mark.parametrize("backend", sorted(plugins.backends()))
def test_a_training_step_gives_its_arrays_over_where_the_backend_donates(backend):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(8, 5)).astype(np.float32), rng.integers(0, 3, 8).astype(np.int32)
    data = ml.DataLoader((x, y), batch_size=8)
    trainer = ml.Trainer(perceptron(), ml.Adam(1e-3), loss="cross_entropy", backend=backend, progress=False)
    trainer.fit(data, epochs=1)
    engine = trainer.engine
    before = dict(engine.arrays)
    copies = {n: np.array(engine.backend.to_numpy(a)) for n, a in before.items()}
    trainer.fit(data, epochs=1)
    reused = [n for n, a in before.items() if _is_gone(engine.backend, a, copies[n])]
    moments = [n for n in before if n.startswith("optimizer/")]
    assert moments
    assert set(moments) <= set(reused) or not engine.backend.capabilities.donates, f"kept: {set(moments) - set(reused)}"


def _is_gone(backend, array, before):
    try:
        return not np.array_equal(backend.to_numpy(array), before)
    except Exception:  # each framework has its own error for an array that was donated
        return True


@pytest.mark.parametrize("backend", sorted(plugins.backends()))
def test_passes_write_every_form_that_a_backend_prefers(backend):
    for op, forms in plugins.backend_class(backend)().capabilities.prefers.items():
        assert set(forms) <= {way.name for way in WAYS[op.name]}, op.name


CHANNELS_LAST = [n for n in sorted(plugins.backends()) if plugins.backend_class(n)().capabilities.channels_last]


@pytest.mark.parametrize("backend", CHANNELS_LAST)
def test_images_between_operations_with_channels_last_keep_that_order(backend):
    with Builder() as b:
        x, w = b.input("x", (2, 8, 6, 6)), b.param("w", (8, 8, 3, 3))
        y = ml.ops.relu(ml.ops.conv(x, w, padding=((1, 1), (1, 1))))
        z = ml.ops.conv(y, w, padding=((1, 1), (1, 1)))
        graph = b.build({"y": ml.ops.relu(z + y)})
    results = []
    for level in ("low", "medium"):
        compiled = ml.compile(graph, backend, inference=True, optimization_level=level)
        x = np.random.default_rng(0).standard_normal((2, 8, 6, 6), np.float32)
        results.append(np.asarray(compiled.evaluate(compiled.randomize_params(0), {"x": x})["y"]))
        additions = [node.result.shape for node in compiled.graph.nodes if node.op is ml.ops.add]
        assert additions == [(2, 8, 6, 6) if level == "low" else (2, 6, 6, 8)]
    np.testing.assert_allclose(*results, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", sorted(plugins.backends()))
def test_arrays_of_numpy_are_returned_unchanged(backend):
    array = np.arange(3, dtype=np.float32)
    np.testing.assert_array_equal(plugins.backend_class(backend)().to_numpy(array), [0, 1, 2])
    assert array.flags.writeable


def test_tuning_tries_no_threads_where_they_are_ignored():
    x = np.ones((4, 5), np.float32)
    tuned = ml.tune(perceptron(), ml.JaxBackend(), {"input": x}, seconds=0.02, store=False)
    assert "num_threads" not in {knob for knob, *_ in tuned.tried}


IMAGE = (4, 64, 28, 28)
NODES = {  # a node of each operation to which a form applies
    Form.MATVEC: {"linear": (((1, 512), (512, 512), (512,)), {})},
    Form.POINTWISE_MATMUL: {
        "conv": ((IMAGE, (64, 64, 1, 1)), {}),
        "conv_input_grad": ((IMAGE, (64, 64, 1, 1)), {"shape": IMAGE}),
        "conv_weight_grad": ((IMAGE, IMAGE), {"shape": (64, 64, 1, 1)}),
    },
    Form.DEPTHWISE_SHIFTS: {
        "conv": ((IMAGE, (64, 1, 3, 3)), {"groups": 64, "padding": ((1, 1), (1, 1))}),
        "conv_input_grad": ((IMAGE, (64, 1, 3, 3)), {"groups": 64, "padding": ((1, 1), (1, 1)), "shape": IMAGE}),
        "conv_weight_grad": ((IMAGE, IMAGE), {"groups": 64, "padding": ((1, 1), (1, 1)), "shape": (64, 1, 3, 3)}),
    },
}
# Speed over that of the operation's own form. Next to two busy processes on two cores, MLX's two operations for a
# vector, which another thread runs, take 1.7 times as long as its one; alone as long.
FAR_SLOWER = 0.4


def speedup(op, form, backend):
    """Return the time of the operation's own form over that of another form, the best of three measurements."""
    shapes, attributes = NODES[form][op.name]
    windows = {} if op is ml.ops.linear else {"stride": (1, 1), "padding": ((0, 0), (0, 0)), "dilation": (1, 1)}
    with Builder() as b:
        y = op(*(b.input(f"x{k}", shape) for k, shape in enumerate(shapes)), **{**windows, **attributes})
    node = b.build({"y": y}).nodes[-1]
    (variant,) = (v for v in variants_of(node) if v.name == form)
    context = PassContext(backend=backend)
    calls = {name: _runner(node, one, backend, context) for name, one in ((OWN, None), (form, variant))}
    measurements = (time_interleaved(calls, backend.synchronize, seconds=SECONDS, rounds=ROUNDS) for _ in range(3))
    return max(times[OWN] / times[form] for times in measurements)


@pytest.mark.parametrize(
    ("backend", "op", "form"),
    [
        pytest.param(name, op, form, id=f"{name}-{op.name}-{form}")
        for name in sorted(plugins.backends())
        for op, forms in plugins.backend_class(name)().capabilities.prefers.items()
        for form in forms
    ],
)
def test_a_preferred_form_is_not_far_slower(backend, op, form):
    if backend == "jax" and "xla_backend_optimization_level=0" in os.environ.get("XLA_FLAGS", ""):
        pytest.skip("XLA does not optimize here; the environment 'tpu' of tox runs this test")
    assert speedup(op, form, plugins.backend_class(backend)()) > FAR_SLOWER
