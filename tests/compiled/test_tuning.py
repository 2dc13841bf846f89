"""``ml.tune``, ``ml.find_batch_size``, ``ml.process_in_batches``."""

from __future__ import annotations

import numpy as np
import pytest

import mithril as ml
from mithril.models import BatchNorm1d, Linear, Model, Relu
from mithril.system.disk_cache import Store
from mithril.system.timing import time_interleaved
from mithril_testing.fake_clock import FakeClock

X = np.random.default_rng(0).standard_normal((16, 8)).astype(np.float32)


@pytest.fixture
def clock(monkeypatch):
    return FakeClock(monkeypatch)


def net():
    model = Model()
    model |= Linear(16, name="a")(input="x", output="h")
    model |= Relu()(input="h", output="r")
    model |= Linear(2, name="b")(input="r", output="output")
    return model


# -- measuring ----------------------------------------------------------------------------------------------------
def test_candidates_are_timed_interleaved_and_slow_ones_dropped(clock):
    calls = {"fast": 0, "slow": 0}

    def way(name, seconds):
        def call():
            calls[name] += 1
            clock.sleep(seconds)

        return call

    times = time_interleaved({"fast": way("fast", 0.001), "slow": way("slow", 0.01)}, id, seconds=0.15)
    assert times["slow"] > 3 * times["fast"]
    assert calls["slow"] <= 4 < calls["fast"]


def test_waiting_for_a_processor_is_left_out_of_long_calls(clock, monkeypatch):
    """As if others had the processor for half of the time."""
    from mithril.system import timing

    monkeypatch.setattr(timing, "run_queue_seconds", lambda: 0.5 * clock.now)
    times = time_interleaved({"long": lambda: clock.sleep(0.02)}, id, seconds=0.1)
    assert times["long"] == pytest.approx(0.01, rel=0.01)
    times = time_interleaved({"short": lambda: clock.sleep(0.0002)}, id, seconds=0.02)
    assert times["short"] == pytest.approx(0.00022, rel=0.01)


def test_results_are_waited_for(clock):
    """Time a backend that records calls, and computes when a result is read."""
    times = time_interleaved({"lazy": lambda: 0.01}, clock.sleep, seconds=0.1)
    assert times["lazy"] == pytest.approx(0.01, rel=0.01)


def test_interrupted_rounds_drop_no_candidate(clock):
    interruptions = iter([0, 0, 0.05, 0.05])  # after the call that is not timed, two of three rounds

    def best():
        clock.sleep(0.002 + next(interruptions, 0))

    times = time_interleaved({"best": best, "other": lambda: clock.sleep(0.0025)}, id, seconds=0.2)
    assert times["best"] < times["other"] and times.is_faster("best", "other", 0.1)


def test_rounds_that_disagree_decide_nothing(clock):
    rounds = iter(range(1000))

    def changing():
        clock.sleep(0.002 if next(rounds) % 5 < 3 else 0.006)

    times = time_interleaved({"steady": lambda: clock.sleep(0.003), "changing": changing}, id, seconds=0.2)
    assert times["changing"] < 0.8 * times["steady"] and not times.is_faster("changing", "steady", 0.1)


# -- tuning -------------------------------------------------------------------------------------------------------
def test_the_faster_choice_wins_and_is_kept(tmp_path, monkeypatch, clock):
    """One of the choices is made slow."""
    from mithril.compiler import compiled_model as module

    original = module.CompiledModel.evaluate

    def evaluate(self, *arguments, **keywords):
        if self.options["optimization_level"] == "medium":
            clock.sleep(0.004)
        return original(self, *arguments, **keywords)

    monkeypatch.setattr(module.CompiledModel, "evaluate", evaluate)
    choices = {"optimization_level": ("medium", "low")}
    result = ml.tune(net(), "numpy", {"x": X}, choices=choices, seconds=0.1, store=tmp_path)
    assert result.options == {"optimization_level": "low"} and result.speedup > 2 and not result.from_store
    assert result.compiled.options["optimization_level"] == "low"
    again = ml.tune(net(), "numpy", {"x": X}, choices=choices, seconds=0.1, store=tmp_path)
    assert again.from_store and again.options == result.options
    other = ml.tune(net(), "numpy", {"x": X[:4]}, choices=choices, seconds=0.05, store=tmp_path)
    assert not other.from_store  # other shapes are another question


def test_candidates_with_other_results_are_rejected(tmp_path):
    result = ml.tune(
        net(),
        "numpy",
        {"x": X},
        choices={"precision": (None, "float16")},
        seconds=0.05,
        store=False,
    )
    assert result.options == {} or "precision" not in result.options
    assert any("differ" in remark or "Type mismatch" in remark for *_, remark in result.tried)


def test_impossible_choices_are_reported():
    choices = {"max_memory_gb": (None, "100B")}
    result = ml.tune(net(), "numpy", {"x": X}, choices=choices, store=False, seconds=0.05)
    assert result.options == {} and "max_memory_gb='100B': -  this program needs" in str(result)
    with pytest.raises(ml.OptionError, match="unknown option"):
        ml.tune(net(), "numpy", {"x": X}, choices={}, store=False, levle="high")


def test_a_damaged_store_is_measured_again(tmp_path):
    choices = {"optimization_level": ("medium", "low")}
    ml.tune(net(), "numpy", {"x": X}, choices=choices, seconds=0.05, store=tmp_path)
    for file in tmp_path.rglob("*.mithril"):
        file.write_bytes(b"noise")
    assert not ml.tune(net(), "numpy", {"x": X}, choices=choices, seconds=0.05, store=tmp_path).from_store
    assert Store(tmp_path).info().entries == 2  # the answer to this question, and the winner for level high


def test_level_high_uses_tuned_options(tmp_path, monkeypatch, clock):
    """The default is slow, and so is high: from then on compiling at level high gives the winner."""
    from mithril.compiler import compiled_model as module

    original = module.CompiledModel.evaluate

    def evaluate(self, *arguments, **keywords):
        if self.options["optimization_level"] != "low":
            clock.sleep(0.004)
        return original(self, *arguments, **keywords)

    def high(shape=(16, 8), **options):
        settings = {"shapes": {"x": shape}, "optimization_level": "high", "cache_dir": tmp_path, **options}
        return ml.compile(net(), "numpy", **settings)

    assert high().options["optimization_level"] == "high"
    monkeypatch.setattr(module.CompiledModel, "evaluate", evaluate)
    choices = {"optimization_level": ("medium", "high", "low"), "semantics": ("portable",)}
    ml.tune(net(), "numpy", {"x": X}, choices=choices, seconds=0.1, store=tmp_path)
    compiled_model = high()
    assert compiled_model.options["optimization_level"] == "low"
    assert (
        "options from mithril-tools 0.1.0: optimization_level='low', semantics='portable'" in compiled_model.explain()
    )
    assert high((4, 8)).options["optimization_level"] == "high"  # other shapes are another question
    assert high(("B", 8)).options["optimization_level"] == "high"
    assert high(semantics="native").options["semantics"] == "native"  # options of the user are not overridden
    again = ml.tune(net(), "numpy", {"x": X}, choices=choices, seconds=0.1, cache_dir=tmp_path)
    (slow,) = [seconds for _, value, seconds, _ in again.tried if value == "high"]
    assert slow > 0.004  # earlier results did not affect this candidate


def test_passes_are_tried_without(tmp_path):
    choices = {"optimizations": ({}, {"operator-fusion": False})}
    result = ml.tune(net(), "numpy", {"x": X}, choices=choices, seconds=0.05, store=tmp_path)
    assert ("optimizations", {"operator-fusion": False}) in [row[:2] for row in result.tried]
    assert ml.tune(net(), "numpy", {"x": X}, choices=choices, seconds=0.05, store=tmp_path).from_store


# -- batches ------------------------------------------------------------------------------------------------------
def test_batches_come_in_order_and_the_last_is_cut(backend):
    compiled = ml.compile(net(), backend, shapes={"x": ["B", 8]})
    params = compiled.randomize_params(0)
    outputs = compiled.backend.to_numpy(compiled.evaluate(params, {"x": X})["output"])
    pieces = ml.process_in_batches(compiled, {"x": X}, 5, params=params)
    np.testing.assert_allclose(pieces["output"], outputs, rtol=1e-5, atol=1e-6)
    assert len(compiled.programs) == 1 or not compiled.backend.capabilities.symbolic


def test_batches_need_rows():
    model = Model()
    model |= Linear(2)(input="x", output="h")
    compiled = ml.compile(model, "numpy", shapes={"x": ["B", 8]})
    with pytest.raises(ml.InputError, match="no parameters are bound"):
        ml.process_in_batches(compiled, {"x": X}, 4)
    compiled.bind(compiled.randomize_params(0))
    with pytest.raises(ml.InputError, match="batch size cannot be 0"):
        ml.process_in_batches(compiled, {"x": X}, 0)
    with pytest.raises(ml.InputError, match="nothing to process"):
        ml.process_in_batches(compiled, {"x": X[:0]}, 4)


def test_the_batch_found_fits_by_the_plan():
    compiled = ml.compile(net(), "numpy", shapes={"x": ["B", 8]})
    choice = ml.find_batch_size(compiled, {"x": X}, memory="64kB", most=4096, seconds=0.05)
    assert compiled.memory_report({"x": [choice.fits, 8]}).peak <= 64_000
    assert compiled.memory_report({"x": [2 * choice.fits, 8]}).peak > 64_000
    assert 1 <= choice.best <= choice.fits and choice.best in choice.rates
    assert all(n <= choice.fits for n in choice.rates)
    assert "items/s" in str(choice) and int(choice) == choice.best


def test_a_batch_of_one_that_does_not_fit_is_refused():
    compiled = ml.compile(net(), "numpy", shapes={"x": ["B", 8]})
    with pytest.raises(ml.MemoryLimitError, match="a batch of one needs"):
        ml.find_batch_size(compiled, {"x": X}, memory="100B")


def test_models_with_state_can_be_tuned():
    model = Model()
    model |= Linear(4)(input="x", output="h")
    model |= BatchNorm1d(4)(input="h", output="output")
    compiled = ml.compile(model, "numpy", shapes={"x": ["B", 8]}, inference=True)
    params = compiled.randomize_params(0)
    pieces = ml.process_in_batches(compiled, {"x": X}, 7, params=params)
    assert pieces["output"].shape == (16, 4)
