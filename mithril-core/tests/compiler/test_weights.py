"""Files of weights: every dtype and rank survives a round trip."""

from __future__ import annotations

import os
import shutil
from types import SimpleNamespace

import numpy as np
import pytest

from mithril.compiler.parameters import moved_to_file
from mithril.compiler.weight_files import load_file, save_file
from mithril.graph import OptionError
from mithril.graph.dtypes import ALL, dtype as as_dtype
from mithril_testing.constants import SHAPES, difference, values


@pytest.mark.parametrize("kind", [d.name for d in ALL])
def test_arrays_of_every_dtype_and_rank_survive(kind, tmp_path):
    arrays = {name: values(as_dtype(kind), shape) for name, shape in SHAPES.items()}
    save_file(arrays, tmp_path / "weights.safetensors", {})
    read = load_file(tmp_path / "weights.safetensors")
    wrong = [text for name, expected in arrays.items() if (text := difference(name, read[name], expected))]
    assert not wrong


@pytest.mark.parametrize("reserves", [True, False])
def test_released_weights_survive_a_full_disk(reserves, tmp_path, monkeypatch):
    """Limit the size of files after the first array, or report a full disk where space cannot be reserved."""
    resource = pytest.importorskip("resource")
    arrays = {name: np.full((1 << 7, 1 << 7), k, np.float32) for k, name in enumerate("abc")}
    params = dict(arrays)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if not reserves:
        monkeypatch.delattr(os, "posix_fallocate", raising=False)
        monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=100_000))
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(OptionError, match="cannot store weights"):
            moved_to_file(params, str(tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [*params] == [*arrays]
    monkeypatch.undo()
    views = moved_to_file(
        {**params, "scalar": np.float32(2), "transposed": np.arange(6).reshape(2, 3).T}, str(tmp_path)
    )
    np.testing.assert_array_equal(views["b"], arrays["b"])
    assert views["scalar"] == 2
    np.testing.assert_array_equal(views["transposed"], [[0, 3], [1, 4], [2, 5]])
    assert moved_to_file({}, str(tmp_path)) == {}
