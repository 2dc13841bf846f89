"""Checkpoints of Orbax and ``torch.distributed.checkpoint``: written from folders in parts, and read into them."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest
from rank_programs import outputs

import mithril as ml
from mithril_parallel.processes import World
from mithril_parallel.sharding.checkpoint import Reader, begin_save

LIBRARIES = {"dcp": "torch.distributed.checkpoint", "orbax": "orbax.checkpoint"}
ARRAYS = {
    "a.weight": np.arange(12, dtype=np.float32).reshape(3, 4),
    "optimizer/m/a.weight": np.ones((3, 4), ml_dtypes.bfloat16),
    "training/step": np.array(3, np.int32),
}
SAVE = """
    t = trainer(callbacks=[ml.Checkpoint(sys.argv[2])])
    t.fit(loader(), 1)
"""
RESUME = """
    t = trainer() if size > 1 else trainer(("jax" if engine == "jax" else "torch"))
    t.fit(loader(), 2, resume=sys.argv[2])
    say(t.history.steps)
"""


@pytest.mark.parametrize("form", LIBRARIES)
def test_checkpoints_pass_through_other_libraries_unchanged(form, tmp_path):
    pytest.importorskip(LIBRARIES[form])
    begin_save(tmp_path / "parts", ARRAYS, {"steps": 3}, World()).finish()
    ml.export_checkpoint(tmp_path / "parts", tmp_path / form, form)
    ml.import_checkpoint(tmp_path / form, tmp_path / "again")
    reader = Reader(tmp_path / "again")
    assert reader.metadata == {"steps": 3}
    assert reader.tensors.keys() == ARRAYS.keys()
    for name, x in ARRAYS.items():
        assert reader.tensors[name].dtype == x.dtype
        np.testing.assert_array_equal(reader.tensors[name].read(), x)
    with pytest.raises(ml.InputError, match="exists already"):
        ml.export_checkpoint(tmp_path / "parts", tmp_path / form, form)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_reads_an_exported_checkpoint(tmp_path):
    dcp, torch = pytest.importorskip("torch.distributed.checkpoint"), pytest.importorskip("torch")
    begin_save(tmp_path / "parts", ARRAYS, {}, World()).finish()
    ml.export_checkpoint(tmp_path / "parts", tmp_path / "dcp", "dcp")
    state = {"a.weight": torch.zeros(3, 4)}
    dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    np.testing.assert_array_equal(state["a.weight"].numpy(), ARRAYS["a.weight"])


def test_orbax_checkpoints_of_others_are_read(tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "others", {"layer": {"w": np.ones(3, np.float32)}, "rest": [np.zeros(2)]})
    ml.import_checkpoint(tmp_path / "others", tmp_path / "parts")
    arrays = {name: tensor.read().tolist() for name, tensor in Reader(tmp_path / "parts").tensors.items()}
    assert arrays == {"layer.w": [1, 1, 1], "rest.0": [0, 0]}


def test_other_folders_are_refused(tmp_path):
    with pytest.raises(ml.InputError, match="neither of Orbax nor of"):
        ml.import_checkpoint(tmp_path, tmp_path / "parts")


@pytest.mark.soak
@pytest.mark.parametrize(("saving", "loading", "form"), [("torch", "jax", "dcp"), ("jax", "torch", "orbax")])
def test_training_of_two_processes_continues_on_the_other_engine(saving, loading, form, tmp_path):
    for name in (saving, loading, LIBRARIES[form]):
        pytest.importorskip(name)
    outputs(tmp_path, saving, SAVE, str(tmp_path / "run"))
    (saved,) = (tmp_path / "run").iterdir()
    ml.export_checkpoint(saved, tmp_path / form, form)
    ml.import_checkpoint(tmp_path / form, tmp_path / "again")
    continued = [
        json.loads(outputs(tmp_path, engine, RESUME, str(folder), size=size)[0].splitlines()[-1])
        for folder in (saved, tmp_path / "again")
        for engine, size in ((saving, 2), (loading, 2), (loading, 1))
    ]
    assert len(continued[0]) == 18
    np.testing.assert_allclose(continued, [continued[0]] * len(continued), rtol=1e-4)
