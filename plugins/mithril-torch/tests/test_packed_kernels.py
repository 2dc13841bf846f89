"""Embedded kernels of convolutions in oneDNN's layout: results, the conditions, and the memory of one copy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import mithril as ml
from mithril.models import Conv2d, Layer, Model, Relu
from mithril_torch.inference_module import InferenceModule, inference_program

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="PyTorch without oneDNN")
rng = np.random.default_rng(0)
IMAGE = rng.normal(size=(2, 8, 9, 9)).astype(np.float32)


def network(groups=1, padding=1, size=3, stride=1):
    model = Model()
    model += Conv2d(8, 16, size, stride=stride, padding=padding, groups=groups, name="c")
    model += Relu()
    model += Conv2d(16, 4, 1, bias=False, name="d")
    return model


def bound(model, backend="torch", shape=IMAGE.shape, **options):
    program = ml.compile(model, backend, shapes={"input": list(shape)}, static_inference=True, **options)
    reference = ml.compile(model, "numpy", shapes={"input": list(IMAGE.shape)})
    program.bind({name: np.asarray(x) for name, x in reference.randomize_params(0).items()})
    return program, next(iter(program({"input": IMAGE[: shape[0]]}).values()))


def kernels(program):
    """Return the tensors with the shape of a kernel that the program keeps."""
    values = program.programs[-1].executable.forward.__globals__.values()
    return [x for x in values if isinstance(x, torch.Tensor) and x.ndim >= 4 and x.shape[0] != 1]


@pytest.mark.parametrize("settings", [{}, {"groups": 4}, {"groups": 8, "stride": 2}, {"padding": "same", "size": 4}])
def test_packed_kernels_give_the_results_of_numpy(settings):
    program, result = bound(network(**settings))
    _, expected = bound(network(**settings), "numpy")
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)
    assert [x.is_mkldnn for x in kernels(program)] == [True, True], "a program keeps the kernels in one layout only"
    assert program.source.count("c_weight = ") == 1, "plain kernels of all convolutions are in memory at once"
    assert torch.as_tensor(result).is_contiguous(memory_format=torch.channels_last)


def test_autograd_differentiates_with_respect_to_the_image():
    """Use the kernels as they were before they were packed, since oneDNN's own operation has no gradient."""
    program, result = bound(network(groups=4))
    x = torch.tensor(IMAGE, requires_grad=True)
    with torch.enable_grad():
        (y,) = program.programs[-1].executable.forward({}, {"input": x}).values()
        y.sum().backward()
    np.testing.assert_allclose(y.detach(), result, rtol=1e-5, atol=1e-5)
    assert x.grad.abs().sum() > 0


@pytest.mark.parametrize("batch", [1, 2])
def test_autocast_selects_the_precision(batch):
    """Use the kernels as they were before they were packed, since autocast does not cast oneDNN's own operation."""
    program, result = bound(network(), shape=(batch, *IMAGE.shape[1:]))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        (y,) = program.programs[-1].executable.forward({}, {"input": torch.tensor(IMAGE[:batch])}).values()
    assert y.dtype == torch.bfloat16
    np.testing.assert_allclose(y.float(), result, rtol=0.05, atol=0.05)


def test_other_runtimes_get_plain_kernels():
    program, result = bound(network())
    graph, forward = inference_program(program)
    image = torch.tensor(IMAGE)
    with torch.no_grad():
        captured = torch.export.export(InferenceModule(graph, forward, {}).eval(), (image,))
    np.testing.assert_allclose(captured.module()(image)[0], result, rtol=1e-5, atol=1e-5)


class Shared(Layer):
    def build(self, x):
        w = self.param("w", [8, 8, 3, 3], "normal(std=0.1)")
        y = ml.ops.conv(x, w, padding=((1, 1), (1, 1)))
        return ml.ops.conv(y, w, padding=((0, 0), (0, 0)))


@pytest.mark.parametrize(
    ("model", "options"),
    [(Shared(), {}), (network(), {"torch_fx": True}), (network(), {"shape": (None, *IMAGE.shape[1:])})],
    ids=["shared", "captured", "sizes"],
)
def test_other_kernels_stay_plain(model, options):
    """Leave kernels of several convolutions, of captured programs and of images of any size."""
    program, result = bound(model, **options)
    assert np.abs(np.asarray(result)).max() > 0.1
    np.testing.assert_allclose(result, bound(model, "numpy")[1], rtol=1e-5, atol=1e-5)
    assert kernels(program) and not any(x.is_mkldnn for x in kernels(program))
