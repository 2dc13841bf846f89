"""Puts the guides of the repository into the distributions, where ``mithril docs`` reads them."""

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Guides(BuildHookInterface[Any]):
    """A wheel is built from the repository, or from an sdist, which holds the guides already."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        folder = root / "guides" if (root / "guides").is_dir() else root.parents[1] / "docs"
        target = "guides" if self.target_name == "sdist" else "mithril_tools/guides"
        if version != "editable":
            build_data["force_include"].update({str(p): f"{target}/{p.name}" for p in folder.glob("*.md")})
