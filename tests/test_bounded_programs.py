"""Programs of a model are bounded in number and memory, and each is compiled once, however many threads ask."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

import mithril as ml
from mithril.graph.errors import BackendError, OptionError
from mithril.models import Linear, Model


def compiled(backend, **options):
    model = Model()
    model |= Linear(8)(input="input", output="output")
    model = ml.compile(model, backend, **options)
    return model, model.randomize_params(seed=0, inputs={"input": np.ones((1, 4), np.float32)})


def run(model, params, rows):
    x = np.full((rows, 4), rows, np.float32)
    output = model.backend.to_numpy(model.evaluate(params, {"input": x})["output"])
    assert output.shape == (rows, 8)
    return output


@pytest.mark.parametrize("backend", ["numpy", "torch", "jax", "mlx", "c", "ggml"])
def test_evicted_programs_are_recompiled(backend):
    model, params = compiled(backend, max_programs=3)
    before = run(model, params, 1)
    for rows in range(1, 8):
        run(model, params, rows)
        assert len(model.programs) <= 3
    np.testing.assert_array_equal(run(model, params, 1), before)
    assert len(model._calls._calls) <= 3 * 16
    if backend in ("c", "jax"):
        assert model.decisions.of("evicted")
    if backend == "jax":
        assert model.programs[-1].executable.call.jitted._cache_size() <= 4


def test_sizes_of_one_program_are_bounded():
    """JAX compiles one program again for each size of its open axes."""
    model, params = compiled("jax", max_programs=3, shapes={"input": ["B", 4]})
    before = run(model, params, 1)
    for rows in range(1, 9):
        run(model, params, rows)
        assert len(model.programs) == 1
        assert model.programs[-1].executable.call.jitted._cache_size() <= 3
    assert "more than max_programs=3 sizes" in str(model.decisions.of("evicted"))
    np.testing.assert_array_equal(run(model, params, 1), before)


def test_programs_used_lately_stay():
    model, params = compiled("c", max_programs=2)
    for rows in (1, 2):
        run(model, params, rows)
    first = model.programs[0]
    run(model, params, 1)
    run(model, params, 3)
    assert first in model.programs
    assert [p.types["input"].shape[0] for p in model.programs] == [1, 3]


@pytest.mark.parametrize("value", [0, -1, "3", None, 2.5])
def test_max_programs_is_a_positive_number(value):
    with pytest.raises(OptionError, match="max_programs"):
        compiled("numpy", max_programs=value)


def test_threads_compile_one_program_once(monkeypatch):
    model, params = compiled("c")
    outputs = []
    specialize = model.compiler.specialize

    def slow(request):
        outputs.append(request)
        time.sleep(0.1)
        return specialize(request)

    monkeypatch.setattr(model.compiler, "specialize", slow)
    results = []
    threads = [threading.Thread(target=lambda: results.append(run(model, params, 5))) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(results) == 8 and len(outputs) == 1


def test_a_failed_compilation_is_tried_again_by_those_who_waited(monkeypatch):
    model, params = compiled("numpy")
    specialize, calls = model.compiler.specialize, []

    def once(request):
        calls.append(request)
        time.sleep(0.05)
        if len(calls) == 1:
            raise BackendError("not this time")
        return specialize(request)

    monkeypatch.setattr(model.compiler, "specialize", once)
    outcomes = []

    def work():
        try:
            outcomes.append(
                model.evaluate(params, {"input": np.ones((2, 4), np.float32)}, training=True)["output"].shape
            )
        except BackendError as error:
            outcomes.append(str(error))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert outcomes.count((2, 8)) == 3 and len(calls) == 2
