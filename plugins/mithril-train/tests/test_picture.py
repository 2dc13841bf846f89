"""Learning curves as pictures; names of the public face."""

import sys
from xml.etree import ElementTree

import pytest

import mithril as ml
from mithril_train.learning_curves import curves
from mithril_train.plugin import EXPORTS


def test_a_picture_is_well_formed_and_complete(tmp_path):
    path = curves(
        tmp_path / "a" / "b.svg",
        {"a < b": [3.0, 2.0, float("nan"), 1.0], "pairs": ([10, 20], [2.5, 0.5]), "flat": [1.0]},
        title="loss & more",
        log=True,
    )
    root = ElementTree.parse(path).getroot()
    lines = [e for e in root.iter() if e.tag.endswith("polyline")]
    assert [len(e.get("points").split()) for e in lines] == [3, 2, 1]
    assert "a < b" in [e.text for e in root.iter() if e.tag.endswith("text")]
    with pytest.raises(ValueError, match="nothing to draw"):
        curves(tmp_path / "c.svg", {"a": []})


def test_axis_labels_are_round_numbers(tmp_path):
    def heights(values, **options):
        root = ElementTree.parse(curves(tmp_path / "a.svg", {"a": values}, **options)).getroot()
        return [e.text for e in root.iter() if e.tag.endswith("text") and e.get("text-anchor") == "end"]

    assert heights([0.3, 2.2]) == ["0.5", "1", "1.5", "2"]
    assert heights([0.04, 2.2], log=True) == ["0.05", "0.1", "0.2", "0.5", "1", "2"]
    assert heights([0.0002, 2.2], log=True) == ["0.001", "0.01", "0.1", "1"]


@pytest.mark.parametrize("name", [n for names in EXPORTS.values() for n in names])
def test_names_of_the_public_face(name):
    assert getattr(ml, name).__name__ == name
    assert getattr(ml, name).__doc__


def test_the_entry_module_is_light():
    import subprocess

    code = "import sys, mithril_train.plugin; print([m for m in ('numpy', 'torch', 'jax', 'rich') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
