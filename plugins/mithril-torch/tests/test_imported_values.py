"""``ml.from_torch``: values at nan, infinities and zeros, settings and gradients of single operators."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_imported_writes import check
from test_importing import draw
from torch import nn

import mithril as ml

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

NAN, INF = float("nan"), float("inf")
SPECIAL = torch.tensor([[1.0, NAN, 3.0, INF], [INF, 2.0, NAN, NAN], [0.0, -1.0, -INF, 5.0]])
INPUTS = SPECIAL, draw(3, 4), torch.tensor([2, 0, 1]), draw(3, 3) > 0
VALUES = {
    "topk": lambda x, y, i, m: [x.topk(2)[0], x.topk(2, dim=0)[0], x.topk(3, largest=False)[0], y[0, 0].topk(1)],
    "topk_order": lambda x, y, i, m: [x[:1].topk(3)[1], y.topk(3, 0)[1], i.topk(2)],
    "sort": lambda x, y, i, m: [x.sort(descending=True)[0], x.sort(dim=0, descending=True, stable=True), x.sort()],
    "argsort": lambda x, y, i, m: [y.argsort(0, descending=True), i.argsort(descending=True)],
    "softplus": lambda x, y, i, m: [F.softplus(y, b, t) for b, t in ((1, 0.2), (3, 0.2), (0.5, 20), (2, 0))],
    "safe_softmax": lambda x, y, i, m: torch.ops.aten._safe_softmax(y.masked_fill(y[:, :1] > 0, -INF), -1),
    "norms": lambda x, y, i, m: [y.norm(p, 1) for p in (0, 0.5, 1, 2, 3, INF, -INF)] + [(y * 0).norm(dim=0)],
    "normalized": lambda x, y, i, m: F.normalize(y, p=0.0),
    "distances": lambda x, y, i, m: [torch.cdist(y, y[:2], p) for p in (0.0, 1.0, 2.0, 3.0)],
    "cholesky": lambda x, y, i, m: [torch.linalg.cholesky(y[:, :3] + 5 * torch.eye(3), upper=u) for u in (False, True)],
    "bools": lambda x, y, i, m: [m * m.T, m * True, x.isfinite(), torch.isclose(y, y + 1e-7)],
    "ranges": lambda x, y, i, m: [torch.arange(5.0), torch.arange(0.5, 2.0, 0.25), torch.arange(1, 4, 0.5)],
    "windows": lambda x, y, i, m: [y.unfold(1, 2, 1), y.unfold(0, 2, 1), y.unfold(-1, 3, 2), y[0].unfold(0, 2, 2)],
    "permuted": lambda x, y, i, m: torch.empty_permuted((2, 3), (1, 0)).fill_(2.0),
    "elements": lambda x, y, i, m: [torch.fmax(x, y), torch.fmin(y, x), torch.exp2(y), torch.hypot(y, y * 2 + 1)],
    "large": lambda x, y, i, m: torch.hypot(y * 1e30, y * 0) + torch.hypot(x[2, 2], y[0, 0]),
    "logcumsumexp": lambda x, y, i, m: y.logcumsumexp(1),
    "eigh": lambda x, y, i, m: [torch.linalg.eigvalsh(y[:, :3], UPLO=u) for u in "LU"],
}


@pytest.mark.parametrize("name", VALUES)
def test_values_equal_those_of_pytorch(name):
    check({name: VALUES[name]}, INPUTS)


class Best(nn.Module):
    def forward(self, x):
        return x.topk(2)[0] + x.topk(2, largest=False)[0]


def test_topk_selects_without_sorting():
    graph = ml.compile(ml.from_torch(Best(), (SPECIAL,)), "numpy", inference=True).graph
    operations = [node.op.name for node in graph.nodes]
    assert not {"sort", "argsort"} & {*operations}
    assert "top_k" in operations


class Sums(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([[0.0, 0.0], [3.0, -4.0]]))
        self.function = function

    def forward(self, x):
        return self.function(self.weight, x)


GRADIENTS = {
    "norm": lambda w, x: w.norm(dim=1) + x,
    "norm3": lambda w, x: w.norm(p=3, dim=1) + x,
    "distance": lambda w, x: torch.cdist(w, torch.zeros(1, 2))[:, 0] + x,
    "norm0.5": lambda w, x: w.norm(p=0.5, dim=1) + x,
    "norm-1": lambda w, x: w.norm(p=-1, dim=1) + x,
    "distance by products": lambda w, x: torch.cdist(w, w, compute_mode="use_mm_for_euclid_dist").sum(1) + x,
    "std": lambda w, x: (w * x[0]).std(dim=1) + torch.std_mean(w, dim=1)[0] + x,
    "normalize": lambda w, x: F.normalize(w, dim=1).sum(1) + x,
    "safe_softmax": lambda w, x: torch.ops.aten._safe_softmax(w.masked_fill(w == 0, -INF), -1)[:, 0] + x,
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_at_zero_equal_those_of_pytorch(name):
    module, x = Sums(GRADIENTS[name]), torch.zeros(2)
    compiled = ml.compile(ml.from_torch(module, x), "numpy")
    module(x).sum().backward()
    params = {"weight": module.weight.detach().numpy()}
    gradients = compiled.evaluate(params, {"x": x.numpy()}, {"output": np.ones(2, np.float32)})[1]
    np.testing.assert_allclose(gradients["weight"], module.weight.grad, rtol=1e-5, atol=1e-6)
