"""Modules imported from PyTorch compute the same on every backend, for two sizes of each open axis."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import mithril as ml

BACKENDS = sorted(ml.plugins.backends())
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(2, ceil_mode=True),
            nn.Conv2d(8, 8, 3, padding=1, groups=8),
            nn.Hardswish(),
            nn.AdaptiveAvgPool2d(1),
        )
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x).flatten(1))


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(11, 16), nn.Embedding(9, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        h = self.embedding(tokens) + self.places(torch.arange(length))
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        q = h.view(h.shape[0], length, 2, 8).transpose(1, 2)
        h = h + nn.functional.scaled_dot_product_attention(q, q, q, mask).transpose(1, 2).reshape(h.shape)
        return torch.as_tensor(self.layer(h)).mean(1)


torch.manual_seed(0)
MODULES = {
    "images": (Images().eval(), torch.randn(3, 3, 16, 16), ({0: "batch"},), [(3, 3, 16, 16), (2, 3, 16, 16)]),
    "tokens": (Tokens().eval(), torch.ones(2, 6, dtype=torch.int64), {"tokens": {0: "B", 1: "T"}}, [(2, 6), (3, 4)]),
}


@pytest.fixture(scope="module", params=MODULES)
def imported(request: pytest.FixtureRequest) -> tuple[str, ml.Model]:
    module, example, shapes, _ = MODULES[request.param]
    return request.param, ml.from_torch(module, example, dynamic_shapes=shapes)


@pytest.mark.parametrize("backend", BACKENDS)
def test_imported_modules_on_every_backend(imported: tuple[str, ml.Model], backend: str) -> None:
    name, model = imported
    module, example, _, shapes = MODULES[name]
    compiled = ml.compile(model, backend, inference=True)
    rng = np.random.default_rng(0)
    for shape in shapes:
        x = rng.integers(0, 11, shape) if name == "tokens" else rng.standard_normal(shape).astype(np.float32)
        assert example.dtype == torch.from_numpy(x).dtype
        with torch.no_grad():
            expected = module(torch.from_numpy(x)).numpy()
        result = compiled.backend.to_numpy(compiled.evaluate({model.inputs[0]: x})["output"])
        np.testing.assert_allclose(result, expected, rtol=1e-4, atol=2e-5 * np.abs(expected).max())


def test_dynamic_shapes_of_more_inputs_than_there_are():
    with pytest.raises(ml.InputError, match="dynamic_shapes has 2 items for 1 example inputs\n  inputs: x"):
        ml.from_torch(MODULES["images"][0], torch.randn(3, 3, 16, 16), dynamic_shapes=({0: "batch"}, None))
