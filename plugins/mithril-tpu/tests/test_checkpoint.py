"""Sharded checkpoints: written on one mesh, loaded on another."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from small_models import block

import mithril as ml
from mithril_parallel.sharding.checkpoint import Reader

X = {"x": np.random.default_rng(0).standard_normal((8, 6, 16), np.float32)}
MESHES = {
    "one": (None, {}),
    "fsdp": ((4,), {"parallelism": "fsdp"}),
    "model": ((1, 4), {}),
    "both": ((2, 2), {"parallelism": "fsdp"}),
    "stages": ((1, 1, 2), {}),
}


def compiled_for(way):
    mesh, options = MESHES[way]
    return ml.compile(block(16, 4, 32), ml.JaxBackend(device_mesh=mesh), shapes={"x": [8, 6, 16]}, **options)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("fsdp", "model"),
        ("both", "stages"),
        pytest.param("stages", "one", marks=pytest.mark.slow),
        pytest.param("one", "both", marks=pytest.mark.slow),
    ],
)
def test_checkpoint_loads_on_another_mesh(tmp_path, source, target):
    first, second = compiled_for(source), compiled_for(target)
    call = first.programs[-1].executable.call
    params = first.randomize_params(0)
    ml.save_sharded(tmp_path, call.placed(params))
    loaded = ml.load_sharded(tmp_path, second)
    for name, x in params.items():
        np.testing.assert_array_equal(loaded[name], x)
    expected = second.programs[-1].executable.call.placed(second.randomize_params(0))
    assert {n: x.sharding for n, x in loaded.items()} == {n: x.sharding for n, x in expected.items()}
    np.testing.assert_allclose(second.evaluate(loaded, X)["y"], first.evaluate(params, X)["y"], rtol=1e-5, atol=1e-5)


def test_replicated_parts_are_written_once(tmp_path):
    model = compiled_for("both")
    params = model.programs[-1].executable.call.placed(model.randomize_params(0))
    ml.save_sharded(tmp_path, params)
    tensor = Reader(tmp_path).tensors["fc.weight"]
    assert len(tensor.parts) == 4
    assert sum(np.prod(part.size) for part in tensor.parts) == params["fc.weight"].size
    full = np.asarray(params["fc.weight"])
    np.testing.assert_array_equal(tensor.read((slice(3, 21), slice(2, 9))), full[3:21, 2:9])


def test_bfloat16_and_scalars_are_saved(tmp_path):
    arrays = {"a": np.arange(6, dtype=ml_dtypes.bfloat16).reshape(2, 3), "step": np.int32(7)}
    ml.save_sharded(tmp_path, arrays)
    tensors = Reader(tmp_path).tensors
    np.testing.assert_array_equal(tensors["a"].read((slice(1, 2), slice(None))), arrays["a"][1:])
    assert tensors["a"].read().dtype == ml_dtypes.bfloat16
    assert tensors["step"].read() == 7


def test_incomplete_checkpoint_is_rejected(tmp_path):
    model = compiled_for("one")
    with pytest.raises(ml.InputError, match="does not contain a complete checkpoint"):
        ml.load_sharded(tmp_path, model)
    ml.save_sharded(tmp_path, {"fc.weight": np.zeros((32, 16), np.float32)})
    with pytest.raises(ml.InputError, match="lacks parameters of this model"):
        ml.load_sharded(tmp_path, model)
    next(tmp_path.glob("part-*")).unlink()
    with pytest.raises(ml.InputError, match=r"part-\S+ is missing"):
        ml.load_sharded(tmp_path, model)
