"""Files of weights: every dtype and rank survives a round trip."""

from __future__ import annotations

import pytest

from mithril.base.dtypes import ALL, dtype as as_dtype
from mithril.runtime.weight_files import load_file, save_file
from mithril_testing.constants import SHAPES, difference, values


@pytest.mark.parametrize("kind", [d.name for d in ALL])
def test_arrays_of_every_dtype_and_rank_survive(kind, tmp_path):
    arrays = {name: values(as_dtype(kind), shape) for name, shape in SHAPES.items()}
    save_file(arrays, tmp_path / "weights.safetensors", {})
    read = load_file(tmp_path / "weights.safetensors")
    wrong = [text for name, expected in arrays.items() if (text := difference(name, read[name], expected))]
    assert not wrong
