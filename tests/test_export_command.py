"""``mithril export`` and the other commands on files of models: each result equals that of the model itself."""

from __future__ import annotations

import numpy as np
import pytest
from click.testing import CliRunner

import mithril as ml
from mithril.models import Linear, Relu, Sequential
from mithril_tools import cli

X = np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4)


def run(*arguments, code=0):
    result = CliRunner().invoke(cli.main, [str(a) for a in arguments])
    assert result.exit_code == code, result.output
    return result.output


@pytest.fixture
def onnx(tmp_path):
    """Return the path of a network as an ONNX file, and its results."""
    pytest.importorskip("onnx")
    compiled = ml.compile(Sequential(Linear(8), Relu(), Linear(3)), "numpy", shapes={"input": ["B", 4]}, inference=True)
    compiled.bind(compiled.randomize_params(seed=3))
    compiled.export(tmp_path / "net.onnx")
    return tmp_path / "net.onnx", compiled({"input": X})["output"]


def test_an_onnx_file_becomes_a_folder_of_c(onnx, tmp_path):
    pytest.importorskip("mithril_cbackend")
    printed = run("export", onnx[0], tmp_path / "out", "--shape", "input=2,4", "--option", "num_threads=1")
    assert printed.startswith(f"{tmp_path / 'out'}: 7 files, ")
    assert {"model.c", "model.weights", "Makefile"} <= {p.name for p in (tmp_path / "out").iterdir()}


def test_a_file_becomes_another_one(onnx, tmp_path):
    pytest.importorskip("mithril_ggml")
    path, expected = onnx
    printed = run("export", path, tmp_path / "net.gguf", "--shape", "input=2,4", "--set", "quantize=q8_0")
    assert ": 1 file, " in printed
    result = ml.load(tmp_path / "net.gguf", backend="numpy")({"input": X})["output"]
    np.testing.assert_allclose(result, expected, atol=0.02)
    assert not np.array_equal(result, expected)  # quantized as --set asks
    printed = run("export", tmp_path / "net.gguf", tmp_path / "again.onnx", code=1)
    assert "holds a compiled program" in printed and "ml.load(" in printed


def test_parameters_of_a_model_in_python(onnx, tmp_path):
    (tmp_path / "net.py").write_text(
        "from mithril.models import Linear, Sequential\nnet = Sequential(Linear(3))\n", encoding="utf-8"
    )
    command = ("export", f"{tmp_path}/net.py:net", tmp_path / "mine.onnx", "--shape", "input=B,4")
    assert "--params FILE, or --seed 0" in run(*command, code=1)
    assert not (tmp_path / "mine.onnx").exists()
    run(*command, "--seed", 0)
    compiled = ml.compile(Sequential(Linear(3)), "numpy", shapes={"input": ["B", 4]})
    params = {"0.weight": np.ones((3, 4), np.float32), "0.bias": np.zeros(3, np.float32)}
    compiled.bind(params).save(tmp_path / "w.safetensors")
    run(*command, "--params", tmp_path / "w.safetensors")
    result = ml.load(tmp_path / "mine.onnx", backend="numpy")({"input": X})["output"]
    np.testing.assert_allclose(result, X @ params["0.weight"].T, rtol=1e-6)


def test_commands_take_files(onnx):
    path, _ = onnx
    assert "def forward" in run("compile", path, "--shape", "input=2,4")
    assert "everything agrees" in run("diff", path, "--backends", "numpy,numpy", "--shape", "input=2,4")
    assert "numpy" in run("bench", path, "--backends", "numpy", "--shape", "input=2,4", "--iterations", 3)
    assert "there is no such file" in run("compile", path.with_name("other.onnx"), code=1)


def test_a_folder_of_a_checkpoint_is_a_model(tmp_path):
    pytest.importorskip("mithril_hub")
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    assert "has no model.safetensors" in run("compile", tmp_path, code=1)  # read as a folder of Hugging Face
    (tmp_path / "config.json").unlink()
    printed = run("compile", tmp_path, code=1)
    assert "huggingface: a folder with config.json" in printed and "suffix" in printed
