"""The store on disk: whole entries or none, damage noticed, bounded size, several writers."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import numpy as np
import pytest

from mithril.graph.errors import OptionError
from mithril.system.disk_cache import Store, default_folder

KEY, OTHER = "ab" * 32, "cd" * 32


def test_parts_round_trip(tmp_path):
    store = Store(tmp_path)
    assert store.get(KEY) is None
    store.put(KEY, {"a": b"one\n\0two", "b": b""})
    assert store.get(KEY) == {"a": b"one\n\0two", "b": b""}
    store.put(KEY, {"a": b"new"})
    assert store.get(KEY) == {"a": b"new"}
    assert store.info().entries == 1 and store.clear() == 1 and store.get(KEY) is None


def test_the_first_part_is_mapped_on_request(tmp_path):
    store = Store(tmp_path)
    store.put(KEY, {"a": b"x" * 1000, "b": b"y"})
    parts = store.get(KEY, "a")
    assert isinstance(parts["a"], memoryview) and parts["a"].readonly and parts == {"a": b"x" * 1000, "b": b"y"}
    assert np.frombuffer(parts["a"], np.uint8).ctypes.data % 64 == 0
    assert isinstance(store.get(KEY, "b")["b"], bytes)
    store.put(KEY, {"a": b"new"})
    assert parts["a"] == b"x" * 1000  # an entry is replaced, not changed
    raw = bytearray(store._file(KEY).read_bytes())
    raw[-1] ^= 1
    store._file(KEY).write_bytes(raw)
    assert store.get(KEY, "a") is None


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "noise", "header", "negative", "deep line", "long line"])
def test_corrupt_entries_are_removed(tmp_path, damage):
    store = Store(tmp_path)
    store.put(KEY, {"a": b"x" * 1000})
    file = store._file(KEY)
    raw = bytearray(file.read_bytes())
    if damage == "cut":
        raw = raw[:-1]
    elif damage == "flip":
        raw[-5] ^= 1
    elif damage == "empty":
        raw = bytearray()
    elif damage == "noise":
        raw = bytearray(os.urandom(500))
    elif damage == "header":
        raw = bytearray(b'{"parts": 3, "sha256": []}\n')
    elif damage == "negative":
        raw = bytearray(b'{"parts": [["a", 9], ["b", -1]], "digest": ""}\n' + b"x" * 8)
    else:
        raw = bytearray(b"[" * (2_000_000 if damage == "long line" else 100_000) + b"\n")
    file.write_bytes(raw)
    assert store.get(KEY) is None
    assert not file.exists()


def test_least_recently_used_entries_are_evicted_first(tmp_path):
    store = Store(tmp_path, limit=3500)
    for k in range(3):
        store.put(f"{k:02}" * 32, {"a": b"x" * 1000})
        os.utime(store._file(f"{k:02}" * 32), (time.time() - 100 + k,) * 2)
    assert store.get("00" * 32) is not None  # used just now
    store.put(KEY, {"a": b"x" * 1000})
    assert store.get("01" * 32) is None
    assert store.get("00" * 32) is not None and store.get(KEY) is not None
    assert store.info().bytes <= 3500


def test_oversized_entry_is_kept_until_the_next(tmp_path):
    store = Store(tmp_path, limit=10)
    store.put(KEY, {"a": b"x" * 1000})
    assert store.get(KEY) is not None


def test_writers_in_several_processes(tmp_path):
    code = (
        "import sys; from mithril.system.disk_cache import Store; s = Store(sys.argv[1]);"
        f"[s.put('{KEY}', {{'a': bytes([int(sys.argv[2])]) * 50000}}) for _ in range(30)]"
    )
    running = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path), str(n)]) for n in (1, 2)]
    store = Store(tmp_path)
    while any(p.poll() is None for p in running):
        entry = store.get(KEY)
        assert entry is None or len(set(entry["a"])) == 1
    assert all(p.returncode == 0 for p in running)
    assert len(set(store.get(KEY)["a"])) == 1
    assert not list(tmp_path.rglob("*.part"))


def test_partial_files_of_killed_writers_are_removed(tmp_path):
    store = Store(tmp_path)
    store.put(KEY, {"a": b""})
    left = store._file(KEY).with_name(f".x.{'0' * 16}.part")
    left.mkdir()
    (left / "part").write_bytes(b"half")
    for path in (left / "part", left):
        os.utime(path, (time.time() - 7200,) * 2)
    store.put(OTHER, {"a": b""})
    assert not left.exists()


def test_unwritable_folder_is_rejected(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OptionError, match="the cache folder .* cannot be written"):
        Store(tmp_path / "file").put(KEY, {})


def test_environment_selects_the_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("MITHRIL_CACHE_DIR", str(tmp_path))
    assert default_folder() == tmp_path
    monkeypatch.delenv("MITHRIL_CACHE_DIR")
    assert "mithril" in str(default_folder())
