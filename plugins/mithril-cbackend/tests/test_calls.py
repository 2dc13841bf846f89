"""Calls of programs: accepted arguments, retained results, concurrent calls."""

import sys
import threading

import numpy as np
import pytest

import mithril as ml
from mithril.graph.errors import InputError
from mithril.models import Add, Linear, Model, Relu
from mithril_cbackend.program import executable


@pytest.fixture
def compiled():
    model = Model()
    model += Linear(32, name="first")
    model += Relu()
    model += Linear(10, name="last")
    compiled_model = ml.compile(model, "c", shapes={"input": [5, 16]})
    return compiled_model.bind(compiled_model.randomize_params(seed=1))


X = np.random.default_rng(0).standard_normal((5, 16)).astype(np.float32)


def test_retained_results_do_not_change(compiled):
    first = compiled({"input": X})["output"]
    part, expected = first[1:2], first.copy()
    compiled({"input": X * 2})
    assert (first == expected).all()
    del first
    compiled({"input": X * 3})
    assert (part == expected[1:2]).all()


def test_a_loop_that_keeps_the_last_result_allocates_two_arrays(compiled):
    seen = set()
    for _ in range(10):
        result = compiled({"input": X})["output"]
        seen.add(result.ctypes.data)
    assert len(seen) == 2


def test_results_begin_at_whole_lines_of_the_cache(compiled):
    assert compiled({"input": X})["output"].ctypes.data % 64 == 0


def test_views_are_copied(compiled):
    expected = compiled({"input": X})["output"].copy()
    strided = np.zeros((5, 32), np.float32)
    strided[:, ::2] = X
    np.testing.assert_array_equal(compiled({"input": strided[:, ::2]})["output"], expected)
    transposed = {n: np.asfortranarray(x) for n, x in compiled.params.items()}
    np.testing.assert_array_equal(compiled.evaluate(transposed, {"input": X})["output"], expected)


@pytest.fixture
def quickly(compiled, monkeypatch):
    """Calls after the first two; the checked way is closed to them."""
    expected = compiled({"input": X})["output"].copy()
    compiled({"input": X})

    def call(inputs):
        with monkeypatch.context() as closed:
            closed.setattr(compiled._evaluation, "evaluate", None)
            closed.setattr(type(compiled.programs[-1].executable), "__call__", None)
            return compiled(inputs)["output"]

    call.expected = expected
    return call


def test_calls_that_repeat_take_the_short_way(compiled, quickly):
    np.testing.assert_array_equal(quickly({"input": X}), quickly.expected)
    np.testing.assert_array_equal(quickly({"input": X.copy()}), quickly.expected)


@pytest.mark.parametrize(
    "other",
    [
        X.astype(np.float64),
        X[:3],
        X.T,
        np.asfortranarray(X),
        X[:, None],
        np.zeros((5, 32), np.float32)[:, ::2],
        X.astype(">f4"),
        X.view(type("Other", (np.ndarray,), {})),
        X.tolist(),
        None,
        7,
        object(),
    ],
    ids=["dtype", "shape", "turned", "order", "rank", "view", "bytes", "class", "list", "None", "number", "object"],
)
def test_the_short_way_is_for_arrays_of_one_kind(quickly, other):
    with pytest.raises(TypeError, match="'NoneType' object is not callable"):
        quickly({"input": other})
    np.testing.assert_array_equal(quickly({"input": X}), quickly.expected)


@pytest.mark.parametrize("inputs", [{}, {"input": X, "more": X}, X, None, {"other": X}])
def test_the_short_way_is_for_the_same_names(quickly, inputs):
    with pytest.raises(TypeError, match="'NoneType' object is not callable"):
        quickly(inputs)


def test_results_of_the_short_way_that_are_held_stay(compiled):
    results = [compiled({"input": X * k})["output"] for k in range(6)]
    for k, y in enumerate(results):
        np.testing.assert_array_equal(y, compiled.programs[-1].executable(compiled.params, {"input": X * k})["output"])


def test_numpy_scalars_are_arrays_of_no_dimensions():
    model = Model()
    model |= Relu(name="r")(input="x", output="y")
    compiled = ml.compile(model, "c", shapes={"x": []})
    assert compiled({"x": np.array(3.0, np.float32)})["y"] == 3
    for _ in range(3):  # the short cut for repeated calls looks at shape and dtype only
        assert compiled({"x": np.float32(2.0)})["y"] == 2


def test_parameters_that_change_are_seen(compiled):
    params = dict(compiled.params)
    before = compiled.evaluate(params, {"input": X})["output"].copy()
    params["last.bias"] = params["last.bias"] + 1
    np.testing.assert_allclose(compiled.evaluate(params, {"input": X})["output"], before + 1, rtol=1e-5)
    params["last.bias"] += 1  # in place
    np.testing.assert_allclose(compiled.evaluate(params, {"input": X})["output"], before + 2, rtol=1e-5)


@pytest.fixture
def hurried():
    """Threads switch as often as possible."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("short", [True, False])
def test_threads_call_one_executable(compiled, short, monkeypatch):
    """By the short way, which keeps Python's lock or the program's own, and by the long one."""
    monkeypatch.setattr(executable, "SHORT", 1.0 if short else 0.0)
    inputs = [X * k for k in range(4)]
    expected = [compiled({"input": x})["output"].copy() for x in inputs]
    program = compiled.programs[-1].executable
    assert program.short == short
    wrong = []

    def work(k):
        inputs_k = {"input": inputs[k]}
        for turn in range(200):
            outputs = program(compiled.params, inputs_k) if turn % 3 == k % 3 else compiled(inputs_k)
            if not (outputs["output"] == expected[k]).all():
                wrong.append(k)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_one_program_runs_every_batch_size():
    model = Model()
    model += Linear(3, name="l")
    compiled = ml.compile(model, "c", shapes={"input": [ml.Dim("B", 1, 32), 16]}, inference=True)
    compiled.bind(compiled.randomize_params(seed=1, inputs={"input": X}))
    expected = compiled({"input": X})["output"].copy()
    for n in (1, 3, 5):
        np.testing.assert_allclose(compiled({"input": X[:n]})["output"], expected[:n], rtol=1e-6)
    assert len(compiled.programs) == 1
    with pytest.raises(ml.MithrilError):
        compiled({"input": np.zeros((33, 16), np.float32)})


def test_open_sizes_are_checked_as_on_other_backends():
    """Two axes without a size are two unknown sizes that must be equal, although C is compiled for exact ones."""
    model = Model()
    model |= Add()(left="a", right="b", output="output")
    compiled_model = ml.compile(model, "c", shapes={"a": [None, 3], "b": [None, 3]})
    x = np.ones((3, 3), np.float32)
    assert compiled_model({"a": x, "b": x})["output"].shape == (3, 3)
    with pytest.raises(InputError, match="a_0 == b_0"):
        compiled_model({"a": x, "b": x[:1]})
