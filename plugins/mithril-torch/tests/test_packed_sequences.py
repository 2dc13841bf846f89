"""``ml.from_torch``: packed sequences are rows of equal length and their lengths."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence, pad_packed_sequence

import mithril as ml
from mithril.graph import UnsupportedError
from mithril_torch.importing import packed as _packed  # noqa: F401  # it defines the operators

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


def draw(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


class Packed(nn.Module):
    def __init__(self, kind="LSTM", *, batch_first=True, is_sorted=False, more=0, function=None, **settings):
        super().__init__()
        self.rnn = getattr(nn, kind)(4, 5, batch_first=batch_first, **settings)
        self.batch_first, self.is_sorted, self.more, self.function = batch_first, is_sorted, more, function

    def forward(self, x, lengths, *states):
        steps = x.size(1 if self.batch_first else 0)
        packed = pack_padded_sequence(x, lengths, self.batch_first, self.is_sorted)
        if self.function is not None:
            return self.function(self, packed)
        packed, last = self.rnn(packed, *states)
        return pad_packed_sequence(packed, self.batch_first, -1.5, total_length=steps + self.more), last


def compare(module, inputs, other_inputs, **settings):
    """Compare an imported module with PyTorch, at the sizes of the example and at others."""
    compiled = ml.compile(ml.from_torch(module, inputs, **settings), "torch", inference=True)
    for values in (inputs, other_inputs):
        expected = torch.utils._pytree.tree_leaves(module(*values))
        results = compiled(dict(zip(("x", "lengths", *(f"states_{k}" for k in range(9))), values, strict=False)))
        for result, theirs in zip(results.values(), expected, strict=True):
            torch.testing.assert_close(result, theirs.detach(), rtol=1e-5, atol=1e-6, check_dtype=False)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("LSTM", {"num_layers": 2, "bidirectional": True, "proj_size": 3}),
        ("LSTM", {"batch_first": False, "is_sorted": True, "more": 2}),
        ("GRU", {"num_layers": 2, "bidirectional": True}),
        ("GRU", {"batch_first": False, "bias": False}),
        ("RNN", {"bidirectional": True, "nonlinearity": "relu"}),
        ("RNN", {"is_sorted": True, "more": 1}),
    ],
)
def test_packed_sequences(kind, settings):
    torch.manual_seed(0)
    module = Packed(kind, **settings).eval()
    is_first = settings.get("batch_first", True)
    first, second = (draw(3, 6, 4), draw(2, 8, 4)) if is_first else (draw(6, 3, 4), draw(8, 2, 4))
    lengths = ([5, 3, 1], [8, 2]) if settings.get("is_sorted") else ([1, 5, 3], [2, 8])
    compare(
        module,
        (first, torch.tensor(lengths[0])),
        (second, torch.tensor(lengths[1])),
        dynamic_shapes={"x": {0: "a", 1: "b"}, "lengths": {0: "a" if is_first else "b"}},
        training=False,
    )


def test_gradients_of_packed_sequences():
    torch.manual_seed(0)
    x, lengths = draw(3, 6, 4), torch.tensor([2, 6, 1])
    last = Packed("GRU", function=lambda m, packed: m.rnn(packed)[1].square().sum())
    last(x, lengths).backward()
    compiled = ml.compile(ml.grad(ml.from_torch(last, (x, lengths))), "numpy")
    results = compiled.evaluate(compiled.randomize_params(0), {"x": x.numpy(), "lengths": lengths.numpy()})
    for name, parameter in last.named_parameters():
        np.testing.assert_allclose(results[f"grad/{name}"], parameter.grad, rtol=1e-4, atol=1e-6)


def test_lists_of_sequences_and_initial_states():
    class Listed(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.GRU(4, 5)

        def forward(self, x, h):
            return self.rnn(pack_sequence([x[:2], x, x[3:4]], enforce_sorted=False), h)[1]

    torch.manual_seed(0)
    module, inputs = Listed(), (draw(6, 4), draw(1, 3, 5))
    model = ml.from_torch(module, inputs, training=False)
    (result,) = ml.compile(model, "torch", inference=True)(dict(zip(("x", "h"), inputs, strict=True))).values()
    torch.testing.assert_close(result, module(*inputs).detach(), rtol=1e-5, atol=1e-6)


def test_operators_on_cpus_are_those_of_pytorch():
    """``ml.verify`` runs the exported program, whose operators these are, to find a node that differs."""
    torch.manual_seed(0)
    module = Packed(num_layers=2, bidirectional=True, is_sorted=True)
    x, lengths, states = draw(3, 6, 4), torch.tensor([5, 2, 1]), [draw(4, 3, 5), draw(4, 3, 5)]
    data = torch.ops.mithril.pack(x, lengths, True)
    weights = list(module.rnn._flat_weights)
    y, *last = torch.ops.mithril.packed_lstm(data, lengths, states, weights, True, 2, 0.0, False, True)
    padded = torch.ops.mithril.unpack(y, lengths, 6, True, -1.5)
    (expected, _), finals = module(x, lengths, tuple(states))
    for result, theirs in zip((padded, *last), (expected, *finals), strict=True):
        torch.testing.assert_close(result, theirs)


REFUSED = {
    "length": (
        lambda m, packed: pad_packed_sequence(m.rnn(packed)[0], batch_first=True)[0],
        "the length of pad_packed_sequence depends on elements of lengths",
    ),
    "short": (
        lambda m, packed: pad_packed_sequence(m.rnn(packed)[0], batch_first=True, total_length=5)[0],
        "pad_packed_sequence with total_length=5 of rows of 6 steps is not supported",
    ),
    "data": (
        lambda m, packed: m.rnn(packed)[0].data.sum(),
        "aten.sum.default reads the data of a packed sequence, whose size depends on elements of lengths",
    ),
    "input": (
        lambda m, packed: m.rnn(PackedSequence(packed.data * 2, packed.batch_sizes))[1],
        "aten.mul.Tensor reads the data of a packed sequence, whose size depends on elements of lengths",
    ),
    "returned": (
        lambda m, packed: m.rnn(packed)[0].data,
        "a result of the module reads the data of a packed sequence, whose size depends on elements of lengths",
    ),
    "sizes": (
        lambda m, packed: packed.data.new_zeros(packed.batch_sizes[1]),
        "the number of rows in a step of a packed sequence depends on elements of lengths",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_sizes_that_depend_on_lengths_are_refused(name):
    function, message = REFUSED[name]
    with pytest.raises(UnsupportedError, match=message) as refused:
        ml.from_torch(Packed(function=function), (draw(3, 6, 4), torch.tensor([2, 5, 1])), training=False)
    assert "total_length=" in refused.value.hint
