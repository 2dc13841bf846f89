"""Checkpoints of Orbax and ``torch.distributed.checkpoint``: written from folders in parts, and read into them."""

from __future__ import annotations

import errno
import itertools
import json
import re
import shutil
import weakref
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from rank_programs import outputs

import mithril as ml
from mithril.models import MLP
from mithril_parallel.processes import World
from mithril_parallel.sharding import dcp_format, orbax_format, storage
from mithril_parallel.sharding.checkpoint import Reader, begin_save, save_sharded
from mithril_parallel.sharding.storage import DamagedError
from mithril_parallel.sharding.tensor_parts import Part, PartedTensor, in_memory
from mithril_parallel.sharding.zarr_format import ZarrWriter

LIBRARIES = {"dcp": "torch.distributed.checkpoint", "orbax": "orbax.checkpoint"}
READERS = {"dcp": dcp_format.read, "orbax": orbax_format.read}
ARRAYS = {
    "a.weight": np.arange(12, dtype=np.float32).reshape(3, 4),
    "optimizer/m/a.weight": np.ones((3, 4), ml_dtypes.bfloat16),
    "training/step": np.array(3, np.int32),
}
SAVE = """
    t = trainer(callbacks=[ml.Checkpoint(sys.argv[2], format=sys.argv[3])])
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
    with pytest.raises(ml.InputError, match="neither of Orbax nor of(.|\n)*hint: pass the folder that contains"):
        ml.import_checkpoint(tmp_path, tmp_path / "parts")


def small_trainer(backend, **options):
    return ml.Trainer(MLP([6, 8, 1]), ml.Adam(0.01), loss="mse_loss", backend=backend, progress=False, **options)


@pytest.mark.parametrize(("saving", "form"), [("jax", "orbax"), ("jax", "dcp"), ("torch", "dcp"), ("torch", "orbax")])
def test_training_saves_by_the_library_and_continues_on_the_other_engine(saving, form, tmp_path):
    for name in ("jax", "torch", LIBRARIES[form]):
        pytest.importorskip(name)
    x = np.random.default_rng(0).standard_normal((24, 6), np.float32)
    loader = lambda: ml.DataLoader((x, x[:, :1]), 8, shuffle=True, seed=3)  # noqa: E731
    callback = ml.Checkpoint(tmp_path / "run", format=form, keep=1)
    small_trainer(saving, callbacks=[callback]).fit(loader(), 2)
    (saved,) = (tmp_path / "run").iterdir()
    assert [p.name.partition("-")[0] for p in sorted(saved.iterdir())] == ["commit.json", form]
    expected = small_trainer(saving)
    expected.fit(loader(), 3)
    continued = small_trainer({"jax": "torch", "torch": "jax"}[saving])
    continued.fit(loader(), 3, resume=tmp_path / "run")
    np.testing.assert_allclose(continued.history.steps, expected.history.steps, rtol=1e-4)


@pytest.mark.parametrize("kind", ["numpy", "jax"])
def test_orbax_itself_reads_the_tensors_of_a_run(kind, tmp_path):
    ocp, jax = pytest.importorskip("orbax.checkpoint"), pytest.importorskip("jax")
    arrays = ARRAYS if kind == "numpy" else jax.tree.map(jax.numpy.asarray, ARRAYS)
    commit = begin_save(tmp_path, arrays, {"steps": 3}, World(), format="orbax")
    commit.finish()
    assert isinstance(commit.commit["checksums"], dict)
    folder = tmp_path / commit.commit["library"]
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        saved = checkpointer.restore(folder)
    assert saved["mithril"] == {"steps": 3}
    for name, x in ARRAYS.items():
        np.testing.assert_array_equal(saved["state"][name], x)


@pytest.mark.parametrize("form", LIBRARIES)
def test_object_stores_are_converted_and_trained_from(form, tmp_path):
    pytest.importorskip(LIBRARIES[form])
    pytest.importorskip("fsspec")
    store = f"memory://interchange-{form}"
    begin_save(f"{store}/run", ARRAYS, {"steps": 3}, World(), format=form).finish()
    ml.export_checkpoint(f"{store}/run", f"{store}/exported", form)
    ml.import_checkpoint(f"{store}/exported", tmp_path)
    reader = Reader(tmp_path)
    assert reader.metadata == {"steps": 3}
    for name, x in ARRAYS.items():
        np.testing.assert_array_equal(reader.tensors[name].read(), x)


@pytest.mark.parametrize("form", LIBRARIES)
def test_damage_of_a_file_of_the_library_is_noticed(form, tmp_path):
    pytest.importorskip(LIBRARIES[form])
    weight = np.random.default_rng(0).standard_normal((64, 64), np.float32)
    begin_save(tmp_path, {"w": weight}, {}, World(), format=form).finish()
    largest = max((p for p in tmp_path.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 0x55
    largest.write_bytes(data)
    with pytest.raises(DamagedError, match="is damaged"):
        Reader(tmp_path).verify(0, 1)
    folder = next(p for p in tmp_path.iterdir() if p.is_dir())
    shutil.rmtree(folder)
    with pytest.raises(DamagedError, match="is missing"):
        Reader(tmp_path)


@pytest.mark.parametrize("form", LIBRARIES)
def test_a_library_holds_one_part_of_all_tensors(form, tmp_path):
    pytest.importorskip(LIBRARIES[form])
    begin_save(tmp_path, ARRAYS, {}, World(), format=form).finish()
    (folder,) = (p for p in tmp_path.iterdir() if p.is_dir())
    tensors, _ = READERS[form](folder)
    arrays = [weakref.ref(part.load()) for tensor in tensors.values() for part in tensor.parts]
    assert len(arrays) == 3
    assert sum(array() is not None for array in arrays) <= 1


def rows_from(*starts):
    """Return a weight whose parts begin at these rows."""
    weight = np.arange(20, dtype=np.float32).reshape(10, 2)
    bounds = itertools.pairwise([*starts, 10])
    parts = [Part((a, 0), (b - a, 2), lambda a=a, b=b: weight[a:b]) for a, b in bounds]
    return weight, {"w": PartedTensor("w", weight.shape, weight.dtype, parts)}


def test_parts_of_different_sizes_are_exported_to_orbax_as_equal_ones(tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint")
    weight, tensors = rows_from(0, 3, 5, 8)
    with pytest.raises(
        ml.BackendError, match=r'part at \[3, 0\] of size \[2, 2\](.|\n)*"dcp", or ml.export_checkpoint'
    ):
        begin_save(tmp_path / "direct", {**ARRAYS, **tensors}, {}, World(), format="orbax").finish()
    assert not any((tmp_path / "direct").iterdir())
    begin_save(tmp_path / "parts", tensors, {}, World()).finish()
    ml.export_checkpoint(tmp_path / "parts", tmp_path / "orbax", "orbax")
    with ocp.PyTreeCheckpointer() as checkpointer:
        np.testing.assert_array_equal(checkpointer.restore(tmp_path / "orbax" / "state")["w"], weight)


def test_a_file_without_access_is_not_damaged(tmp_path, monkeypatch):
    """Stop rather than resume from an older checkpoint if a file exists that cannot be opened."""
    folder = storage.LocalFolder(tmp_path)
    with pytest.raises(DamagedError, match="cannot be read"):
        folder.open("absent")
    remote = storage.RemoteFolder(SimpleNamespace(open=open, unstrip_protocol=str), str(tmp_path))
    with pytest.raises(DamagedError, match="cannot be read"):
        remote.open("absent")

    def refuse(*arguments):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(storage, "open", refuse, raising=False)
    for place in (folder, storage.RemoteFolder(SimpleNamespace(open=refuse, unstrip_protocol=str), "bucket")):
        with pytest.raises(ml.InputError, match="Permission denied") as caught:
            place.open("present")
        assert not isinstance(caught.value, DamagedError)


def test_new_folders_of_chunks_are_durable(tmp_path, monkeypatch):
    """Synchronize every folder that gets an entry: that of the file, and those above it that are new."""
    folders = []
    monkeypatch.setattr(storage, "_make_durable", folders.append)
    folder = storage.LocalFolder(tmp_path / "step") / "state"
    storage.write_bytes(folder, "w/0.0", b"x")
    assert set(folders) == {tmp_path, tmp_path / "step", tmp_path / "step/state", tmp_path / "step/state/w"}
    folders.clear()
    storage.write_bytes(folder, "w/0.1", b"x")
    assert folders == [tmp_path / "step/state/w"]


def test_orbax_needs_equal_names_and_one_jax_process_each(tmp_path):
    """Refuse to write different names, or the same arrays by several processes, which would overwrite each other."""
    pytest.importorskip("orbax.checkpoint")
    two = SimpleNamespace(rank=0, size=2, timeout=9, exchange=lambda value, purpose: [value, {"other": (1,)}])
    tensors = {"w": in_memory("w", np.zeros((2, 2), np.float32), 0, replicas=False)}
    with pytest.raises(ml.InputError, match="same names of arrays.*\n.*process 0 lacks other\n.*process 1 lacks w"):
        ZarrWriter(storage.LocalFolder(tmp_path), tensors, {}, two)
    pytest.importorskip("jax")
    with pytest.raises(ml.UnsupportedError, match="JAX runs in 1 processes, but 2 save"):
        orbax_format.OrbaxWriter(str(tmp_path / "step"), {}, {}, two)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("form", ["orbax", "dcp"])
def test_a_file_is_not_replaced_by_an_export(form, tmp_path):
    save_sharded(tmp_path / "parts", {"w": np.zeros(3, np.float32)})
    (tmp_path / "target").write_text("notes")
    with pytest.raises(ml.InputError, match="exists already"):
        ml.export_checkpoint(tmp_path / "parts", tmp_path / "target", form)
    assert (tmp_path / "target").read_text() == "notes"


def test_last_part_may_be_smaller(tmp_path):
    pytest.importorskip("tensorstore")
    weight, tensors = rows_from(0, 4, 8)
    begin_save(tmp_path, tensors, {}, World(), format="orbax").finish()
    tensor = Reader(tmp_path).tensors["w"]
    assert [part.size for part in tensor.parts] == [(4, 2), (4, 2), (2, 2)]
    np.testing.assert_array_equal(tensor.read(), weight)


def test_files_of_orbax_itself_have_to_be_copied_from_an_object_store(tmp_path):
    ocp, fsspec = pytest.importorskip("orbax.checkpoint"), pytest.importorskip("fsspec")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "others", {"w": np.ones(3, np.float32)})
    fsspec.filesystem("memory").put(str(tmp_path / "others"), "/ocdbt/others", recursive=True)
    with pytest.raises(ml.UnsupportedError, match="needs a file system(.|\n)*hint: copy it first") as error:
        ml.import_checkpoint("memory://ocdbt/others", tmp_path / "parts")
    remedy = re.search(r"copy it first: (.*)", str(error.value))[1].replace("'folder'", f"'{tmp_path}/copy'")
    exec(remedy)
    ml.import_checkpoint(tmp_path / "copy", tmp_path / "parts")
    np.testing.assert_array_equal(Reader(tmp_path / "parts").tensors["w"].read(), np.ones(3))


def test_absent_chunks_are_zeros_where_the_writer_left_them_out(tmp_path):
    fsspec = pytest.importorskip("fsspec")
    pytest.importorskip("tensorstore")
    weight, tensors = rows_from(0, 4, 8)
    begin_save("memory://chunks", tensors, {}, World(), format="orbax").finish()
    folder = Path(next(path for path in fsspec.filesystem("memory").ls("/chunks", detail=False) if "orbax" in path))
    store = storage.folder_of(f"memory:/{folder}/state")
    store.remove("w/1.0")
    with pytest.raises(DamagedError, match="1.0"):
        orbax_format.read(f"memory:/{folder}")[0]["w"].read()
    contents = json.loads(storage.read_bytes(store, "_METADATA"))
    contents["store_array_data_equal_to_fill_value"] = False
    storage.write_bytes(store, "_METADATA", json.dumps(contents).encode())
    weight[4:8] = 0
    np.testing.assert_array_equal(orbax_format.read(f"memory:/{folder}")[0]["w"].read(), weight)


@contextmanager
def less_than(size):
    """Check how much memory the process uses in addition at its peak, also that of the libraries."""
    memory = Path("/proc/self/status")
    if not memory.exists():
        pytest.skip("this system does not tell the peak of a process")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    begin = int(re.search(r"VmRSS:\s+(\d+)", memory.read_text())[1])
    yield
    peak = int(re.search(r"VmHWM:\s+(\d+)", memory.read_text())[1])
    assert peak - begin < size >> 10


@pytest.mark.parametrize("form", LIBRARIES)
def test_conversion_holds_one_part_at_a_time(form, tmp_path):
    pytest.importorskip(LIBRARIES[form])
    part = np.random.default_rng(0).standard_normal(1 << 18, np.float32)  # 1 MiB, of 64
    parts = [Part((k << 18,), part.shape, lambda: part) for k in range(2)]
    tensors = [PartedTensor(f"w{k}", (1 << 19,), part.dtype, parts) for k in range(32)]
    begin_save(tmp_path / "small", ARRAYS, {}, World()).finish()
    begin_save(tmp_path / "parts", {t.name: t for t in tensors}, {}, World()).finish()
    ml.export_checkpoint(tmp_path / "small", tmp_path / "exported", form)  # imports
    ml.import_checkpoint(tmp_path / "exported", tmp_path / "imported")
    with less_than(20 << 20):
        ml.export_checkpoint(tmp_path / "parts", tmp_path / form, form)
    with less_than(20 << 20):
        ml.import_checkpoint(tmp_path / form, tmp_path / "again")
    np.testing.assert_array_equal(Reader(tmp_path / "again").tensors["w3"].read(), np.tile(part, 2))


@pytest.mark.soak
@pytest.mark.parametrize("written", ["parts", "library"])
@pytest.mark.parametrize(("saving", "loading", "form"), [("torch", "jax", "dcp"), ("jax", "torch", "orbax")])
def test_training_of_two_processes_continues_on_the_other_engine(saving, loading, form, written, tmp_path):
    for name in (saving, loading, LIBRARIES[form]):
        pytest.importorskip(name)
    outputs(tmp_path, saving, SAVE, str(tmp_path / "run"), form if written == "library" else "parts")
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
