"""Write constraints with the lowest versions that distributions declare: ``lowest_versions.py FILE FOLDER...``."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path


def lowest(folders: list[Path]) -> dict[str, str]:
    """Return the lowest version of each requirement of third parties."""
    floors: dict[str, str] = {}
    for folder in folders:
        for line in tomllib.loads((folder / "pyproject.toml").read_text())["project"]["dependencies"]:
            match = re.match(r"([\w.-]+)(?:\[[\w,]+\])?>=([\d.]+)", line)
            if match and not match[1].startswith("mithril-"):
                floors[match[1]] = max(floors.get(match[1], match[2]), match[2], key=_numbers)
    return floors


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


if __name__ == "__main__":
    versions = lowest([Path(folder) for folder in sys.argv[2:]])
    Path(sys.argv[1]).write_text("".join(f"{name}=={version}\n" for name, version in sorted(versions.items())))
