"""Fake distributions on disk, for tests of everything that discovers plugins.

Import the fixture into a ``conftest.py``: ``from mithril_testing.fake_site import site``.
"""

from __future__ import annotations

import importlib.metadata
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from mithril.plugins import Plugins


class FakeSite:
    """A folder that looks like site-packages: ``install`` writes a module and the ``.dist-info`` that names it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def install(
        self,
        distribution: str,
        code: str,
        *,
        entry: str = "",
        version: str = "1.0",
        requires: Sequence[str] = (),
        module: str = "",
    ) -> str:
        """Write a distribution with one plugin module, and return the name of that module."""
        entry = entry or distribution.removeprefix("mithril-")
        module = module or f"{distribution.replace('-', '_')}_{entry.replace('-', '_')}_plugin"
        (self.folder / f"{module}.py").write_text(textwrap.dedent(code))
        info = self.folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        lines = ["Metadata-Version: 2.1", f"Name: {distribution}", f"Version: {version}"]
        (info / "METADATA").write_text("\n".join([*lines, *(f"Requires-Dist: {r}" for r in requires), ""]))
        (info / "entry_points.txt").write_text(f"[console_scripts]\nx = y:z\n\n[mithril]\n{entry} = {module}\n")
        return module

    def plugins(self, **arguments: Any) -> Plugins:
        """Return a plugin host of its own."""
        return Plugins(**arguments)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSite]:
    """Provide a fake site-packages that is the only place where plugins are found."""
    monkeypatch.syspath_prepend(str(tmp_path))
    real = importlib.metadata.distributions
    monkeypatch.setattr(importlib.metadata, "distributions", lambda **given: real(**{"path": [str(tmp_path)], **given}))
    for variable in ("MITHRIL_DISABLE_PLUGINS", "MITHRIL_STRICT_PLUGINS"):
        monkeypatch.delenv(variable, raising=False)
    before = set(sys.modules)
    yield FakeSite(tmp_path)
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]
