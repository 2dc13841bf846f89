"""``static_inference=True``: programs hold the weights of products and convolutions and pass them as arguments."""

from __future__ import annotations

import gc
import importlib.util
import os
import subprocess
import sys
import textwrap
import weakref

import numpy as np
import pytest

import mithril as ml
from mithril.models import Conv2d, Layer, Linear, MixtureOfExperts, Model

SIZE = 256
rng = np.random.default_rng(0)


class Product(Layer):
    def build(self, x):
        return x @ self.param("w", [SIZE, SIZE])


def perceptron(count=1, size=SIZE):
    model = Model()
    for k in range(count):
        model += Linear(size, name=f"l{k}")
    return model


def compiled(model=None, rows=4, size=SIZE, **options):
    shapes = {"input": [rows, size]}
    return ml.compile(model or perceptron(), "jax", shapes=shapes, static_inference=True, **options)


def weights(count=1, size=SIZE):
    arrays = {}
    for k in range(count):
        arrays[f"l{k}.weight"] = rng.random((size, size), np.float32)
        arrays[f"l{k}.bias"] = rng.random(size, np.float32)
    return arrays


def held(model):
    """Return the weights that the program holds."""
    return model.programs[-1].executable.call.weights


@pytest.mark.parametrize("donated", [0, (0, 1)])
def test_held_weights_are_not_donated(donated):
    """Return a result of the type of the weight, which could take its buffer."""
    model = compiled(rows=SIZE, jit_options={"donate_argnums": donated}).bind(weights())
    x = rng.random((SIZE, SIZE), np.float32)
    first, second = (np.array(model({"input": model.backend.array(x)})["output"]) for _ in range(2))
    np.testing.assert_array_equal(first, second)
    assert not any(w.is_deleted() for w in held(model).values())


def test_an_array_is_bound_on_two_devices():
    code = f"""
        import numpy as np
        import mithril as ml
        from mithril.models import Layer

        class Product(Layer):
            def build(self, x):
                return x @ self.param("w", [{SIZE}, {SIZE}])

        w, x = np.eye({SIZE}, dtype=np.float32), np.ones((4, {SIZE}), np.float32)
        w.setflags(write=False)
        for device in ("cpu:0", "cpu:1"):
            options = {{"shapes": {{"input": [4, {SIZE}]}}, "static_inference": True}}
            model = ml.compile(Product(), ml.JaxBackend(device=device), **options).bind({{"w": w}})
            (y,) = model({{"input": x}}).values()
            assert np.array_equal(y, x)
            print(*(d.id for d in y.devices()), len(model.programs[-1].executable.call.weights))
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines() == ["0 1", "1 1"]


@pytest.mark.parametrize(
    ("options", "image", "order"),
    [
        ({}, 8, (2, 3, 1, 0)),
        ({}, 2, (0, 1, 2, 3)),  # the kernel exceeds the image: the convolution becomes a product
        ({"vectorize": True}, 8, (2, 3, 1, 0)),
    ],
)
def test_kernels_are_held_in_the_order_that_the_convolution_reads(options, image, order):
    model = Model()
    model += Conv2d(64, 96, 3, padding=1, groups=2, name="c")
    shapes = {"input": [None if options else 2, 64, image, image]}
    program = ml.compile(model, "jax", shapes=shapes, static_inference=True, **options)
    reference = ml.compile(model, "jax", shapes={"input": [2, 64, image, image]})
    params = {"c.weight": rng.normal(size=(96, 32, 3, 3)).astype(np.float32), "c.bias": np.ones(96, np.float32)}
    x = rng.normal(size=(2, 64, image, image)).astype(np.float32)
    (y,), (expected,) = program.bind(params)({"input": x}).values(), reference.evaluate(params, {"input": x}).values()
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)
    (kernel,) = held(program).values()
    np.testing.assert_array_equal(kernel, params["c.weight"].transpose(order))


def test_weights_of_experts_are_held():
    model = compiled(MixtureOfExperts(4, SIZE))
    forms = model.randomize_params(0)
    model.bind({name: np.asarray(array) for name, array in forms.items()})
    model({"input": rng.random((4, SIZE), np.float32)})
    assert sorted(w.shape for w in held(model).values()) == [(4, SIZE, SIZE)] * 3


def test_programs_share_a_weight_and_release_it_before_the_caller_does():
    w = rng.random((SIZE, SIZE), np.float32)
    w.setflags(write=False)
    models = [compiled(Product(), rows).bind({"w": w}) for rows in (2, 4)]
    for rows, model in zip((2, 4), models, strict=True):
        model({"input": np.ones((rows, SIZE), np.float32)})
    first, second = (held(model)["w"] for model in models)
    assert first is second
    reference = weakref.ref(first)
    del first, second, model, models
    gc.collect()
    assert reference() is None


def test_only_other_constants_count_as_embedded():
    """Biases of 16 KiB are literals of the program, of which XLA has copies; weights of products are held once."""
    count, size = 5, 4096
    arrays = {f"l{k}.bias": rng.random(size, np.float32) for k in range(count)}
    shared = np.zeros((size, 16), np.float32), np.zeros((16, size), np.float32)
    model = Model()
    for k in range(count):
        model += Linear(16, bias=False, name=f"a{k}")
        model += Linear(size, name=f"l{k}")
        arrays |= {f"a{k}.weight": shared[1] + k, f"l{k}.weight": shared[0] + k}
    program = compiled(model, size=size).bind(arrays)
    program({"input": np.ones((4, size), np.float32)})
    assert len(held(program)) == 2 * count
    total, biases = sum(x.nbytes for x in arrays.values()), 4 * count * size
    report = program.memory_report()
    assert report.weights.is_estimate
    assert 2 * total < report.weights.in_memory < 2 * total + 4 * biases
    assert report.weights.in_memory < 2.5 * total


def test_programs_of_the_cache_release_their_graphs(tmp_path):
    arrays = weights()
    x = np.ones((4, SIZE), np.float32)
    results = []
    for _ in range(2):
        model = compiled(cache=True, cache_dir=str(tmp_path)).bind(arrays)
        results.append(np.asarray(model({"input": x})["output"]))
        executable = model.programs[-1].executable
        assert held(model)
        assert executable._graph._graph is None
        assert callable(executable._graph._make), "the text of the graph contains the weights"
        assert not executable.arrays
    np.testing.assert_array_equal(*results)
    assert executable.graph.with_role("constant")


def test_a_file_contains_its_weights(tmp_path):
    path = tmp_path / "product.py"
    arrays = weights()
    model = compiled(file_path=str(path)).bind(arrays)
    x = np.ones((4, SIZE), np.float32)
    expected = model({"input": x})["output"]
    spec = importlib.util.spec_from_file_location("product", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    np.testing.assert_allclose(module.forward({}, {"input": x})["output"], expected, rtol=1e-5)
