"""Tuned schedules: every candidate is correct, and winners are used, stored and not measured again."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import mithril as ml
import mithril_cbackend
from mithril.graph import Builder, Graph
from mithril.graph.errors import InputError, OptionError, StrictError
from mithril.models import Linear, Model
from mithril.ops import conv, matmul as product
from mithril_cbackend.compile_target import CompileTarget
from mithril_cbackend.cpu_info import vector_bytes
from mithril_cbackend.lowering.conv import direct_convolution
from mithril_cbackend.lowering.element.kernel_builder import Machine
from mithril_cbackend.lowering.matmul import matmul, matmul_form
from mithril_cbackend.program import compile_graph
from mithril_cbackend.schedule import offline_tuning, tuning
from mithril_cbackend.schedule.schedules import Schedules
from mithril_cbackend.tir import machine_code
from mithril_tools.cli import main

RNG = np.random.default_rng(0)


def random(*shape: int) -> np.ndarray[Any, Any]:
    return RNG.standard_normal(shape).astype(np.float32)


def run(graph: Graph, machine: Machine, *arrays: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.array(
        compile_graph.compiled(graph, machine, CompileTarget())({}, {f"x{k}": a for k, a in enumerate(arrays)})["y"]
    )


def two(function: Any, *arrays: np.ndarray[Any, Any]) -> Graph:
    with Builder() as b:
        result = function(*(b.input(f"x{k}", a.shape) for k, a in enumerate(arrays)))
    return b.build({"y": result})


def test_every_schedule_of_a_product_is_right() -> None:
    x, w = random(37, 50), random(50, 70)
    graph = two(product, x, w)
    machine = Machine(machine_code.host_cpu(), 1)
    (node,) = graph.nodes
    schedules = matmul.schedules(node, machine)
    assert "8x32" in schedules
    name = str(matmul_form.product_of(node))
    for schedule in schedules:
        actual = run(graph, Machine(machine.cpu, 1, schedules={name: schedule}), x, w)
        np.testing.assert_allclose(actual, x @ w, rtol=1e-4, atol=1e-4, err_msg=schedule)


def test_every_schedule_of_a_convolution_is_right() -> None:
    x, w = random(2, 16, 6, 6), random(24, 16, 3, 3)
    how = {"stride": (1, 1), "padding": ((1, 1), (1, 1)), "dilation": (1, 1), "groups": 1}
    graph = two(lambda x, w: conv(x, w, **how), x, w)
    machine = Machine(machine_code.host_cpu(), 1)
    (node,) = graph.nodes
    candidates = direct_convolution.schedules(node, machine)
    assert len(candidates) > 3 and direct_convolution.DIRECT in candidates
    texts = set()
    for schedule in candidates:
        schedules = {direct_convolution.signature(node): schedule}
        executable = compile_graph.compiled(graph, Machine(machine.cpu, 1, schedules=schedules), CompileTarget())
        actual = executable({}, {"x0": x, "x1": w})["y"]
        np.testing.assert_allclose(actual, np.asarray(conv(x, w, **how)), rtol=1e-4, atol=1e-4, err_msg=schedule)
        texts.add(executable.source)
    assert len(texts) == len(candidates)


def model_of(features: int = 256) -> Model:
    model = Model()
    model += Linear(features, name="l")
    return model


def compiled(backend: Any = "c", **options: Any) -> Any:
    compiled_model = ml.compile(model_of(), backend, shapes={"input": [64, 128]}, inference=True, **options)
    params, x = compiled_model.randomize_params(0), random(64, 128)
    (y,) = compiled_model.evaluate(params, {"input": x}).values()
    np.testing.assert_allclose(y, x @ params["l.weight"].T + params["l.bias"], rtol=1e-4, atol=1e-4)
    return compiled_model


def schedules_of(compiled_model: Any) -> Any:
    return compiled_model.programs[0].executable.machine.schedules


def choices() -> list[str]:
    """Return the candidates of the templates for this product."""
    graph = two(product, random(64, 128), random(128, 256))
    return matmul.schedules(graph.nodes[0], Machine(machine_code.host_cpu(), 1, vector_bytes()))


NAME = "64x256x128"
OTHER, BETTER = choices()[:2]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the measured operations; a tile other than the default wins each time."""
    names: list[str] = []

    def other(operation: tuning.Operation, machine: Machine, compiled: tuning.Compile) -> str:
        names.append(operation.name)
        return OTHER

    monkeypatch.setattr(tuning, "fastest", other)
    return names


def test_level_high_measures_once_and_stores_the_winner(tmp_path: Path, measured: list[str]) -> None:
    options = {"optimization_level": "high", "cache_dir": str(tmp_path)}
    first = compiled(**options)
    assert measured == [NAME]
    assert any("1 operations, 1 differ from the default" in str(d) for d in first.decisions)
    assert schedules_of(first) == {NAME: OTHER}
    compiled(**options)
    assert len(measured) == 1


def test_the_fastest_is_measured() -> None:
    x, w = random(128, 256), random(256, 256)
    (operation,) = tuning.operations(two(product, x, w)).values()
    machine = Machine(machine_code.host_cpu(), 1)
    assert tuning.fastest(operation, machine, compile_graph.compiled) in (tuning.DEFAULT, *operation.choices(machine))


def test_operations_are_those_of_all_regions_the_largest_first() -> None:
    x, w, v = random(16, 32), random(32, 32), random(32, 64)
    with Builder() as b:
        x, w, v = (b.input(n, a.shape) for n, a in (("x", x), ("w", w), ("v", v)))
        result = product(product(product(x, w), w), v)
    operations = tuning.operations(b.build({"y": result}))
    assert [(o.name, o.count, o.multiplications) for o in operations.values()] == [
        ("16x64x32", 1, 16 * 64 * 32),
        ("16x32x32", 2, 16 * 32 * 32),
    ]


def test_tiles_are_combined_with_depths() -> None:
    assert tuning.cross_depths(["8x32", "4x16"]) == ["8x32", "4x16"]
    assert tuning.cross_depths(["8x32", "4x16", "8x32x256", "8x32x512"]) == [
        "8x32", "4x16", "8x32x256", "8x32x512", "4x16x256", "4x16x512",
    ]  # fmt: skip


# -- files --------------------------------------------------------------------------------------------------------
@pytest.fixture
def file(tmp_path: Path, measured: list[str]) -> Path:
    """Write the schedules that level high found to a file."""
    compiled_model = compiled(optimization_level="high", cache_dir=str(tmp_path / "cache"))
    mithril_cbackend.save_schedules(tmp_path / "schedules.json", compiled_model)
    measured.clear()
    return tmp_path / "schedules.json"


def test_schedules_of_a_file_are_used_at_every_level_without_measuring(
    tmp_path: Path, file: Path, measured: list[str]
) -> None:
    for level in ("medium", "high"):
        compiled_model = compiled(
            ml.CBackend(schedules=file), optimization_level=level, cache_dir=str(tmp_path / "other")
        )
        assert schedules_of(compiled_model) == {NAME: OTHER}
        assert "choice: schedules: from the file for 1 of 1 operations" in map(str, compiled_model.decisions)
    assert not measured
    assert not schedules_of(compiled())
    assert ml.CBackend(schedules=file).with_precision("bfloat16").schedules.machines


def test_schedules_of_another_machine_are_not_used_and_that_is_said(file: Path) -> None:
    (machine,) = json.loads(file.read_text())["machines"]
    file.write_text(file.read_text().replace(machine, "z80, 1 threads, vectors of 1 bytes"))
    compiled_model = compiled(ml.CBackend(schedules=file))
    assert not schedules_of(compiled_model)
    message = f"ignored: schedules: the file has no entry for {machine}, only for z80, 1 threads, vectors of 1 bytes"
    assert message in map(str, compiled_model.decisions)
    with pytest.raises(StrictError):
        compiled(ml.CBackend(schedules=file), strict=True)


def test_schedules_that_the_templates_no_longer_have_are_not_used(file: Path) -> None:
    file.write_text(file.read_text().replace(OTHER, "4x31"))
    compiled_model = compiled(ml.CBackend(schedules=file))
    assert not schedules_of(compiled_model)
    assert f"ignored: schedules: unknown schedule '4x31' for {NAME}" in map(str, compiled_model.decisions)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, ": No such file or directory"),
        ("{", "is not a schedules file: "),
        ("[]", "is not a schedules file"),
        ('{"format": "mithril-cbackend schedules", "version": 2}', "has format version 2"),
        ('{"format": "mithril-cbackend schedules", "version": 1}', "must map machines"),
        ('{"format": "mithril-cbackend schedules", "version": 1, "machines": {"a": {"b": 1}}}', "must map machines"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str | None, message: str) -> None:
    file = tmp_path / "schedules.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(OptionError, match=message):
        ml.CBackend(schedules=file)


def test_a_file_is_extended(tmp_path: Path) -> None:
    file = tmp_path / "schedules.json"
    Schedules({"one": {"a": "1", "b": "2"}}).save(file)
    Schedules({"one": {"b": "3"}, "two": {"a": "4"}}).save(file)
    assert Schedules.load(file).machines == {"one": {"a": "1", "b": "3"}, "two": {"a": "4"}}
    assert [f.name for f in tmp_path.iterdir()] == ["schedules.json"]


def test_models_of_other_backends_have_no_schedules(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no program of backend 'c'"):
        mithril_cbackend.save_schedules(tmp_path / "schedules.json", ml.compile(model_of(), "c"))


def test_programs_on_disk_are_those_of_their_schedules(tmp_path: Path, file: Path) -> None:
    options = {"cache": True, "cache_dir": str(tmp_path / "programs")}
    for _ in range(2):
        assert not schedules_of(compiled(**options))
        assert schedules_of(compiled(ml.CBackend(schedules=file), **options)) == {NAME: OTHER}


# -- searching ----------------------------------------------------------------------------------------------------
def test_a_search_keeps_faster_schedules(tmp_path: Path, measured: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    times = {OTHER: 0.5, BETTER: 0.4}  # of the usual time; the second is faster only by itself

    def raced(calls: Any, *_: Any, **__: Any) -> dict[Any, float]:
        result = {}
        for name, call in calls.items():
            machine = call.executable.machine
            schedule = machine.schedules.get(NAME, "")
            is_program = bool(call.executable.params)
            result[name] = times.get(schedule, 1.0) if not (is_program and schedule == BETTER) else 2.0
        return result

    monkeypatch.setattr(offline_tuning, "time_interleaved", raced)
    compiled_model = compiled()
    result = mithril_cbackend.tune_offline(compiled_model, seconds=3600, trials=6, store=tmp_path)
    (row,) = result.rows
    assert row.finalists[0] == (BETTER, 0.4) and row.selected == OTHER and row.tried == 6
    assert (result.default_seconds, result.seconds, result.speedup) == (1.0, 0.5, 2.0)
    assert f"selected '{OTHER}'" in str(result)
    result.save(tmp_path / "schedules.json")
    assert schedules_of(compiled(ml.CBackend(schedules=tmp_path / "schedules.json"))) == {NAME: OTHER}
    assert schedules_of(compiled(optimization_level="high", cache_dir=str(tmp_path))) == {NAME: OTHER}
    assert not measured


@pytest.mark.parametrize("seconds", [8, 14, 1000])
def test_no_trial_starts_after_the_time_limit(seconds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Count a second for a trial and the requested seconds for a comparison."""
    clock, starts = SimpleNamespace(now=0.0), []

    def trial(*program: Any) -> None:
        starts.append(clock.now)
        clock.now += 1

    def compared(calls: dict[str, Any], synchronize: Any, seconds: float, **options: Any) -> dict[str, float]:
        clock.now += seconds
        return dict.fromkeys(calls, 1.0)

    model = compiled()
    monkeypatch.setattr(offline_tuning, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    monkeypatch.setattr(offline_tuning, "Call", trial)
    monkeypatch.setattr(offline_tuning, "time_interleaved", compared)
    result = mithril_cbackend.tune_offline(model, seconds=seconds, store=tmp_path)
    assert max(starts) <= seconds
    single = result.rows[0].tried
    trials = single, len(starts) - single - 1  # of the operation, and of the program
    assert trials == {8: (3, 2), 14: (4, 4)}.get(seconds, (single, 4))
    assert single > 5 or seconds < 1000  # all schedules


def test_a_search_tries_no_more_than_asked(tmp_path: Path) -> None:
    result = mithril_cbackend.tune_offline(compiled(), seconds=0.5, trials=2, store=tmp_path)
    assert result.rows[0].tried <= 2 and result.seconds > 0
    with pytest.raises(OptionError, match="trials=0"):
        mithril_cbackend.tune_offline(compiled(), trials=0)


def test_the_command_searches_and_writes_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MITHRIL_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "net.py").write_text(
        "from mithril.models import Linear\ndef net():\n    return Linear(256, name='l')\n"
    )
    out = tmp_path / "schedules.json"
    words = f"tune-c {tmp_path}/net.py:net --shape input=64,128 --seconds 0.5 --trials 1 --output {out}"
    done = CliRunner().invoke(main, words.split())
    assert done.exit_code == 0, done.output
    assert f"{NAME} (1x): alone" in done.output
    assert len(Schedules.load(out).machines) == 1
