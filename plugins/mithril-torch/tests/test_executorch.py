"""Programs for ExecuTorch, where it is installed, run by its own runtime."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest
import torch

import mithril as ml
from mithril.graph.errors import BackendError, InputError, OptionError
from mithril.models import BatchNorm2d, Conv2d, Gelu, GlobalAvgPool2d, LayerNorm, Linear, Model, Relu

installed = pytest.mark.skipif(find_spec("executorch") is None, reason="executorch is not installed")


def perceptron():
    model = Model()
    for layer in (Linear(16), Gelu(), LayerNorm(16), Linear(3)):
        model += layer
    return model, [2, 5]


def image_model():
    model = Model()
    for layer in (Conv2d(3, 8, 3, padding=1), BatchNorm2d(8), Relu(), GlobalAvgPool2d(), Linear(4)):
        model += layer
    return model, [1, 3, 8, 8]


@installed
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("delegate", [None, "xnnpack"])
@pytest.mark.parametrize("make", [perceptron, image_model])
def test_its_runtime_gives_the_same(make, delegate, tmp_path):
    from executorch.runtime import Runtime

    model, shape = make()
    compiled = ml.compile(model, ml.TorchBackend(), shapes={"input": shape}, inference=True)
    compiled.bind(compiled.randomize_params(seed=0))
    x = torch.from_numpy(np.random.default_rng(0).normal(size=shape).astype(np.float32))
    (expected,) = compiled({"input": x}).values()
    report = compiled.export(tmp_path / "model.pte", delegate=delegate)
    assert report.inputs == ("input",) and len(report.outputs) == 1 and "forward(input)" in str(report)
    method = Runtime.get().load_program(tmp_path / "model.pte").load_method("forward")
    torch.testing.assert_close(method.execute([x])[0], expected, rtol=1e-4, atol=1e-5)


@installed
def test_unsupported_export_is_rejected(tmp_path):
    model, shape = perceptron()
    opened = ml.compile(model, "torch", shapes={"input": ["B", 5]}, inference=True)
    with pytest.raises(InputError, match="the size B is not known"):
        opened.export(tmp_path / "model.pte", params=opened.randomize_params(seed=0))
    compiled = ml.compile(model, "torch", shapes={"input": shape}, inference=True)
    with pytest.raises(InputError, match="there are no parameters to export"):
        compiled.export(tmp_path / "model.pte")
    with pytest.raises(OptionError, match="delegate='vulcan' is not known"):
        compiled.export(tmp_path / "model.pte", params=compiled.randomize_params(seed=0), delegate="vulcan")


@pytest.mark.skipif(find_spec("executorch") is not None, reason="executorch is installed")
def test_without_executorch_the_pip_line_is_said(tmp_path):
    model, shape = perceptron()
    compiled = ml.compile(model, "torch", shapes={"input": shape}, inference=True)
    with pytest.raises(BackendError, match="pip install executorch"):
        compiled.export(tmp_path / "model.pte", params=compiled.randomize_params(seed=0))
