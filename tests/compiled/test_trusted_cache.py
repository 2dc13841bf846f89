"""Only what this user wrote into the cache is run, and an entry runs the text that it shows."""

from __future__ import annotations

import builtins
import os
import stat
import subprocess
import sys

import numpy as np
import pytest

import mithril as ml
from mithril.graph.errors import OptionError
from mithril.models import Linear, Model
from mithril.system import disk_cache, files
from mithril.system.disk_cache import Store

KEY, OTHER = "ab" * 32, "cd" * 32
X = np.ones((2, 3), np.float32)


@pytest.fixture(autouse=True)
def own_key(tmp_path, monkeypatch):
    monkeypatch.setenv("MITHRIL_CACHE_KEY", str(tmp_path / "settings" / "cache.key"))


def compiled(folder, **options):
    model = Model()
    model |= Linear(3)(input="input", output="output")
    return ml.compile(model, "numpy", shapes={"input": [2, 3]}, cache=True, cache_dir=folder, **options)


def entries(folder):
    return sorted(folder.rglob("*.mithril"))


def test_the_text_that_is_shown_is_compiled(tmp_path):
    """Code is in an entry only as text, and the function that runs has it."""
    folder = tmp_path / "cache"
    compiled(folder)
    (entry,) = entries(folder)
    key = entry.stem
    store = Store(folder)
    parts = store.get(key)
    assert not [name for name in parts if "code" in name]
    parts["executable/source"] = parts["executable/source"].replace(
        b"    outputs = ", b"    marked = 1\n    outputs = "
    )
    store.put(key, parts)
    again = compiled(folder)
    assert "marked = 1" in again.source
    assert "marked" in again.programs[0].executable.forward.__code__.co_varnames


@pytest.mark.parametrize("how", ["other secret", "moved", "edited", "unsigned"])
def test_forged_entries_are_dropped(tmp_path, monkeypatch, how):
    folder, forged = tmp_path / "cache", tmp_path / "forged"
    monkeypatch.setattr(builtins, "executed", [], raising=False)
    compiled(folder)
    (entry,) = entries(folder)
    parts = Store(folder).get(entry.stem)
    evil = {**parts, "executable/source": b"__builtins__.executed.append(1)\n" + parts["executable/source"]}
    if how == "other secret":
        (tmp_path / "other.key").write_bytes(b"x" * 32)
        (tmp_path / "other.key").chmod(0o600)
        with monkeypatch.context() as m:
            m.setenv("MITHRIL_CACHE_KEY", str(tmp_path / "other.key"))
            Store(folder).put(entry.stem, evil)
    elif how == "moved":
        Store(forged).put(OTHER, evil)
        entry.write_bytes(entries(forged)[0].read_bytes())
    elif how == "edited":
        raw = entry.read_bytes()
        entry.write_bytes(raw.replace(b"import numpy as np", b"executed.append(1)"))
    else:
        head, _, body = entry.read_bytes().partition(b"\n")
        entry.write_bytes(head[: head.index(b', "digest"')] + b"}\n" + body)
    again = compiled(folder)
    assert not builtins.executed
    assert again.evaluate(again.randomize_params(seed=0), {"input": X})["output"].shape == (2, 3)


def test_the_key_is_secret_and_made_once(tmp_path):
    code = "from mithril.system.disk_cache import Store; import sys; Store(sys.argv[1]).put('ab' * 32, {'a': b'x'})"
    running = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path / f"c{k}")]) for k in range(4)]
    assert [p.wait() for p in running] == [0] * 4
    file = disk_cache.key_file()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and file.stat().st_size == 32
    assert all(Store(tmp_path / f"c{k}").get(KEY) == {"a": b"x"} for k in range(4))
    assert [p.name for p in file.parent.iterdir()] == ["cache.key"]


@pytest.mark.parametrize("trouble", ["readable", "short", "link", "folder"])
def test_a_key_that_is_none_is_refused(tmp_path, monkeypatch, trouble):
    file = tmp_path / "bad.key"
    monkeypatch.setenv("MITHRIL_CACHE_KEY", str(file))
    if trouble == "folder":
        file.mkdir()
    elif trouble == "link":
        (tmp_path / "real").write_bytes(b"x" * 32)
        file.symlink_to(tmp_path / "real")
    else:
        file.write_bytes(b"x" * (32 if trouble == "readable" else 3))
        file.chmod(0o644 if trouble == "readable" else 0o600)
    with pytest.raises(OptionError, match="key of caches") as caught:
        Store(tmp_path / "cache").put(KEY, {"a": b""})
    assert "rm '" in str(caught.value) or "MITHRIL_CACHE_KEY" in str(caught.value)


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777, 0o1777])
def test_folders_that_others_can_write_to_are_refused(tmp_path, mode):
    folder = tmp_path / "shared"
    Store(folder).put(KEY, {"a": b"x"})
    folder.chmod(mode)
    for use in (lambda: Store(folder).put(OTHER, {}), lambda: Store(folder).get(KEY), lambda: compiled(folder)):
        with pytest.raises(OptionError, match="is not safe: others can write") as caught:
            use()
        assert "chmod go-w" in str(caught.value)


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="only root can give files away")
def test_folders_and_entries_of_others_are_refused(tmp_path):
    folder = tmp_path / "theirs"
    store = Store(folder)
    store.put(KEY, {"a": b"x"})
    os.chown(store._file(KEY), 12345, -1)
    assert store.get(KEY) is None
    os.chown(folder, 12345, -1)
    with pytest.raises(OptionError, match="belongs to another user"):
        store.put(KEY, {"a": b"x"})


def test_a_folder_inside_one_that_others_can_exchange_is_refused_for_code_that_is_not_signed(tmp_path):
    outer = tmp_path / "outer"
    (outer / "inner").mkdir(parents=True)
    outer.chmod(0o777)
    with pytest.raises(OptionError, match="is not safe"):
        files.private_folder(outer / "inner")
    outer.chmod(0o1777)
    files.private_folder(outer / "inner")


def test_the_template_s_text_is_part_of_the_key(tmp_path):
    """Also of those that it includes."""
    part, template, out = tmp_path / "part.j2", tmp_path / "t.j2", tmp_path / "made.py"
    text = (
        "{% for l in imports + helpers + constants %}{{ l }}\n{% endfor %}{{ signature }}\n"
        "{% for l in body %}    {{ l }}\n{% endfor %}{% include 'part.j2' %}    {{ closing }}\n"
    )
    template.write_text(text)
    seen = []
    for factor in (1, 2, 2):
        part.write_text(f"    outputs['output'] = outputs['output'] * {factor}\n")
        model = compiled(tmp_path / "cache", template_path=template, file_path=out)
        seen.append(model.evaluate(model.randomize_params(seed=0), {"input": X})["output"])
        assert f"* {factor}" in out.read_text()
    np.testing.assert_allclose(seen[1], 2 * seen[0], rtol=1e-6)
    np.testing.assert_array_equal(seen[1], seen[2])
    assert len(entries(tmp_path / "cache")) == 2
    template.write_text(text.replace("'part.j2'", "['part', '.j2'] | join"))
    model = compiled(tmp_path / "cache", template_path=template)
    assert any("computed" in d.message for d in model.decisions)
    assert len(entries(tmp_path / "cache")) == 2
