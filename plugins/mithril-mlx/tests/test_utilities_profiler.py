"""``MlxProfiler``: times evaluation, not the recording of lazy operations."""

from __future__ import annotations

import json
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest

import mithril as ml
from mithril.models import Linear, Model, Relu
from mithril_mlx import MlxProfiler
from mithril_mlx.mlx_loader import mx


def heavy():
    x = mx.ones((512, 512))
    for _ in range(10):
        x = mx.exp(mx.sin(x))
    return x


HEAVY = pytest.approx(512 * 512 * 4, rel=0.01)  # bytes of one result


@pytest.fixture
def memory_clock(monkeypatch):
    """Provide a clock that returns the bytes of all computed arrays, which does not depend on the machine's load."""
    clock = SimpleNamespace(perf_counter=lambda: float(mx.get_active_memory()))
    monkeypatch.setattr(sys.modules[MlxProfiler.__module__], "time", clock)


@pytest.mark.usefixtures("memory_clock")
def test_lazy_work_is_in_the_time_of_the_operation_that_noted_it_down():
    profiler = MlxProfiler()
    profiler.start_operation("heavy")
    y = heavy()
    assert profiler.end_operation(y) == HEAVY
    with profiler.operation("heavy") as op:
        z = op.waits(heavy())
    assert profiler.get_all_stats()["heavy"].range == (HEAVY, HEAVY)
    assert y.shape == z.shape


def test_statistics_are_those_of_the_times():
    profiler = MlxProfiler()
    times = []
    for k in range(5):
        profiler.start_operation("sleep")
        time.sleep(0.001 * (k + 1))
        times.append(profiler.end_operation(mx.array(0)))
    average, (low, high), count = profiler.get_all_stats()["sleep"]
    assert count == 5 and (low, high) == (min(times), max(times))
    assert average == pytest.approx(np.mean(times)) == profiler.get_average_time("sleep")
    assert profiler.percentiles("sleep", (50,))[50] == pytest.approx(np.median(times))
    assert profiler.get_average_time("never") is None
    with pytest.raises(ml.InputError, match="no operation 'never' was measured"):
        profiler.percentiles("never")


def test_rates_come_from_the_counts_given():
    profiler = MlxProfiler()
    a = mx.ones((64, 64))
    y = profiler.run("product", lambda x: x @ x, a, flops=2 * 64**3)
    assert y.tolist()[0][0] == 64.0
    breakdown = profiler.execution_breakdown["product"]
    assert breakdown.flops == 2 * 64**3 and breakdown.bytes == 2 * 64 * 64 * 4
    assert breakdown.flops_per_second == breakdown.flops / breakdown.seconds


def test_operations_lie_within_each_other_and_in_the_trace(tmp_path):
    profiler = MlxProfiler()
    profiler.start_operation("outer")
    profiler.start_operation("inner")
    profiler.end_operation(mx.ones(3) + 1)
    profiler.end_operation(mx.ones(3) + 2)
    profiler.write(tmp_path / "trace.json")
    rows = [r for r in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if r["ph"] == "X"]
    inner, outer = sorted(rows, key=lambda r: r["dur"])
    assert (inner["name"], outer["name"]) == ("inner", "outer")
    assert outer["ts"] <= inner["ts"] and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]


def test_operations_that_raise_are_not_counted():
    profiler = MlxProfiler()
    with pytest.raises(ValueError), profiler.operation("broken"):
        raise ValueError
    assert profiler.get_all_stats() == {}
    with pytest.raises(ml.InputError, match="no operation is running"):
        profiler.end_operation()


def test_the_memory_that_an_operation_leaves_is_recorded():
    profiler = MlxProfiler()
    profiler.start_operation("make")
    pending = mx.ones((1024,)) + 1
    profiler.end_operation(pending)
    assert profiler.recorder.events[-1].info["memory"] == 4096


def test_a_compiled_model_is_timed_by_layer():
    model = Model()
    model |= Linear(16, name="first")(input="x", output="h")
    model += Relu()(input="h", output="y")
    compiled = ml.compile(model, "mlx", shapes={"x": [4, 8]}, optimization_level="none")
    params = compiled.randomize_params(0)
    profiler = MlxProfiler()
    result = profiler.profile(compiled, params, {"x": np.ones((4, 8), np.float32)}, runs=3)
    assert result["y"].shape == (4, 16)
    assert any(name.startswith("first: ") for name in profiler.get_all_stats())
    assert all(entry.runs == 3 for entry in profiler.get_all_stats().values())
    assert profiler.call_seconds > 0 and "first" in str(profiler)


@pytest.mark.usefixtures("memory_clock")
def test_arrays_of_the_caller_are_computed_without_being_passed():
    """The order of the guides: start, compute, end."""
    profiler = MlxProfiler()
    before = heavy()  # noted down before the clock starts: not in the time
    profiler.start_operation("empty")
    assert profiler.end_operation() == 0
    profiler.start_operation("heavy")
    results = {"y": [heavy()]}
    assert profiler.end_operation() == HEAVY
    with profiler.operation("block"):
        results["z"] = heavy()
    assert profiler.get_average_time("block") == HEAVY
    assert before.shape == results["y"][0].shape


def test_nothing_to_compute_is_a_warning():
    profiler = MlxProfiler()
    profiler.start_operation("lost")
    with pytest.warns(UserWarning, match=r"'lost'.*Pass the result: end_operation\(result\)"):
        profiler.end_operation()
