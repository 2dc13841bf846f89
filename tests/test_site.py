"""The site: links lead somewhere, every declared name has its page, pictures and notebooks are current."""

from __future__ import annotations

import re
import sys
from functools import cache
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"


@pytest.fixture(scope="module")
def docs_modules():
    sys.path.insert(0, str(DOCS))
    import notebooks
    import plots
    import site_pages

    yield site_pages, plots, notebooks
    sys.path.remove(str(DOCS))


@pytest.fixture(scope="module")
def site(docs_modules, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    return folder, docs_modules[0].write(folder)


def prose_of(path):
    text = re.sub(r"^(`{3,4}).*?^\1$", "", path.read_text(), flags=re.S | re.M)
    return re.sub(r"`[^`]*`", "`code`", text)


@cache
def anchors_of(path):
    """Return the anchors of the headings, as the extension toc of Python-Markdown makes them."""
    text = re.sub(r"^(`{3,4}).*?^\1$", "", path.read_text(), flags=re.S | re.M)
    headings = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", h) for h in re.findall(r"^#+ (.*)$", text, re.M)]
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", h).strip().lower()) for h in headings}


def test_every_link_and_anchor_exists(site):
    folder, _ = site
    links = 0
    for path in folder.rglob("*.md"):
        for target, anchor in re.findall(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]*))?\)", prose_of(path)):
            file = (path.parent / target).resolve() if target else path
            assert file.exists(), f"{path.relative_to(folder)}: {target}"
            assert not anchor or anchor in anchors_of(file), f"{path.relative_to(folder)}: {target}#{anchor}"
            links += 1
    assert links > 1000


def test_every_declared_name_has_a_page(site, docs_modules):
    from mithril_tools.reference import pages

    folder, nav = site
    site_pages = docs_modules[0]
    listed = set(site_pages.sections_of(nav))
    for kind, directory in site_pages.REFERENCE.items():
        for name in pages(kind):
            assert f"reference/{directory}/{name}.md" in listed
    for kind, file in site_pages.ONE_PAGE.items():
        headings = re.findall(r"^## (.*)$", (folder / f"reference/{file}.md").read_text(), re.M)
        assert set(pages(kind)) <= set(headings)


def test_every_page_is_in_the_navigation(site, docs_modules):
    folder, nav = site
    assert {str(path.relative_to(folder)) for path in folder.rglob("*.md")} == {*docs_modules[0].sections_of(nav)}


def test_every_kind_of_plugin_has_a_page(site):
    from mithril_tools.cli import new_plugin

    assert {path.stem for path in (site[0] / "how-to").glob("*.md")} == set(new_plugin.KINDS)


def test_pictures_show_the_tables(docs_modules):
    """``python docs/plots.py`` writes them."""
    for name, picture in docs_modules[1].pictures().items():
        assert (DOCS / "pictures" / name).read_text() == picture, name


FRAMEWORKS = {
    "digits": ("sklearn", "mlx", "ggml", "tvm", "torch", "jax"),
    "custom_pass": (),
    "torch_to_c": ("tvm", "torch"),
}


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_notebook_shows_its_outputs(name, docs_modules, monkeypatch, tmp_path):
    """``python docs/notebooks.py`` runs the notebooks and stores the outputs."""
    for framework in FRAMEWORKS[name]:
        pytest.importorskip(framework)
    monkeypatch.setenv("MITHRIL_CACHE_DIR", str(tmp_path))
    notebooks = docs_modules[2]
    notebook = notebooks.stored(notebooks.FOLDER / f"{name}.ipynb")
    expected = [cell["outputs"] for cell in notebook["cells"] if cell["cell_type"] == "code"]
    texts = str(notebooks.outputs_of(notebook)), str(expected)
    (words, figures), (expected_words, expected_figures) = map(words_and_figures, texts)
    assert words == expected_words
    assert figures == pytest.approx(expected_figures, rel=0.05, abs=0.01)  # rounding differs between processors


def words_and_figures(text):
    """Return the text without its decimal numbers, and these."""
    decimal = r"\d+\.\d+"
    return re.sub(decimal, "#", text), [float(figure) for figure in re.findall(decimal, text)]
