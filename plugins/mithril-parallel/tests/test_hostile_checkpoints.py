"""Hostile folders of checkpoints: nothing in them runs, and nothing outside of them is read."""

from __future__ import annotations

import json
import os
import pickle
import zlib

import numpy as np
import pytest

import mithril as ml
from mithril.models import Linear
from mithril_parallel.processes import World
from mithril_parallel.sharding.checkpoint import Reader, begin_save
from mithril_parallel.sharding.dcp_metadata import read_records
from mithril_parallel.sharding.storage import DamagedError

COMMIT = {"format": "mithril-sharded-2", "id": "x", "metadata": {}, "shared": True, "parts": {}}
WEIGHT = np.arange(12, dtype=np.float32).reshape(3, 4)


class Call:
    """An object whose pickle calls a function."""

    def __init__(self, function, *arguments):
        self.function, self.arguments = function, arguments

    def __reduce__(self):
        return self.function, self.arguments

    def __repr__(self):  # the name of a test, equal in all processes
        return f"Call({self.function.__name__}, {', '.join(map(repr, self.arguments))})"


def commit(folder, **changes):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "commit.json").write_text(json.dumps(COMMIT | changes))
    return folder


@pytest.fixture
def compiled():
    compiled = ml.compile(Linear(4), "numpy", shapes={"input": [2, 3]})
    compiled.bind(compiled.randomize_params(seed=0))
    return compiled


@pytest.mark.parametrize("prefix", ["dcp-x", "orbax-x"])
def test_a_pickle_in_a_checkpoint_does_not_run(tmp_path, compiled, prefix):
    folder = commit(tmp_path / "ck", library=prefix, checksums={})
    (folder / prefix).mkdir()
    ran = tmp_path / "ran"
    for function, *arguments in ((os.system, f"touch {ran}"), (exec, f"open({str(ran)!r}, 'w')"), (os.mkdir, str(ran))):
        (folder / prefix / ".metadata").write_bytes(pickle.dumps(Call(function, *arguments)))
        for read in (ml.load_sharded, ml.import_checkpoint):
            target = folder if read is ml.load_sharded else folder / prefix
            with pytest.raises(DamagedError, match="is damaged"):
                read(target, compiled if read is ml.load_sharded else tmp_path / "new")
        assert not ran.exists()


@pytest.mark.parametrize(
    "value",
    [
        Call(getattr, "text", "upper"),
        Call(pickle.loads, pickle.dumps(1)),
        {("a", "b"): 1},
        {1, 2},
        {b"bytes": 1},
        bytearray(2),
        1j,
    ],
    ids=repr,
)
@pytest.mark.parametrize("protocol", range(6))
def test_other_objects_than_those_of_dcp_are_refused(value, protocol):
    with pytest.raises((ValueError, LookupError, AttributeError)):
        read_records(pickle.dumps(value, protocol=protocol))


def test_records_of_a_class_that_the_file_changes():
    torch = pytest.importorskip("torch.distributed.checkpoint.metadata")
    changes = (
        b"\x80\x04\x8c\x25torch.distributed.checkpoint.metadata\x8c\x08Metadata\x93N}\x8c\x04evil\x8c\x03yessb\x86b."
    )
    with pytest.raises((ValueError, AttributeError)):
        read_records(changes)
    assert not hasattr(torch.Metadata, "evil")


@pytest.mark.parametrize("name", ["dcp-/../../x", "../x", "/etc", "dcp-x/y", "dcp-x\\..\\y", "part-/../../x", "x", ""])
def test_names_of_parts_stay_in_the_folder(tmp_path, name):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / ".metadata").write_bytes(b"outside")
    folder = commit(tmp_path / "ck", parts={name: zlib.crc32(b"")})
    with pytest.raises(ml.InputError, match=r"commit\.json' is damaged"):
        Reader(folder)
    if name:
        commit(folder, library=name, checksums={})
        with pytest.raises(ml.InputError, match=r"commit\.json' is damaged"):
            Reader(folder)


def test_links_are_not_followed_out_of_the_folder(tmp_path):
    begin_save(tmp_path / "ck", {"w": WEIGHT}, {}, World()).finish()
    (part,) = (tmp_path / "ck").glob("part-*")
    part.rename(tmp_path / "outside")
    part.symlink_to(tmp_path / "outside")
    with pytest.raises(ml.InputError, match="a link that leads out of its folder"):
        Reader(tmp_path / "ck")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "commit.json").symlink_to(tmp_path / "ck" / "commit.json")
    with pytest.raises(ml.InputError, match="a link that leads out of its folder"):
        Reader(tmp_path / "linked")


@pytest.mark.parametrize(
    "content",
    [
        [1],
        {"format": "mithril-sharded-2"},
        COMMIT | {"library": "zzz"},
        COMMIT | {"library": ["dcp-x"], "checksums": {}},
        COMMIT | {"parts": ["part-0"]},
        COMMIT | {"metadata": None},
        "[" * 100_000,
    ],
    ids=lambda x: str(x)[:40],
)
def test_damaged_commits(tmp_path, content):
    (tmp_path / "commit.json").write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ml.InputError, match=str(tmp_path)):
        Reader(tmp_path)


@pytest.mark.parametrize(
    "entry",
    [
        {"shape": [10**11], "dtype": "float64", "parts": [[[0], [10**11], 0, 0]]},
        {"shape": [4], "dtype": "float32", "parts": [[[0], [4], -8, 0]]},
        {"shape": [4], "dtype": "object", "parts": [[[0], [4], 0, 0]]},
        {"shape": [4], "dtype": "float32", "parts": 5},
        {"shape": 4, "dtype": "float32", "parts": []},
        {"shape": [4], "dtype": "float32", "parts": [[["a"], [4], 0, 0]]},
        5,
    ],
    ids=repr,
)
def test_damaged_headers(tmp_path, entry):
    text = json.dumps({"__metadata__": {"index": json.dumps({"w": entry})}}).encode()
    (tmp_path / "part-0").write_bytes(len(text).to_bytes(8, "little") + text + bytes(16))
    commit(tmp_path, parts={"part-0": zlib.crc32(text)})
    with pytest.raises(DamagedError, match="part-0' is damaged"):
        Reader(tmp_path).tensors["w"].read()


def test_a_tensor_without_its_parts_is_not_allocated(tmp_path):
    entry = {"shape": [10**12], "dtype": "float64", "parts": []}
    text = json.dumps({"__metadata__": {"index": json.dumps({"w": entry})}}).encode()
    (tmp_path / "part-0").write_bytes(len(text).to_bytes(8, "little") + text)
    commit(tmp_path, parts={"part-0": zlib.crc32(text)})
    with pytest.raises(ml.InputError, match="lacks parts of 'w'"):
        Reader(tmp_path).tensors["w"].read()


@pytest.mark.parametrize(("key", "shape"), [("../outside", [2]), ("w", [1 << 40]), ("w", [1 << 40, 0, 1 << 40])])
def test_arrays_of_orbax_outside_of_the_folder_or_larger_than_it(tmp_path, key, shape):
    pytest.importorskip("tensorstore")
    entry = {"key_metadata": [{"key": key}], "value_metadata": {"skip_deserialize": False}}
    (tmp_path / "ck" / "w").mkdir(parents=True)
    (tmp_path / "outside").mkdir()
    (tmp_path / "ck" / "_METADATA").write_text(json.dumps({"tree_metadata": {"a": entry}, "use_ocdbt": False}))
    header = {"shape": shape, "chunks": [1] * len(shape), "dtype": "<f4", "zarr_format": 2, "fill_value": 0}
    text = json.dumps(header | {"order": "C", "filters": None, "compressor": None})
    for folder in (tmp_path / "ck" / "w", tmp_path / "outside"):
        (folder / ".zarray").write_text(text)
    if 0 in shape:
        ml.import_checkpoint(tmp_path / "ck", tmp_path / "new")
        return
    with pytest.raises(ml.InputError, match="names no file inside of its folder|bytes of memory"):
        ml.import_checkpoint(tmp_path / "ck", tmp_path / "new")
