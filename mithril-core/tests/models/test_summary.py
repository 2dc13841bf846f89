"""The table: rows by depth, totals, narrow terminals, models of unknown shapes."""

import pytest

from mithril.graph.errors import ModelError
from mithril.models import Conv2d, Flatten, Model, Tanh


def model():
    block = Model(name="block")
    block += Conv2d(3, 4, kernel_size=3, name="conv")
    block += Tanh()
    full = Model()
    full += block
    full += Flatten()
    return full


def test_the_whole_table():
    assert model().summary(shapes={"input": [2, 3, 8, 8]}, width=100).splitlines() == [
        "layer                result           parameters  flops  memory",
        "---------------------------------------------------------------",
        "model                f32[2, 144]             112  19.9k  4.62kB",
        "  block              f32[2, 4, 6, 6]         112  19.9k  3.47kB",
        "    conv (Conv2d)    f32[2, 4, 6, 6]         112  15.8k  2.32kB",
        "    tanh (Tanh)      f32[2, 4, 6, 6]           0  4.03k  1.15kB",
        "  flatten (Flatten)  f32[2, 144]               0      0  1.15kB",
        "112 parameters (448B), 19.9k operations",
    ]


def test_narrow_terminals_lose_columns_and_never_overflow():
    for width in (20, 40, 60, 200):
        text = model().summary(shapes={"input": [2, 3, 8, 8]}, width=width)
        assert all(len(line) <= max(width, 30) for line in text.splitlines()[:-1])


def test_unknown_shapes():
    lines = model().summary(width=80).splitlines()
    assert lines[0].split() == ["layer", "kind"]
    assert lines[-1] == "pass the shapes of input to see sizes: summary(shapes=...)"


def test_symbolic_shapes():
    assert "f32[B, 144]" in model().summary(shapes={"input": ["B", 3, 8, 8]}, width=100)


def test_unknown_names():
    with pytest.raises(ModelError) as error:
        model().summary(shapes={"inptu": [1]})
    assert error.value.hint == "did you mean 'input'?"
