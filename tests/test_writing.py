"""Files that cannot be written: a clear error, nothing partial left, no pipe replaced."""

from __future__ import annotations

import os
import resource
import signal
import socket
import stat

import numpy as np
import pytest

import mithril as ml
from mithril.models import Linear, Model
from mithril.system import files

LIMIT = 20_000  # bytes of a file


@pytest.fixture
def full_disk():
    """Limit the size of files, which gives the errors of a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


def compiled(backend):
    model = ml.compile(Model(Linear(400)), backend, shapes={"input": [2, 300]})
    model.bind(model.randomize_params(seed=0))
    return model


WRITERS = {
    "weights": ("numpy", lambda c, folder: c.save(folder / "w.safetensors")),
    "C": ("c", lambda c, folder: c.export(folder / "bundle")),
    "GGUF": ("ggml", lambda c, folder: c.export(folder / "m.gguf", format="gguf")),
    "ONNX": ("numpy", lambda c, folder: c.export(folder / "m.onnx", format="onnx")),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_a_full_disk(kind, tmp_path, request):
    backend, write = WRITERS[kind]
    model = compiled(backend)
    request.getfixturevalue("full_disk")
    with pytest.raises(ml.MithrilError, match="cannot be written: .*(large|written)") as error:
        write(model, tmp_path)
    assert "on a disk with free space" in error.value.hint
    assert list(tmp_path.rglob("*")) == []


def test_a_failed_export_keeps_the_earlier_one(tmp_path, request):
    model = compiled("c")
    folder = tmp_path / "bundle"
    folder.mkdir()
    (folder / "Makefile").write_text("mine")
    request.getfixturevalue("full_disk")
    with pytest.raises(ml.MithrilError, match="cannot be written"):
        model.export(folder)
    assert {p.name: p.read_text() for p in folder.iterdir()} == {"Makefile": "mine"}


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("above", [False, True], ids=["target", "folder above it"])
def test_a_pipe_is_not_replaced(kind, above, tmp_path):
    backend, write = WRITERS[kind]
    place = tmp_path / "pipe"
    os.mkfifo(place)

    class Target(type(tmp_path)):
        """A folder in which every name is that of the pipe, or is inside of it."""

        def __truediv__(self, name):
            return place / name if above else place

    with pytest.raises(ml.MithrilError, match="cannot be written"):
        write(compiled(backend), Target(tmp_path))
    assert stat.S_ISFIFO(place.lstat().st_mode)
    assert [p.name for p in tmp_path.iterdir()] == ["pipe"]


def test_links_and_files_are_replaced_and_sockets_are_not(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    for name in ("file", "link", "new"):
        files.write(tmp_path / name, "new")
        assert (tmp_path / name).read_text() == "new"
        assert not (tmp_path / name).is_symlink()
    with socket.socket(socket.AF_UNIX) as other, monkeypatch.context() as patch:
        patch.chdir(tmp_path)  # names of sockets are short
        other.bind("socket")
        for target in ("socket", "/proc/none/file"):
            with pytest.raises(ml.MithrilError, match="cannot be written"):
                files.write(target, "new")
    assert stat.S_ISSOCK(os.lstat(tmp_path / "socket").st_mode)


def test_a_missing_home(tmp_path, monkeypatch):
    """Programs run where nothing can be cached."""
    monkeypatch.setenv("HOME", "/proc/none")
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    monkeypatch.delenv("MITHRIL_CACHE_DIR", raising=False)
    model = compiled("numpy")
    assert model({"input": np.ones((2, 300), np.float32)})["output"].shape == (2, 400)
