"""``ml.from_torch``: errors of other libraries become one UnsupportedError with the user's line."""

from __future__ import annotations

import sys

import pytest
import torch
from test_importing import draw
from torch import nn

import mithril as ml
from mithril.graph import UnsupportedError

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(self, x)


REJECTED = {
    "branch": lambda m, x: x * 2 if x.sum() > 0 else x,
    "item": lambda m, x: x.new_zeros(int(x.sum().item())),
    "size": lambda m, x: x[: int(x.abs().sum().item()) + 1] if x.nonzero().shape[0] > 2 else x,
    "unequal": lambda m, x: x @ x,
    "numpy": lambda m, x: x + torch.from_numpy(x.numpy() * 2),
    "derivative": lambda m, x: torch.func.grad(lambda a: (a**2).sum())(x),
    "bytes": lambda m, x: torch.ao.nn.quantized.dynamic.Linear(4, 4)(x),
}


def test_text_of_a_rejected_module_is_shown(capfd):
    def branches(m, x):
        print("from the module", file=sys.stderr)
        return x if x.sum() > 0 else -x

    with pytest.raises(UnsupportedError):
        ml.from_torch(Function(branches), draw(3, 4), training=False)
    assert capfd.readouterr().err.strip() == "from the module"


@pytest.mark.parametrize("name", REJECTED)
def test_errors_of_torch_become_unsupported(name, capfd):
    try:
        model = ml.from_torch(Function(REJECTED[name]), draw(3, 4), training=False)
        ml.compile(model, "numpy", inference=True)
    except UnsupportedError as error:
        assert "test_import_errors.py" in str(error)
        assert "def forward" not in capfd.readouterr().err  # PyTorch prints the graph that it rejects
    else:
        assert name in ("derivative", "bytes"), "only these two may be supported"
