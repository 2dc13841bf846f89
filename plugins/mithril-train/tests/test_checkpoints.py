"""Checkpoints that are damaged, lost or stored elsewhere, and launchers whose processes do not train together."""

from __future__ import annotations

import shutil
import signal
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
from small import X, Y, trainer

import mithril as ml
from mithril.compiler.weight_files import save_file
from mithril_parallel.processes import World
from mithril_parallel.sharding.storage import DamagedError, LocalFolder
from mithril_train.loop import checkpoint as ml_checkpoint


def fit(epochs, folder, **options):
    subject = trainer(callbacks=[ml.Checkpoint(folder, keep=9)])
    subject.fit(X, Y, epochs, batch_size=16, **options)
    return subject


def flip(path, place=-9):
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def test_resume_takes_the_latest_intact_checkpoint(tmp_path):
    reference = fit(4, tmp_path / "reference")
    fit(3, tmp_path / "run")
    newest, second = sorted((tmp_path / "run").iterdir())[:0:-1]
    flip(newest)
    second.write_bytes(second.read_bytes()[:100])
    with pytest.warns(UserWarning, match="the checkpoint of step .* is damaged, training resumes from an older one"):
        resumed = fit(4, tmp_path / "run", resume=tmp_path / "run")
    assert resumed.history.steps == reference.history.steps
    with pytest.raises(ml.InputError, match="the checksum of '.*' is wrong"):
        flip(newest) or trainer().load(newest)


def test_damaged_checkpoints_only_are_an_error(tmp_path):
    fit(1, tmp_path)
    flip(next(tmp_path.iterdir()))
    with pytest.warns(UserWarning), pytest.raises(ml.InputError, match="cannot resume: no checkpoint in .* is intact"):
        fit(2, tmp_path, resume=tmp_path)


def test_folder_of_an_object_store(tmp_path):
    pytest.importorskip("fsspec")
    folder = f"memory://{tmp_path.name}"
    reference = fit(3, tmp_path / "run")
    fit(2, folder)
    resumed = fit(3, folder, resume="auto")
    assert resumed.history.steps == reference.history.steps
    subject = trainer()
    subject.load(resumed.callbacks[0].latest())
    assert subject.steps == resumed.steps


def test_folder_of_parts_is_equal_to_a_file(tmp_path):
    subject = fit(1, tmp_path / "run")
    subject.save(tmp_path / "parts")
    loaded = trainer()
    loaded.fit(X, Y, 1, batch_size=16, resume=tmp_path / "parts")
    for name, x in subject.engine.to_numpy().items():
        np.testing.assert_array_equal(loaded.engine.to_numpy()[name], x)
    shutil.rmtree(tmp_path / "parts")
    with pytest.raises(ml.InputError, match="cannot resume: '.*parts' does not exist"):
        trainer().fit(X, Y, 1, resume=tmp_path / "parts")


def test_a_damaged_part_is_not_resumed(tmp_path):
    """Damage the second part, which alone would be noticed after other processes have begun to load."""
    for step in (3, 6):
        fit(step // 3, tmp_path / f"run-{step}").save(tmp_path / f"run/step-{step:08d}")
    (part,) = (tmp_path / "run/step-00000006").glob("part-*")
    flip(part)
    with pytest.raises(DamagedError, match="'.*step-00000006/part-.*' is damaged"):
        ml_checkpoint.verify(str(tmp_path / "run/step-00000006"), World())
    ml_checkpoint.verify(str(tmp_path / "run/step-00000003"), World())


def unfinished(folder):
    """Return the folder of two complete saves, some that did not finish, and files of others."""
    subject = fit(1, folder.parent / "run")
    subject.save(folder / "step-00000003.safetensors")
    subject.save(folder / "step-00000007")
    subject.save(folder / "step-00000009")
    subject.save(folder / "best")
    for name in ("step-00000009", "best"):
        (folder / name / "commit.json").unlink()
    for name in (".step-00000004.safetensors", ".best.safetensors", ".notes.txt"):
        (folder / f"{name}.{'0' * 16}.part").touch()
    (folder / ".step-notes").touch()
    (folder / "notes").mkdir()
    return folder


def test_saves_that_did_not_finish_do_not_count_and_are_removed(tmp_path):
    folder = unfinished(tmp_path / "saves")
    first, second = ml_checkpoint.candidates(folder)
    assert (first.step, second.step, second.id) == (7, 3, "00000003") and first.id not in ("", second.id)
    assert [ml_checkpoint.is_checkpoint(f"{folder}/{n}") for n in ("step-00000007", "step-00000009")] == [True, False]
    ml_checkpoint.remove_unfinished(folder)
    unrelated = {".step-notes", "notes", f".notes.txt.{'0' * 16}.part"}
    assert {p.name for p in folder.iterdir()} == {"step-00000003.safetensors", "step-00000007", *unrelated}


def test_a_removed_folder_first_loses_its_commit(tmp_path, monkeypatch):
    folder, removed = unfinished(tmp_path / "saves"), []
    original = LocalFolder.remove
    monkeypatch.setattr(LocalFolder, "remove", lambda self, name: removed.append(name) or original(self, name))
    for candidate in ml_checkpoint.candidates(folder):
        ml_checkpoint.remove(candidate)
    commit, part, *rest = removed
    assert commit == "commit.json" and part.startswith("part-00000-of-00001-")
    assert rest == ["step-00000007", "step-00000003.safetensors"]
    assert ml_checkpoint.candidates(folder) == []


def test_paths_without_a_checkpoint_are_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "folder.safetensors").mkdir()
    for name, text in (
        ("absent.safetensors", "there is no file '.*absent.safetensors'"),
        ("empty", "'.*empty' does not contain a complete checkpoint"),
        ("folder.safetensors", "'.*folder.safetensors' is not a readable safetensors file"),
    ):
        with pytest.raises(ml.InputError, match=text):
            trainer().load(tmp_path / name)


def test_processes_that_would_train_separately_are_refused(monkeypatch):
    for name, value in {"SLURM_PROCID": "1", "SLURM_NTASKS": "4", "SLURM_STEP_NODELIST": "a"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ml.BackendError, match=r"Slurm started 4 processes.*\n.*device_mesh=\(4,\)"):
        trainer().fit(X, Y, 1, batch_size=16)


def test_rows_of_one_process_need_others():
    part = ml.DataLoader((X, Y), 16, rank=1, world=2)
    assert next(len(batch[0]) for batch in part) == 8
    with pytest.raises(ml.InputError, match="leave out rank= and world= of the DataLoader"):
        trainer().fit(part, 1)
    with pytest.raises(ml.OptionError, match="rank=2 and world=2 do not name a process"):
        ml.DataLoader((X, Y), 16, rank=2, world=2)


@pytest.mark.parametrize("workers", [{}, {"num_workers": 2}])
def test_rows_of_processes_are_the_batch_in_order(workers):
    def rows(**options):
        return [b[0] for b in ml.DataLoader((X[:21], Y[:21]), 8, shuffle=True, seed=1, **workers, **options)]

    parts = zip(rows(), rows(rank=0, world=2), rows(rank=1, world=2), strict=True)
    for k, (batch, *shares) in enumerate(parts):
        np.testing.assert_array_equal(np.concatenate(shares) if k < 2 else shares[1], batch)


def test_libraries_of_a_format_are_imported_before_training(monkeypatch, tmp_path):
    def missing():
        raise ml.PluginError("this format needs torch")

    monkeypatch.setattr("mithril_parallel.sharding.dcp_format.import_modules", missing)
    with pytest.raises(ml.PluginError, match="this format needs torch"):
        ml.Checkpoint(tmp_path, format="dcp")


def full_disk(monkeypatch, saves):
    """Let some saves, whose numbers begin at 1, end with the error of a full disk."""
    count = iter(range(1, 100))

    def write(path, *_):
        if next(count) in saves:
            raise ml.OptionError(f"checkpoint: '{path}' cannot be written: No space left on device")
        return write_original(path, *_)

    write_original = ml_checkpoint.write
    monkeypatch.setattr(ml_checkpoint, "write", write)


def test_a_full_disk_does_not_end_training(monkeypatch, tmp_path):
    reference = fit(4, tmp_path / "reference")
    full_disk(monkeypatch, {2, 3})
    with pytest.warns(
        UserWarning, match="was not written, training continues with the previous one.*\n?.*No space left"
    ):
        subject = fit(4, tmp_path / "run")
    assert subject.history.steps == reference.history.steps
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == [
        "step-00000006.safetensors",
        "step-00000024.safetensors",
    ]


def test_the_first_save_must_succeed(monkeypatch, tmp_path):
    full_disk(monkeypatch, {1})
    with pytest.raises(ml.OptionError, match="No space left on device"):
        fit(2, tmp_path / "run")


def test_a_full_disk_while_parts_are_written(monkeypatch, tmp_path):
    """Fail the second of the saves that a thread writes, as those of several devices."""
    from mithril_parallel.sharding import checkpoint as sharded

    written, original = [], sharded.write_part

    def write_part(folder, name, *options):
        written.append(name)
        if len(written) == 2:
            raise OSError(28, "No space left on device")
        return original(folder, name, *options)

    monkeypatch.setattr(sharded, "write_part", write_part)
    subject = trainer(callbacks=[ml.Checkpoint("memory://full-disk", keep=9)])
    with pytest.warns(UserWarning, match="training continues with the previous one"):
        subject.fit(X, Y, 3, batch_size=16)
    assert [c.step for c in ml_checkpoint.candidates("memory://full-disk")] == [18, 6]


@pytest.mark.parametrize(
    ("stopped", "failed", "ends"), [("", False, True), ("SIGTERM", False, True), ("", True, False)]
)
def test_processes_end_together_after_the_last_save(tmp_path, monkeypatch, stopped, failed, ends):
    """Also after training that is complete: process 0, which was not told to end, holds the store of the others."""
    events = []
    world = SimpleNamespace(
        exchange=lambda value, purpose: events.append(purpose) or [value, True],
        finish=lambda purpose: events.append(purpose),
    )
    dog = SimpleNamespace(waiting=lambda *_, **__: nullcontext())
    monkeypatch.setattr(signal, "raise_signal", events.append)
    ml.Checkpoint(tmp_path).end(SimpleNamespace(failed=failed, stopped=stopped, watchdog=dog, world=world))
    assert events == (["the end of all saves"] * 2 + [signal.SIGTERM] if ends else [])


@pytest.mark.parametrize("protocol", ["", "file://"])
def test_files_of_the_user_are_never_removed(tmp_path, protocol):
    """Under names of checkpoints, or in their folders; one with a protocol has folders of parts."""
    pytest.importorskip("fsspec")
    files = ["best/notes.txt", "step-7/data.csv", "step-8/part-00000-of-00001.parquet", "step-1.safetensors"]
    for name in files[:3]:
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("notes")
    save_file({"w": np.zeros(3, np.float32)}, tmp_path / files[3], {})
    subject = trainer(callbacks=[ml.Checkpoint(f"{protocol}{tmp_path}", keep=1, monitor="loss")])
    subject.fit(X, Y, 1, batch_size=16)
    if protocol:
        files.append("step-00000006/notes.txt")
        (tmp_path / files[4]).write_text("notes")
    subject.fit(X, Y, 3, batch_size=16)
    assert [name for name in files if not (tmp_path / name).exists()] == []
    assert [candidate.step for candidate in ml_checkpoint.candidates(tmp_path)] == [24]


def test_unreadable_files_stay_candidates(tmp_path):
    (tmp_path / "step-00000003.safetensors").mkdir()
    (tmp_path / "step-00000004.safetensors").symlink_to(tmp_path / "removed")
    assert [candidate.step for candidate in ml_checkpoint.candidates(tmp_path)] == [4, 3]


def test_a_save_removes_parts_of_saves_only(tmp_path):
    (tmp_path / "part-00000-4a1c.snappy.parquet").touch()
    (tmp_path / "orbax-notes").touch()
    for _ in range(2):
        ml.save_sharded(tmp_path, {"w": np.zeros(3, np.float32)})
    names = sorted(path.name for path in tmp_path.iterdir())
    assert (
        len(names) == 4 and names[0] == "commit.json" and {"orbax-notes", "part-00000-4a1c.snappy.parquet"} < {*names}
    )
