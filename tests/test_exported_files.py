"""Every file format tells which files it wrote."""

from __future__ import annotations

import os

import pytest

import mithril as ml
from mithril import FileFormat, hookimpl, plugins
from mithril.compiler import Exported
from mithril.models import Linear, Model, Relu


@pytest.mark.parametrize(
    ("backend", "name", "options", "fact"),
    [
        ("numpy", "model.onnx", {}, ""),
        ("numpy", "model.gguf", {}, ""),
        ("jax", "model.mlir", {}, ""),
        ("torch", "model.pt", {}, ", forward(input) -> (output)"),
        ("torch", "model.pt2", {}, ", forward(input) -> (output)"),
        ("c", "code", {"library": None}, ": C for this machine"),
    ],
)
def test_paths_and_sizes(backend, name, options, fact, tmp_path):
    compiled = ml.compile(Model(Linear(4), Relu()), backend, shapes={"input": [2, 3]}, inference=True)
    exported = compiled.bind(compiled.randomize_params()).export(str(tmp_path / name), **options)
    assert isinstance(exported, Exported) and exported.path == tmp_path / name
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert exported.bytes == sum(file.stat().st_size for file in files) > 0
    assert str(exported).startswith(f"{tmp_path / name}: ") and fact in str(exported)
    assert os.path.exists(exported) and not list(exported.decisions)


def write_text(compiled, path):
    with open(path, "w") as file:
        return file.write("text")


class ThirdParty:
    """A format whose function returns a number."""

    @hookimpl
    def mithril_formats(self):
        return [FileFormat("text", (".text",), saves=f"{__name__}:write_text")]


def test_formats_may_return_other_values(tmp_path):
    compiled = ml.compile(Model(Linear(4)), "numpy", shapes={"input": [2, 3]})
    plugin = ThirdParty()
    plugins.register(plugin, "text")
    try:
        exported = compiled.export(tmp_path / "model.text")
    finally:
        plugins.unregister("text")
    assert str(exported) == f"{tmp_path / 'model.text'}: 4 B"
