"""TorchScript: programs that run by ``torch.jit``, and files that PyTorch reads without mithril."""

from __future__ import annotations

import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch

import mithril as ml
from mithril import ops
from mithril.models import (
    BatchNorm2d,
    Conv2d,
    Gelu,
    GlobalAvgPool2d,
    Layer,
    LayerNorm,
    Linear,
    Model,
    Relu,
    Sort,
)


def network():
    return Model(Conv2d(3, 8, 3, padding=1), BatchNorm2d(8), Relu(), GlobalAvgPool2d(), Linear(4), Gelu(), LayerNorm(4))


class TakeEach(Layer):
    """Select one element per row, and those of one column for all rows."""

    def build(self, input):
        first = ops.argmax(input, axis=1, keepdims=True)
        return ops.take_along_axis(input, first, axis=1) + ops.take_along_axis(input, np.array([[1, 3]]), axis=1)


class Totals(Layer):
    def build(self, input):
        return ops.scan(lambda total, row: (total + row, total * row), input[0], input)[1]


SHAPE = [2, 3, 8, 8]
X = np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32)


def scripted(level, **options):
    torch_options = {"graph_mode": True, "script_optimization": level}
    return ml.compile(network(), "torch", shapes={"input": SHAPE}, torch_options=torch_options, **options)


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_programs_run_as_torchscript(level, monkeypatch):
    traced, trace = [], torch.jit.trace
    monkeypatch.setattr(torch.jit, "trace", lambda *a, **k: (traced.append(1), trace(*a, **k))[1])
    plain, compiled = (
        ml.compile(network(), "torch", shapes={"input": SHAPE}, inference=True),
        scripted(level, inference=True),
    )
    params = plain.randomize_params(seed=0)
    expected = plain.evaluate(params, {"input": X})["output"]
    for _ in range(3):
        torch.testing.assert_close(compiled.evaluate(params, {"input": X})["output"], expected, rtol=1e-5, atol=1e-5)
    assert len(traced) == 1
    assert "graph_mode: TorchScript, traced" in str(compiled.decisions)


def test_programs_with_gradients_run_as_python():
    plain, compiled = ml.compile(network(), "torch", shapes={"input": SHAPE}), scripted(3)
    params = plain.randomize_params(seed=0)
    slope = torch.ones(2, 4)
    expected = plain.evaluate(params, {"input": X}, slope)[1]
    gradients = compiled.evaluate(params, {"input": X}, slope)[1]
    torch.testing.assert_close(gradients, expected, rtol=1e-5, atol=1e-5)
    assert "graph_mode: TorchScript traces no gradients" in str(compiled.decisions)


def test_kernels_for_inference_need_an_inference_program():
    compiled = scripted(3)
    compiled.evaluate(compiled.randomize_params(seed=0), {"input": X}, training=False)
    assert "levels 2 and 3 are for programs with inference=True" in str(compiled.decisions)


@pytest.mark.parametrize("other", [{"jit": True}, {"torch_fx": True}, {"torch_dynamo": True}])
def test_other_compilers_conflict(other):
    with pytest.raises(ml.OptionError, match="graph_mode in torch_options conflicts with"):
        scripted(1, **other)


def run_file(program, path):
    """Run a program in a process that imports PyTorch only, and return its result."""
    np.save(path.with_suffix(".npy"), X)
    text = (
        f"import sys, numpy as np, torch; x = torch.from_numpy(np.load({str(path.with_suffix('.npy'))!r}))\n{program}\n"
    )
    text += f"assert 'mithril' not in sys.modules; np.save({str(path.with_suffix('.npy'))!r}, result.detach().numpy())"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", text], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return np.load(path.with_suffix(".npy"))


@pytest.mark.parametrize(
    ("name", "options", "program"),
    [
        ("model.pt", {}, "(result,) = torch.jit.load({path!r})(x)"),
        ("model.pt2", {}, "(result,) = torch.export.load({path!r}).module()(x)"),
        pytest.param(
            "model.pt2",
            {"aot": True},
            "(result,) = torch._inductor.aoti_load_package({path!r})(x)",
            marks=[pytest.mark.slow, pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")],
            id="aot",
        ),
    ],
)
def test_files_run_without_mithril(name, options, program, tmp_path):
    compiled = ml.compile(network(), "torch", shapes={"input": SHAPE}, inference=True)
    compiled.bind({n: np.asarray(x) for n, x in compiled.randomize_params(seed=0).items()})  # as other engines return
    report = compiled.export(tmp_path / name, **options)
    assert report.inputs == ("input",) and "forward(input)" in str(report)
    result = run_file(program.format(path=str(tmp_path / name)), tmp_path / name)
    np.testing.assert_allclose(result, compiled({"input": X})["output"].numpy(), rtol=1e-4, atol=1e-5)


def test_open_sizes_stay_open_in_exported_programs(tmp_path):
    model = Model(Linear(8), Gelu(), Linear(3))
    compiled = ml.compile(model, "torch", shapes={"input": ["B", 5]}, inference=True)
    compiled.bind(compiled.randomize_params(seed=0))
    compiled.export(tmp_path / "model.pt2")
    module = torch.export.load(tmp_path / "model.pt2").module()
    for rows in (1, 2, 7):
        x = torch.ones(rows, 5)
        torch.testing.assert_close(module(x)[0], compiled({"input": x})["output"])
    with pytest.raises(ml.InputError, match="size 'B' is symbolic, but TorchScript requires static shapes"):
        compiled.export(tmp_path / "model.pt")


@pytest.mark.parametrize("layer", [Sort(descending=True), TakeEach()], ids=lambda x: type(x).__name__)
def test_selections_stay_open_in_an_exported_program(layer, tmp_path):
    model = Model()
    model |= layer(input="x", output="y")
    compiled = ml.compile(model, "torch", shapes={"x": ["rows", 4]}, outputs=["y"])
    compiled.export(tmp_path / "model.pt2")
    program = torch.export.load(tmp_path / "model.pt2").module()
    for rows in (1, 3, 6):
        x = torch.randn(rows, 4)
        (result,) = program(x)
        torch.testing.assert_close(result, compiled({"x": x})["y"])


def test_an_open_size_that_torch_export_makes_constant_is_named(tmp_path):
    model = Model()
    model |= Totals()(input="x", output="y")
    compiled = ml.compile(model, "torch", shapes={"x": ["steps", 4]})
    with pytest.raises(ml.UnsupportedError, match="open sizes of this program constant: steps"):
        compiled.export(tmp_path / "model.pt2")
    assert not (tmp_path / "model.pt2").exists()
