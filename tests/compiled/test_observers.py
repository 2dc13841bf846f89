"""Observers of a compilation: verbose, dumps, shape traces, intermediates, profiles, pictures, benchmarks."""

from __future__ import annotations

import json
import time
import xml.etree.ElementTree as ET

import numpy as np
import pytest

import mithril as ml
from mithril.models import Dropout, Linear, Model, Relu

X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)


def net() -> Model:
    model = Model()
    model |= Linear(8, name="first")(input="x", output="hidden")
    model |= Relu(name="act")(input="hidden", output="active")
    model |= Linear(2, name="last")(input="active", output="output")
    return model


def test_verbose_names_stages_passes_and_counts(backend, rows, capsys):
    ml.compile(net(), backend, shapes={"x": [rows, 4]}, verbose=True)
    text = capsys.readouterr().out
    for word in ("compiling Model", "flatten", "shapes", "optimize", "dead-code", "build", "done in", "1 program"):
        assert word in text, text


def test_verbose_says_what_failed(backend, rows, capsys):
    with pytest.raises(ml.ShapeError):
        ml.compile(net(), backend, shapes={"x": ["B", 4]}, static_shapes=True, verbose=True)
    assert "failed after" in capsys.readouterr().out


@pytest.mark.parametrize(("form", "suffix"), [("text", "txt"), ("json", "json"), ("dot", "dot")])
def test_dump_graph_writes_a_numbered_file_per_pass(backend, rows, tmp_path, form, suffix):
    compiled = ml.compile(net(), backend, shapes={"x": [rows, 4]}, dump_graph=str(tmp_path / "d"), dump_format=form)
    files = sorted(p.name for p in (tmp_path / "d").iterdir())
    passes = compiled.pipeline.names
    assert files[0] == f"000-shapes.{suffix}"
    assert [f.partition("-")[2].removesuffix(f".{suffix}") for f in files[1 : 1 + len(passes)]] == passes
    assert all(f.endswith(suffix) for f in files)
    text = (tmp_path / "d" / files[-1]).read_text()
    if form == "json":
        data = json.loads(text)
        assert [o["name"] for o in data["outputs"]] == ["output"]
        assert {n["origin"]["layer"] for n in data["nodes"] if "origin" in n} >= {"first", "last"}
    elif form == "dot":
        assert text.startswith("digraph") and "first" in text
    else:
        assert ml.parse(text).output_names == ("output",)


def test_a_folder_that_cannot_be_written_is_the_users_error(backend, rows, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ml.OptionError, match="dump_graph: .*cannot be written"):
        ml.compile(net(), backend, shapes={"x": [rows, 4]}, dump_graph=str(tmp_path / "file" / "inside"))


def test_trace_shapes_derives_every_operation(backend, rows, capsys):
    ml.compile(net(), backend, shapes={"x": [rows, 4]}, trace_shapes=True)
    text = capsys.readouterr().out
    assert f"input x: f32[{rows}, 4]" in text
    assert "layer 'first' at " in text
    assert f"linear(x: f32[{rows}, 4], first.weight: f32[8, 4], first.bias: f32[8]" in text
    assert f"output output: f32[{rows}, 2]" in text


def test_intermediates_are_kept_and_written(backend, rows, tmp_path):
    compiled = ml.compile(
        net(),
        backend,
        shapes={"x": [rows, 4]},
        save_intermediates=True,
        intermediate_dir=str(tmp_path / "i"),
        jit=False,
    )
    assert {"shapes", "optimize", "build", *compiled.pipeline.names} <= set(compiled.stages)
    assert (tmp_path / "i" / "shapes.txt").read_text().strip() == str(compiled.stages["shapes"])
    params = compiled.randomize_params(0)
    values = compiled.capture(params, {"x": X})
    assert list(values) == ["hidden", "active", "output"]
    hidden, active = (compiled.backend.to_numpy(values[n]) for n in ("hidden", "active"))
    np.testing.assert_array_equal(np.maximum(hidden, 0), active)
    assert (tmp_path / "i" / "values.safetensors").exists()
    compiled.evaluate(params, {"x": X}, output_gradients={"output": np.ones((3, 2), np.float32)})
    assert "gradients#2" in compiled.stages  # of the second program


def test_capture_takes_names_and_knows_them(backend, rows):
    compiled = ml.compile(net(), backend, shapes={"x": [rows, 4]})
    params = compiled.randomize_params(0)
    assert list(compiled.capture(params, {"x": X}, ["active"])) == ["active"]
    with pytest.raises(ml.InputError, match="unknown value 'activ' of the model") as error:
        compiled.capture(params, {"x": X}, ["activ"])
    assert "did you mean 'active'?" in str(error.value)


# -- profiles -----------------------------------------------------------------------------------------------------
def test_profile_of_a_block_times_operations_by_layer(backend, rows):
    compiled = ml.compile(net(), backend, shapes={"x": [rows, 4]})
    params = compiled.randomize_params(0)
    before = compiled.evaluate(params, {"x": X})
    with ml.profile() as prof:
        outputs = compiled.evaluate(params, {"x": X})
        compiled.evaluate(params, {"x": X})
    compiled.evaluate(params, {"x": X})  # outside: not counted
    to_numpy = compiled.backend.to_numpy
    np.testing.assert_array_equal(to_numpy(before["output"]), to_numpy(outputs["output"]))
    assert prof.calls == 2
    breakdown = prof.execution_breakdown
    assert {t.layer for t in breakdown.values()} >= {"first", "last"}
    assert all(t.seconds > 0 and t.calls >= 2 for t in breakdown.values())
    assert abs(sum(t.share for t in breakdown.values()) - 1) < 1e-9
    assert sum(t.flops for t in breakdown.values()) >= 2 * (2 * 3 * 4 * 8 + 2 * 3 * 8 * 2)
    assert "shares are of operations run one at a time" in prof.summary() and "2 calls" in prof.summary()


def test_profile_of_two_models_has_rows_for_each():
    first, second = (ml.compile(net(), "numpy", shapes={"x": [3, 4]}) for _ in range(2))
    params = first.randomize_params(0)
    with ml.profile() as prof:
        first.evaluate(params, {"x": X})
        second.evaluate(params, {"x": X})
    assert {t.model for t in prof.execution_breakdown.values()} == {"model 1", "model 2"}
    assert all(t.calls == 1 for t in prof.execution_breakdown.values())


def test_profile_true_has_both_sections_and_a_trace(backend, rows, tmp_path):
    file = tmp_path / "p.json"
    compiled = ml.compile(net(), backend, shapes={"x": [rows, 4]}, profile=True, profile_output=str(file))
    assert {e["pid"] for e in json.loads(file.read_text())["traceEvents"] if e["ph"] == "X"} == {1}
    compiled.evaluate(compiled.randomize_params(0), {"x": X})
    stats = compiled.get_profile_stats()
    events = [e for e in json.loads(file.read_text())["traceEvents"] if e["ph"] == "X"]
    assert {e["pid"] for e in events} == {1, 2}
    assert {e["cat"] for e in events} == {"stage", "pass", "call", "operation"}
    assert all(e["dur"] >= 0 and e["ts"] >= 0 for e in events)
    assert "pass dead-code" in stats.compile_breakdown
    assert str(stats.execution_breakdown).startswith("operation")


def test_profile_works_with_gradients_and_state(backend):
    model = Model()
    model |= Linear(4, name="l")(input="x", output="h")
    model |= Dropout(0.5)(input="h", output="output")
    compiled = ml.compile(model, backend, shapes={"x": [3, 4]})
    params = compiled.randomize_params(0)
    ones = {"output": np.ones((3, 4), np.float32)}
    plain = compiled.evaluate(params, {"x": X}, ones)[1]
    with ml.profile() as prof:
        seen = compiled.evaluate(params, {"x": X}, ones)[1]
    to_numpy = compiled.backend.to_numpy
    for name in plain:
        np.testing.assert_array_equal(to_numpy(plain[name]), to_numpy(seen[name]))
    assert prof.calls == 1


def test_asking_for_a_profile_that_was_not_kept(backend, rows):
    with pytest.raises(ml.InputError, match="keeps no profile"):
        ml.compile(net(), backend, shapes={"x": [rows, 4]}).get_profile_stats()


# -- memory and benchmarks ----------------------------------------------------------------------------------------
def test_memory_report_adds_up(backend, rows):
    compiled = ml.compile(net(), backend, shapes={"x": [rows, 4]})
    if rows == "B":
        with pytest.raises(ml.InputError, match="the size B of input 'x' is unknown"):
            compiled.memory_report()
    report = compiled.memory_report({"x": [3, 4]})
    assert report.parameters == 4 * (8 * 4 + 8 + 2 * 8 + 2)
    assert report.inputs == 4 * 3 * 4
    assert sum(row.parameters for row in report.layers) == report.parameters
    assert report.workspace > 0 and report.values > 0
    if backend in ("numpy", "torch", "mlx"):
        assert "transpose" not in dict(report.largest), "a transposed weight is a view"
    assert report.peak == report.inputs + report.parameters + report.state + report.workspace
    assert "peak" in str(report)


def test_run_benchmark_and_sweep(backend, rows):
    compiled = ml.compile(net(), backend, shapes={"x": [rows, 4]})
    config = ml.BenchmarkConfig(warmup_iterations=1, benchmark_iterations=5)
    result = ml.run_benchmark(model=compiled, inputs={"x": X}, config=config)
    assert result.batch_size == 3 and len(result.seconds) == 5
    assert abs(result.throughput - 3 / result.latency) < 1e-6
    report = compiled.memory_report({"x": X})
    assert 0 < result.memory_usage - report.inputs - report.parameters < 64_000  # Python's own objects, at most
    compiled = ml.compile(net(), backend, shapes={"x": ["B", 4]})
    sweep = ml.run_benchmark(compiled, {"x": X}, config, batch_sizes=[1, 2, 5])
    assert list(sweep) == [1, 2, 5] and sweep.best in sweep, sweep.failed
    assert all(result.memory_usage for result in sweep.values())
    ET.fromstring(sweep.svg())
    assert "items/s" in str(sweep)


def test_a_benchmark_leaves_out_waiting_for_a_processor(monkeypatch):
    compiled = ml.compile(Linear(2), "numpy", shapes={"input": [1, 2]})
    params, walls = compiled.randomize_params(seed=0), []

    def slow(params, inputs):
        start = time.perf_counter()
        time.sleep(0.02)
        walls.append(time.perf_counter() - start)

    # The system reports that half of the time was spent in the queue.
    monkeypatch.setattr("mithril.system.timing.run_queue_seconds", lambda: time.perf_counter() / 2)
    monkeypatch.setattr(compiled, "evaluate", slow)
    config = ml.BenchmarkConfig(0, 5, metrics=["latency"])
    result = ml.run_benchmark(compiled, {"input": np.ones((1, 2), np.float32)}, config, params=params)
    assert result.latency < 0.8 * np.median(walls)


def test_benchmark_mistakes():
    with pytest.raises(ml.OptionError, match="unknown metric 'latncy'"):
        ml.BenchmarkConfig(metrics=["latncy"])
    with pytest.raises(ml.OptionError, match="benchmark_iterations >= 1"):
        ml.BenchmarkConfig(benchmark_iterations=0)
