# Frozen with mithril 0.1: never edit this file. Later versions must run it unchanged.
"""The vendor's tests of the three distributions."""

import json

import alder_lab.plugin as lab
import numpy as np
import pytest
from alder_lab.models import Polynomial
from alder_ops.operations import bump, order, soft_clip
from alder_ops.passes import bump_rule
from click.testing import CliRunner

import mithril as ml
from mithril import plugins
from mithril.models import Linear, Model, Relu, Sequential, Sort
from mithril_testing import OpConformance, ProfilerConformance, RuleConformance, TargetConformance
from mithril_tools.cli import main

X = np.linspace(-2, 2, 12, dtype=np.float32).reshape(3, 4)
BUMP = np.exp(-X * X)


class TestOperations(OpConformance):
    ops = (bump, order, soft_clip)


class TestRules(RuleConformance):
    rule = bump_rule
    types = [("float32", (2, 3))]


class TestWatch(ProfilerConformance):
    profiler = "alder-watch"


class TestBoard(TargetConformance):
    target = "alder_board"


def twice():
    with ml.Builder() as builder:
        x = builder.input("x", (3, 4))
        y = x + x
    return builder.build({"y": y})


def compiled(function, backend="alder", **options):
    x = ml.IOKey("x")
    return ml.compile(Model.create(inputs=x, y=function(x)), backend, shapes={"x": [3, 4]}, **options)


def result(program):
    return program.backend.to_numpy(program.evaluate({}, {"x": program.backend.array(X)})["y"])


def test_all_plugins_are_in_use():
    vendor_plugins = [plugin for plugin in plugins.all() if plugin.distribution.startswith("alder-")]
    assert [(plugin.name, plugin.version, plugin.state) for plugin in vendor_plugins] == [
        ("alder-engine", "1.4.0", "loaded"),
        ("alder-lab", "2.0.1", "loaded"),
        ("alder-ops", "0.9.2", "loaded"),
    ]
    report = json.loads(CliRunner().invoke(main, ["plugins", "--json"]).output)
    assert "alder-engine" in json.dumps(report)


@pytest.mark.parametrize("backend", ["alder", "numpy"])
def test_operations(backend):
    program = compiled(lambda x: soft_clip(bump(x), limit=0.5) + order(x, axis=-1)[1], backend)
    expected = np.tanh(BUMP / 0.5) * 0.5 + np.arange(4)
    np.testing.assert_allclose(result(program), expected, rtol=1e-5, atol=1e-6)
    assert f"'alder.bump' on {backend}: lowering by alder-ops 0.9.2" in str(program.decisions)
    assert f"'alder.order' on {backend}: no lowering" in str(program.decisions)


def test_training_on_the_backend():
    program = ml.compile(
        Sequential(Linear(8), Relu(), Linear(3), Sort()), ml.AlderBackend(tag="t"), shapes={"input": [3, 4]}
    )
    params = program.randomize_params(seed=0)
    ones = {"output": np.ones((3, 3), np.float32)}
    outputs, gradients = program.evaluate(params, {"input": X}, output_gradients=ones)
    hidden = np.maximum(X @ params["0.weight"].T + params["0.bias"], 0)
    np.testing.assert_allclose(outputs["output"], np.sort(hidden @ params["2.weight"].T + params["2.bias"]), rtol=1e-4)
    np.testing.assert_allclose(gradients["2.weight"], ones["output"].T @ hidden, rtol=1e-4, atol=1e-5)
    assert program.backend.tag == "t"
    assert program.backend.calls > 0
    assert issubclass(plugins.load_device("alder-board"), ml.AlderBackend)


def test_passes_and_options():
    folded = compiled(lambda x: ml.ops.exp(-x * x), alder_fold=True)
    assert "alder.bump" in str(folded.graph)
    assert "alder.bump" in str(compiled(lambda x: ml.ops.exp(-x * x), alder={"fold": True}).graph)
    assert "alder.bump" not in str(compiled(lambda x: ml.ops.exp(-x * x)).graph)
    np.testing.assert_allclose(result(folded), BUMP, rtol=1e-6)
    doubled = ml.compile(twice(), "alder", optimization_level="low")
    assert "x + x became 2 * x at level low, calm" in str(doubled.decisions)
    assert "became" not in str(ml.compile(twice(), "alder", optimizations={"alder-all": False}).decisions)


def test_target():
    program = compiled(bump, target_hardware="alder-b")
    assert "alder counted" in str(program.decisions)
    assert plugins.target("alder_board").spec is lab.BOARD
    assert lab.BOARD.scratchpad == 16 << 10
    assert any(entry.spec.name == "alder_board" for entry in plugins.detect_targets())


def test_profiler():
    program = compiled(lambda x: ml.ops.exp(x))
    with plugins.load_profiler("alder-watch")() as watching:
        result(program)
    assert "exp: " in watching.summary()


def test_frontend_format_and_names(tmp_path):
    program = ml.compile(ml.alder_polynomial((1.0, -2.0, 0.5), size=3), "alder")
    x = np.array([-1.0, 0.0, 2.0], np.float32)
    np.testing.assert_allclose(program({"x": x})["y"], 1 - 2 * x + 0.5 * x**2, rtol=1e-6)
    assert "frontend 'alder-polynomial' by alder-lab 2.0.1" in str(program.decisions)
    assert program.alder_size() == 3
    program.export(tmp_path / "model.alder")
    loaded = ml.load(tmp_path / "model.alder", backend="alder")
    np.testing.assert_array_equal(loaded({"x": x})["y"], program({"x": x})["y"])
    assert list(ml.compile(str(tmp_path / "model.alder"), "numpy").graph.output_names) == ["y"]
    with pytest.raises(ml.ModelError, match="without coefficients"):
        ml.compile(Polynomial(()), "alder")


def test_command(tmp_path):
    (tmp_path / "graph.txt").write_text(str(twice()))
    run = CliRunner().invoke(main, ["alder-count", str(tmp_path / "graph.txt")])
    assert (run.exit_code, run.output) == (0, "add: 1\n")


def test_observers_and_deciders():
    lab.seen.clear()
    program = ml.compile(twice(), "alder", optimization_level="high", alder_log=True)
    np.testing.assert_array_equal(program({"x": X})["y"], 2 * X)
    assert "2 * x at level high, eager" in str(program.decisions)
    kinds = {row[0] for row in lab.seen}
    assert kinds == {"pass", "build", "stage", "passed", "built", "ended", "end"}
    assert any(row[:2] == ("pass", "alder-double") for row in lab.seen)
    assert ("passed", "alder-double", False) in lab.seen
    ((_, backend, error, stages),) = [row for row in lab.seen if row[0] == "end"]
    assert (backend, error) == ("alder", "NoneType")
    assert stages[-1] == "build"
    with pytest.raises(ml.MithrilError):
        ml.compile(twice(), "alder", optimizations={"no-such-pass": True})
    assert lab.seen[-1][2] != "NoneType"
