"""Public names of the modules for plugins: none disappears without a deprecation of two minor versions.

``public_names.json`` holds the names of the last version. After names were added, or removed in time:
``python mithril-core/tests/test_public_names.py``.
"""

from __future__ import annotations

import json
import re
import sys
import warnings
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

import mithril
from mithril.graph import __version__, deprecated, removal

PROJECT = Path(__file__).parents[2]
SNAPSHOT = Path(__file__).with_name("public_names.json")


def current() -> dict[str, list[str]]:
    """Return the public names of each module for plugins."""
    packages = [f"mithril.{m.name}" for m in iter_modules(mithril.__path__) if m.ispkg]
    names = {package: sorted(getattr(import_module(package), "__all__", ())) for package in packages}
    return {"mithril": sorted(mithril._MODULE_OF), **names, "mithril_testing": _of_testing()}


def _of_testing() -> list[str]:
    return sorted(import_module("mithril_testing").__all__)


def test_no_public_name_disappears():
    now = current()
    missing = {m: sorted(set(names) - set(now.get(m, ()))) for m, names in json.loads(SNAPSHOT.read_text()).items()}
    assert {m: names for m, names in missing.items() if names} == {}, (
        f"deprecate them for two minor versions: {__file__}"
    )


def test_page_lists_the_public_modules():
    page = (PROJECT / "docs" / "plugins.md").read_text()
    table = page[page.index("## Public modules") : page.index("A test compares")]
    assert sorted(re.findall(r"^\| `([\w.]+)` \|", table, re.M)) == sorted(json.loads(SNAPSHOT.read_text()))


def test_deprecated_names_go_in_time():
    """Fails in the version in which a deprecated name is to be removed."""
    sources = [*PROJECT.glob("mithril-core/src/**/*.py"), *PROJECT.glob("plugins/*/src/**/*.py")]
    calls = [(path.name, since) for path in sources for since in re.findall(r'since="([\d.]+)"', path.read_text())]
    present = tuple(map(int, __version__.split(".")[:2]))
    overdue = [call for call in calls if tuple(map(int, removal(call[1]).split("."))) <= present]
    assert not overdue


def test_warning_names_replacement_removal_and_the_callers_line():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        deprecated("old", "new", since="0.9")
    (warning,) = caught
    assert str(warning.message) == "old is deprecated since mithril 0.9 and goes with 0.11: use new"
    assert warning.category is DeprecationWarning
    assert warning.filename == __file__


if __name__ == "__main__":
    SNAPSHOT.write_text(json.dumps(current(), indent=1) + "\n")
    sys.stdout.write(f"{SNAPSHOT}\n")
