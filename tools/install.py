"""Install distributions of this repository from their wheels: ``install.py core numpy hub[text] ...``.

Each wheel is built once for all environments of tox, and again when a file of its distribution changed.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WHEELS = ROOT / ".tox" / "wheels"


def pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", *arguments], check=True)


def source_of(name: str) -> Path:
    """Return the folder of a distribution, or of an example by its complete name."""
    places = [ROOT / f"mithril-{name}", ROOT / "plugins" / f"mithril-{name}", ROOT / "examples" / name]
    return next(place for place in places if (place / "pyproject.toml").exists())


def wheel_of(source: Path) -> Path | None:
    """Return the wheel of a distribution unless one of its files is newer."""
    wheel = next(WHEELS.glob(f"{source.name.replace('-', '_')}-*.whl"), None)
    files = [
        source / "pyproject.toml",
        ROOT / "registry.json",  # the wheel of the core holds it
        *(path for path in (source / "src").rglob("*") if "__pycache__" not in path.parts),
    ]
    return wheel if wheel and wheel.stat().st_mtime > max(path.stat().st_mtime for path in files) else None


def main(names: list[str]) -> None:
    sources = {name: source_of(re.sub(r"\[.*", "", name)) for name in names}
    stale = [str(source) for source in sources.values() if not wheel_of(source)]
    if stale:
        pip("wheel", "--no-deps", "--wheel-dir", str(WHEELS), *stale)
    wheels = [(str(wheel_of(source)), "".join(re.findall(r"\[.*", name))) for name, source in sources.items()]
    pip("install", *(wheel + extra for wheel, extra in wheels))
    # pip keeps an installed version, and all changes of the working tree have one version
    pip("install", "--no-deps", "--force-reinstall", *(wheel for wheel, _ in wheels))


if __name__ == "__main__":
    main(sys.argv[1:])
