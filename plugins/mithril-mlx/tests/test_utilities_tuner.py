"""``MlxAutoTuner``: the fastest wins, results must be equal, and stored results are reused."""

from __future__ import annotations

from datetime import timedelta

import pytest

import mithril as ml
from mithril_mlx import MlxAutoTuner
from mithril_mlx.mlx_loader import mx
from mithril_mlx.utilities import tuner as module
from mithril_testing.fake_clock import FakeClock

TIMES = {"batch_size_16": 0.100, "batch_size_32": 0.080, "batch_size_64": 0.120}


def test_the_smallest_time_wins_and_is_remembered_by_the_next_process(tmp_path):
    requests = []

    def benchmark(config):
        requests.append(config)
        return timedelta(seconds=TIMES[config])

    tuner = MlxAutoTuner(tmp_path)
    assert tuner.benchmark_operation("matmul", list(TIMES), benchmark) == "batch_size_32"
    assert requests == list(TIMES) * 3  # interleaved
    assert tuner.get_optimal_config("matmul") == "batch_size_32" and tuner.get_optimal_config("conv") is None
    again = MlxAutoTuner(tmp_path)
    assert again.get_optimal_config("matmul") == "batch_size_32"
    assert again.benchmark_operation("matmul", list(TIMES), benchmark) == "batch_size_32"
    assert len(requests) == 9 + 3, "each was looked at once"
    assert again.benchmark_operation("matmul", list(TIMES), benchmark) == "batch_size_32" and len(requests) == 12
    again.benchmark_operation("matmul", list(TIMES), benchmark, anew=True)
    assert len(requests) == 21


@pytest.mark.parametrize("change", ["another is faster", "the best fails"])
def test_stored_answer_that_no_longer_holds_is_measured_again(tmp_path, change):
    MlxAutoTuner(tmp_path).benchmark_operation("matmul", list(TIMES), TIMES.get)
    now = {**TIMES, "batch_size_64": 0.001}

    def benchmark(config):
        if change == "the best fails" and config == "batch_size_32":
            raise RuntimeError
        return now[config]

    later = MlxAutoTuner(tmp_path)
    assert later.benchmark_operation("matmul", list(TIMES), benchmark) == "batch_size_64"
    assert MlxAutoTuner(tmp_path).get_optimal_config("matmul") == "batch_size_64"


def test_other_shapes_or_versions_are_other_questions(tmp_path, monkeypatch):
    def tuned(arrays=()):
        return MlxAutoTuner(tmp_path).get_optimal_config("matmul", arrays)

    MlxAutoTuner(tmp_path).benchmark_operation("matmul", list(TIMES), TIMES.get, arrays=[mx.ones((2, 3))])
    assert tuned([mx.ones((2, 3))]) and not tuned([mx.ones((3, 2))]) and not tuned()
    assert not tuned([mx.ones((2, 3), mx.float16)])
    monkeypatch.setattr(module, "version", lambda name: "0.0.0")
    assert not tuned([mx.ones((2, 3))])


def test_a_damaged_store_is_measured_again(tmp_path):
    MlxAutoTuner(tmp_path).benchmark_operation("matmul", list(TIMES), TIMES.get)
    (file,) = tmp_path.rglob("*.mithril")
    file.write_bytes(file.read_bytes()[:-3])
    tuner = MlxAutoTuner(tmp_path)
    assert tuner.get_optimal_config("matmul") is None
    assert tuner.benchmark_operation("matmul", list(TIMES), TIMES.get) == "batch_size_32"


def test_other_configurations_are_measured_again(tmp_path):
    tuner = MlxAutoTuner(tmp_path)
    tuner.benchmark_operation("matmul", ["batch_size_16"], TIMES.get)
    assert tuner.benchmark_operation("matmul", list(TIMES), TIMES.get) == "batch_size_32"


def test_a_failing_configuration_is_reported():
    tuner = MlxAutoTuner(False)
    best = tuner.benchmark_operation("matmul", ["unknown", *TIMES], lambda c: TIMES[c])
    assert best == "batch_size_32" and "KeyError" in tuner.results["matmul", ()].failed["unknown"]
    with pytest.raises(ml.BackendError, match="no configuration of 'matmul' could be run"):
        tuner.benchmark_operation("matmul", ["unknown"], lambda c: TIMES[c])


def test_a_gain_within_the_noise_changes_nothing():
    times = {"default": 1.0, "other": 0.99}
    assert MlxAutoTuner(False).benchmark_operation("op", list(times), times.get) == "default"


def test_ways_are_timed_and_wrong_ones_never_win(monkeypatch):
    clock = FakeClock(monkeypatch)
    x = mx.ones((64, 64))

    def slow(x):
        clock.sleep(0.005)
        return x @ x

    ways = {"slow": slow, "fast": lambda x: x @ x, "wrong": lambda x: x, "broken": lambda x: x @ mx.ones((3,))}
    result = MlxAutoTuner(False).tune("square", ways, [x], seconds=0.1)
    assert result.best == "fast" and result.speedup > 2
    assert "differ" in result.failed["wrong"] and "ValueError" in result.failed["broken"]
