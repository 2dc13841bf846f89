"""``ml.calibrate`` and ``ml.estimate``: measurements are stored, and predict the time of models."""

from __future__ import annotations

import json

import numpy as np
import pytest
from click.testing import CliRunner

import mithril as ml
from mithril.models import Linear, Model, Relu, Sequential
from mithril.system.timing import Stopwatch, lower_quartile
from mithril_tools import calibrate as module, cli


def perceptron(rows, hidden):
    model = Sequential(Linear(hidden), Relu(), Linear(hidden))
    return model, {"input": np.ones((rows, 64), np.float32)}


@pytest.fixture
def small(monkeypatch):
    """Use a corpus that is measured quickly."""
    sizes = [(1, 64), (4, 128), (16, 256), (64, 512), (256, 512)]
    monkeypatch.setattr(module, "corpus", lambda: {f"{r}x{w}": perceptron(r, w) for r, w in sizes})


def compiled_of(rows, hidden, backend="numpy"):
    model, inputs = perceptron(rows, hidden)
    return ml.compile(model, backend, shapes={"input": inputs["input"].shape}), inputs


def test_measurements_are_stored(small, tmp_path, monkeypatch):
    measured = ml.calibrate("numpy", store=tmp_path, rounds=2)
    assert measured.samples and measured.flops_per_second > 1e7 and measured.bytes_per_second > 1e7
    stored = module.calibration("numpy", tmp_path)
    assert (
        stored.samples == measured.samples
        and stored.coefficients == measured.coefficients
        and stored.relative_error == measured.relative_error
    )
    assert module.calibration(ml.NumpyBackend(dtype="float16"), tmp_path) is None  # another backend
    monkeypatch.setattr(module, "stamps", lambda backend: ["edited since"])
    assert module.calibration("numpy", tmp_path) is None


def test_a_damaged_file_is_measured_again(small, tmp_path, monkeypatch):
    ml.calibrate("numpy", store=tmp_path, rounds=1)
    key = module._key(ml.NumpyBackend())
    module.Store(tmp_path).put(key, {"cost_model": b'{"samples": [[1]]}'})
    assert module.calibration("numpy", tmp_path) is None
    compiled, _ = compiled_of(8, 64)
    assert ml.estimate(compiled, store=tmp_path).seconds > 0
    assert module.calibration("numpy", tmp_path) is not None


def test_estimate_that_calibrates_says_so(small, tmp_path, capsys, monkeypatch):
    calibrate = module.calibrate
    monkeypatch.setattr(module, "calibrate", lambda backend, **options: calibrate(backend, rounds=1, **options))
    model = Model()
    model += Linear(4)(input="x")
    compiled = ml.compile(model, "numpy", shapes={"x": [2, 3]})
    compiled.evaluate(compiled.randomize_params(0), {"x": np.ones((2, 3), np.float32)})
    lines = []
    ml.estimate(compiled, store=tmp_path, progress=lines.append)
    assert lines[0].startswith("'numpy' was never calibrated") and lines[-1].startswith("calibrated 'numpy' in ")
    assert capsys.readouterr().err == ""
    ml.estimate(compiled, store=tmp_path, progress=lines.clear)
    assert lines, "a stored calibration says nothing"
    ml.estimate(compiled, store=tmp_path / "other")
    printed = capsys.readouterr().err
    assert (
        "ml.estimate: 'numpy' was never calibrated" in printed
        and "round 1 of" in printed
        and "compiling" not in printed
    )


def test_estimates_name_layers_and_need_sizes(small, tmp_path):
    compiled, _ = compiled_of(32, 300)
    estimate = ml.estimate(compiled, store=tmp_path)
    assert set(estimate.layers) >= {"linear_0", "linear_1"} or len(estimate.layers) >= 2
    assert estimate.flops >= 2 * 32 * (64 * 300 + 300 * 300) and estimate.unknown == ()
    assert "estimated" in str(estimate)
    model = Model()
    model |= Linear(4)(input="x", output="y")
    open_ = ml.compile(model, "numpy", shapes={"x": ["B", 8]})
    assert ml.estimate(open_, {"x": [4, 8]}, store=tmp_path).seconds > 0
    with pytest.raises(ml.InputError, match="nothing to estimate"):
        ml.estimate(ml.compile(model, "numpy"), store=tmp_path)


def test_estimates_are_near_measurements(small, tmp_path):
    """Within a factor of two, in one of three attempts: the load changes between the two measurements."""
    compiled, inputs = compiled_of(128, 384)
    params = compiled.randomize_params(0)
    ratios = []
    for attempt in range(3):
        ml.calibrate("numpy", store=tmp_path / str(attempt), rounds=6)
        compiled.evaluate(params, inputs)
        watch = Stopwatch()
        laps = [(compiled.evaluate(params, inputs), watch.lap())[1] for _ in range(20)]
        ratios.append(ml.estimate(compiled, store=tmp_path / str(attempt)).seconds / lower_quartile(laps))
        if 0.5 < ratios[-1] < 2:
            return
    raise AssertionError(ratios)


def test_the_command_says_what_was_found(small, tmp_path):
    arguments = ["calibrate", "--backends", "numpy", "--rounds", "3", "--dir", str(tmp_path)]
    result = CliRunner().invoke(cli.main, arguments)
    assert result.exit_code == 0 and "FLOP/s" in result.stdout and "nine of ten" in result.stdout
    data = json.loads(CliRunner().invoke(cli.main, [*arguments, "--json"]).stdout)
    assert data[0]["backend"] == "numpy" and data[0]["samples"] > 0


def test_every_backend_runs_the_corpus(tmp_path, backend, monkeypatch):
    """Run one model of each kind: the others differ by sizes, and take a minute on all backends."""
    if backend == "c":
        pytest.skip("the C backend compiles every operation by itself, which takes many minutes")
    one_of_each_kind = {name.split()[0]: model for name, model in module.corpus().items()}
    monkeypatch.setattr(module, "corpus", lambda: one_of_each_kind)
    assert len(ml.calibrate(backend, store=tmp_path, rounds=1).samples) > 20
