"""``memory_format``: the order of images in memory, on every backend that is installed."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

import mithril as ml
from mithril import OptionError, OptionWarning, StrictError, plugins
from mithril.models import Conv2d, ConvTranspose2d, Flatten, Linear, MaxPool2d, Relu

X = np.random.default_rng(0).standard_normal((2, 3, 12, 12)).astype(np.float32)
BACKENDS = [n for n in ("numpy", "torch", "jax", "mlx", "c", "ggml") if n in plugins.backends()]
NO_EFFECT = {
    "planes": "its convolutions read images as planes of channels",
    "compiler": "its compiler selects the order of images",
}


def network() -> Any:
    model = ml.Model(Conv2d(3, 8, kernel_size=3, name="a"), Relu(), Conv2d(8, 8, kernel_size=3, name="b"), Relu())
    model += MaxPool2d(2)
    model += Flatten()
    model += Linear(4, name="head")
    return model


def compiled(backend: str, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OptionWarning)
        return ml.compile(network(), backend, shapes={"input": list(X.shape)}, **options)


def decision(program: Any) -> str:
    return "\n".join(str(d) for d in program.decisions if "memory_format" in str(d))


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_order_gives_the_same_results_and_says_what_it_does(backend: str) -> None:
    plain = compiled(backend)
    params = plain.randomize_params(seed=0)
    expected = plain.backend.to_numpy(plain.evaluate(params, {"input": plain.backend.array(X)})["output"])
    order = plain.backend.capabilities.images
    for wish in ("channels_first", "channels_last", "auto"):
        program = compiled(backend, memory_format=wish)
        result = program.evaluate(params, {"input": program.backend.array(X)})["output"]
        np.testing.assert_allclose(program.backend.to_numpy(result), expected, rtol=1e-4, atol=1e-5)
        if order in NO_EFFECT:
            assert NO_EFFECT[order] in decision(program)
            assert decision(program).startswith("ignored" if wish == "channels_last" else "choice")
        elif wish == "channels_first":
            words = {"channels": "each convolution transposes: 4 transposes", "either": "keep the order of the inputs"}
            assert words[order] in decision(program)
        else:
            # On MLX the image enters, and the pooled one leaves; PyTorch copies the first alone.
            words = {"channels": "channels last: 2 transposes", "either": "channels last: 1 copies"}
            assert words[order] in decision(program)


@pytest.mark.skipif("torch" not in BACKENDS, reason="PyTorch is not installed")
def test_pytorch_keeps_the_order_from_the_first_convolution_on() -> None:
    import torch

    model = ml.Model(Conv2d(3, 8, kernel_size=3, name="a"), Relu(), Conv2d(8, 8, kernel_size=3, name="b"))
    options = {"shapes": {"input": list(X.shape)}, "memory_format": "channels_last"}
    program = ml.compile(model, "torch", **options)
    program.bind(program.randomize_params(seed=0))
    y = program({"input": torch.from_numpy(X)})["output"]
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert not y.is_contiguous()
    assert program.source.count("channels_last(input_1)") == 1
    slopes = {"output": torch.ones_like(y)}
    gradients = program.evaluate(program.params, {"input": torch.from_numpy(X)}, slopes)[1]
    plain = ml.compile(model, "torch", shapes={"input": list(X.shape)}).bind(program.params)
    for name, slope in plain.evaluate(plain.params, {"input": torch.from_numpy(X)}, slopes)[1].items():
        torch.testing.assert_close(gradients[name], slope, rtol=1e-4, atol=1e-4)


def test_networks_without_images_and_unknown_orders_are_errors() -> None:
    dense = ml.Model(Linear(3, 4, name="a"), Relu())
    for wish in ("auto", "channels_last", "channels_first"):
        with pytest.raises(OptionError, match=f"memory_format='{wish}' is for networks of images, but this one has no"):
            ml.compile(dense, "numpy", shapes={"input": [1, 3]}, memory_format=wish)
    with pytest.raises(OptionError, match="channels_lst"):
        compiled("numpy", memory_format="channels_lst")
    with pytest.raises(StrictError, match="memory_format='channels_last' has no effect on backend 'numpy'"):
        compiled("numpy", memory_format="channels_last", strict=True)
    with pytest.warns(OptionWarning, match="memory_format='channels_last' has no effect"):
        ml.compile(network(), "numpy", shapes={"input": list(X.shape)}, memory_format="channels_last")
    up = ml.Model(ConvTranspose2d(3, 4, kernel_size=2))
    assert "memory_format='auto'" in decision(
        ml.compile(up, "numpy", shapes={"input": list(X.shape)}, memory_format="auto")
    )
