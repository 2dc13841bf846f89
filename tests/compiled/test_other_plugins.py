"""A file or a cache entry, and other plugins than those that it was written with."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

import mithril as ml
from mithril.compiler import compiled_model, plugin_records, program_cache
from mithril.models import Exp, Model
from mithril.plugins import PluginWarning

NAME = "mithril-passes 0.1.0"
OTHERS = {  # the installed record of mithril-passes is replaced by this one, or removed
    "version": (lambda r: replace(r, version="0.1.1"), "mithril-passes was 0.1.0 and is 0.1.1"),
    "code": (lambda r: replace(r, module="json"), f"{NAME} has other code"),
    "missing": (lambda r: None, f"{NAME} is not installed"),
    "broken": (lambda r: replace(r, state="absent"), f"{NAME} is not in use"),
}


@pytest.fixture
def replaced(monkeypatch):
    """Return a function that replaces the record of mithril-passes."""
    inventory = plugin_records.inventory

    def install(change):
        def changed(backend):
            records = ((change(r) if r.distribution == "mithril-passes" else r) for r in inventory(backend))
            return tuple(r for r in records if r is not None)

        for module in (compiled_model, plugin_records, program_cache):
            monkeypatch.setattr(module, "inventory", changed)
        monkeypatch.setattr(plugin_records, "_warned", set())

    return install


def compiled(backend="numpy", **options):
    model = Model()
    model |= Exp()(input="x", output="y")
    return ml.compile(model, backend, shapes={"x": [1]}, inference=True, **options)


@pytest.mark.parametrize("suffix", ["onnx", "gguf", "mlir"])
def test_load_names_plugins_that_differ(tmp_path, replaced, suffix):
    path = tmp_path / f"model.{suffix}"
    compiled("jax" if suffix == "mlir" else "numpy").bind({}).export(path)
    assert not ml.load(path, backend="numpy", strict=True).decisions.of("ignored")
    for change, expected in OTHERS.values():
        replaced(change)
        message = f"plugins differ from those that '{path}' was written with: {expected}"
        with pytest.warns(PluginWarning) as caught:
            loaded = ml.load(path, backend="numpy")
        assert [str(w.message) for w in caught] == [message]
        assert [d.message for d in loaded.decisions.of("ignored")] == [message]
        ml.load(path, backend="numpy")  # warns once per process
        with pytest.raises(ml.StrictError, match="plugins differ"):
            ml.load(path, backend="numpy", strict=True)


def test_load_names_a_plugin_that_is_new(tmp_path, replaced):
    path = tmp_path / "model.onnx"
    replaced(lambda r: None)
    compiled().bind({}).export(path)
    for change in (lambda r: replace(r, state="absent"), lambda r: None):
        replaced(change)
        ml.load(path, backend="numpy", strict=True)
    replaced(lambda r: r)
    with pytest.raises(ml.StrictError, match=f"{NAME} was not in use"):
        ml.load(path, backend="numpy", strict=True)


def test_ggml_runs_a_file_without_the_passes_of_its_writer(tmp_path, replaced):
    path = tmp_path / "model.gguf"
    compiled("ggml").bind({}).export(path)
    replaced(OTHERS["missing"][0])
    loaded = ml.load(path, strict=True)
    np.testing.assert_allclose(loaded({"x": np.float32([1.0])})["y"], [np.e], rtol=1e-6)
    loaded.export(tmp_path / "again.gguf")


def test_backend_of_the_writer_is_compared_only_on_that_backend(tmp_path):
    path = tmp_path / "model.onnx"
    writer = compiled("jax").bind({})
    writer.plugins = tuple(replace(r, version="0.0.9") if r.name == "jax" else r for r in writer.plugins)
    writer.export(path)
    ml.load(path, backend="numpy", strict=True)
    with pytest.raises(ml.StrictError, match=r"mithril-jax was 0\.0\.9 and is 0\.1\.0"):
        ml.load(path, backend="jax", strict=True)


def test_a_damaged_list_of_plugins_is_an_error_of_the_file(tmp_path):
    import onnx

    path = tmp_path / "model.onnx"
    compiled().bind({}).export(path)
    proto = onnx.load(path)
    for text in ("", "[]", "{}", '{"backend": 1, "plugins": []}', json.dumps({"backend": "c", "plugins": [["a", []]]})):
        proto.metadata_props[0].value = text
        onnx.save(proto, path)
        with pytest.raises(ml.InputError, match=r"the list of plugins in '.*model\.onnx' is damaged"):
            ml.load(path, backend="numpy")
    del proto.metadata_props[:]
    onnx.save(proto, path)
    ml.load(path, backend="numpy", strict=True)  # files of earlier versions have no list


@pytest.mark.parametrize("kind", ["version", "missing"])
def test_cache_names_the_plugins_for_which_a_program_is_compiled_again(tmp_path, replaced, kind):
    options = {"cache": True, "cache_dir": str(tmp_path), "strict": True}
    for _ in range(2):
        assert "plugins differ" not in str(compiled(**options).decisions)
    change, expected = OTHERS[kind]
    replaced(change)
    messages = [d.message for d in compiled(**options).decisions.of("choice")]
    assert f"cache: compiled again, as plugins differ: {expected}" in messages
    assert "plugins differ" not in str(compiled(**options).decisions)
