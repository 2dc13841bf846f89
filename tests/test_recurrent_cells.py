"""Cells, rows of different lengths, and normalized parameters: values of PyTorch, and the same on every backend."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import mithril as ml
from mithril.models import (
    GRU,
    LSTM,
    RNN,
    Conv2d,
    GRUCell,
    Layer,
    Linear,
    LSTMCell,
    Model,
    RNNCell,
    SpectralNorm,
    WeightNorm,
)

BACKENDS = sorted(ml.plugins.backends())
generator = np.random.default_rng(5)


def draw(*shape: int) -> Any:
    return generator.normal(size=shape).astype(np.float32)


def loaded(module: nn.Module) -> dict[str, Any]:
    return {name: x.numpy() for name, x in module.state_dict().items()}


def compiled_for(layer: Layer, backend: str, inputs: dict[str, Any]) -> Any:
    return ml.compile(layer, backend, shapes={name: list(x.shape) for name, x in inputs.items()})


X, H, C = draw(3, 4), draw(3, 5), draw(3, 5)
SEQUENCE, LENGTHS = draw(3, 6, 4), np.array([6, 1, 4], np.int32)


@pytest.mark.parametrize("backend", BACKENDS)
def test_cells(backend: str) -> None:
    with torch.no_grad():
        for cell, module, states in (
            (RNNCell(5), nn.RNNCell(4, 5), {"hidden": H}),
            (GRUCell(4, 5), nn.GRUCell(4, 5), {"hidden": H}),
            (LSTMCell(5, bias=False), nn.LSTMCell(4, 5, bias=False), {"hidden": H, "cell": C}),
        ):
            inputs = {"input": X, **states}
            compiled = compiled_for(cell, backend, inputs)
            initial = tuple(map(torch.tensor, states.values()))
            expected = module(torch.tensor(X), initial if len(initial) > 1 else initial[0])
            results = compiled.evaluate(loaded(module), inputs).values()
            for actual, value in zip(results, expected if len(initial) > 1 else [expected], strict=True):
                np.testing.assert_allclose(compiled.backend.to_numpy(actual), value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("cls", "reference"), [(LSTM, nn.LSTM), (GRU, nn.GRU)], ids=["lstm", "gru"])
def test_lengths_are_packing(backend: str, cls: Any, reference: Any) -> None:
    module = reference(4, 5, num_layers=2, bidirectional=True, batch_first=True)
    packed = pack_padded_sequence(torch.tensor(SEQUENCE), torch.tensor(LENGTHS), batch_first=True, enforce_sorted=False)
    with torch.no_grad():
        y, last = module(packed)
    expected = [pad_packed_sequence(y, batch_first=True)[0], *(last if isinstance(last, tuple) else [last])]
    inputs = {"input": SEQUENCE, "lengths": LENGTHS}
    compiled = compiled_for(cls(4, 5, layers=2, bidirectional=True), backend, inputs)
    results = compiled.evaluate(loaded(module), inputs)
    for actual, value in zip(results.values(), expected, strict=True):
        np.testing.assert_allclose(compiled.backend.to_numpy(actual), value, rtol=1e-5, atol=1e-6)


def test_elements_beyond_the_length_have_no_influence() -> None:
    layer = RNN(4, 5)
    garbage = np.where(np.arange(6)[None, :, None] < LENGTHS[:, None, None], SEQUENCE, np.float32(1e6))
    expected = layer(SEQUENCE, lengths=LENGTHS)
    for name, y in layer(garbage, lengths=LENGTHS).items():
        np.testing.assert_array_equal(y, expected[name])
    assert not any(y.any() for y in layer(SEQUENCE, lengths=np.zeros(3, np.int32)).values())


def test_lengths_are_checked() -> None:
    with pytest.raises(ml.ShapeError, match="'lengths' has 2 rows, the input has 3"):
        RNN(5)(SEQUENCE, lengths=LENGTHS[:2])
    with pytest.raises(ml.DTypeError, match="lengths must be integers, got float32"):
        shapes = {"input": [3, 6, 4], "lengths": [3]}
        ml.compile(RNN(5), "numpy", shapes=shapes, types={"lengths": "float32"}).graph
    with pytest.raises(ml.MithrilError, match="elements of 'hidden'"):
        RNNCell(5)(X, hidden=X)


# -- normalized parameters ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("layer", [Linear(4, 5), Conv2d(4, 2, kernel_size=3, padding=1)], ids=["linear", "conv"])
def test_weight_norm_starts_as_the_layer_itself(layer: Layer, axis: int) -> None:
    x = X if isinstance(layer, Linear) else draw(2, 4, 5, 5)
    plain = compiled_for(layer, "numpy", {"input": x})
    params = plain.randomize_params(3)
    normal = compiled_for(WeightNorm(layer, axis=axis), "numpy", {"input": x})
    stored = normal.randomize_params(3)
    assert set(stored) == {*params, "weight_g"}
    np.testing.assert_array_equal(stored["weight"], params["weight"])
    expected = plain.evaluate(params, {"input": x})["output"]
    np.testing.assert_allclose(normal.evaluate(stored, {"input": x})["output"], expected, rtol=1e-5, atol=1e-6)
    longer = {**stored, "weight": stored["weight"] * 3}
    np.testing.assert_allclose(normal.evaluate(longer, {"input": x})["output"], expected, rtol=1e-5, atol=1e-6)


def test_weight_norm_of_pretrained_weights() -> None:
    module = nn.utils.parametrizations.weight_norm(nn.Linear(4, 5))
    inner = Linear(4, 5)
    inner.pretrained = {"weight": module.weight.detach().numpy(), "bias": module.bias.detach().numpy()}
    np.testing.assert_allclose(WeightNorm(inner)(X), module(torch.tensor(X)).detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_spectral_norm_approaches_the_largest_singular_value(backend: str) -> None:
    model = Model(SpectralNorm(Linear(4, 5, bias=False), iterations=2))
    compiled = compiled_for(model, backend, {"input": X})
    params, state = compiled.randomize_params(0), compiled.initial_state()
    for _ in range(20):
        outputs, state = compiled.evaluate(params, {"input": X}, state=state, training=True)
    outputs = compiled.evaluate(params, {"input": X}, state=state)[0]
    weight = compiled.backend.to_numpy(params["spectral_norm.weight"])
    expected = X @ weight.T / np.linalg.norm(weight, 2)
    np.testing.assert_allclose(compiled.backend.to_numpy(outputs["output"]), expected, rtol=1e-3, atol=1e-4)


def test_a_layer_without_the_parameter_is_refused() -> None:
    with pytest.raises(ml.ModelError, match="has no parameter 'kernel'"):
        WeightNorm(Linear(4, 5), "kernel")(X)
    with pytest.raises(ml.ModelError, match="is computed, not a parameter"):
        m = Model()
        m |= WeightNorm(WeightNorm(Linear(4, 5)))(input="x", output="y")
        m(X)
