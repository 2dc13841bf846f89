"""Install distributions of this repository from their wheels: ``install.py core numpy hub[text] ...``.

Each wheel is built once for all environments of tox, and again when a file of its distribution changed, and all of
them in one environment, as one for each wheel takes four times as long. Environments that install at the same time
wait for those that build. ``-c FILE``, given first, are constraints.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import re
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WHEELS = ROOT / ".tox" / "wheels"
BUILDER = ROOT / ".tox" / "builder"


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


def build(sources: list[Path]) -> None:
    """Build wheels in one environment, which holds the requirements of all builds."""
    systems = [tomllib.loads((source / "pyproject.toml").read_text())["build-system"] for source in sources]
    if not BUILDER.exists():
        venv.create(BUILDER)
    requires = sorted({requirement for system in systems for requirement in system["requires"]})
    pip("--python", str(BUILDER), "install", "-c", str(ROOT / "constraints.txt"), *requires)
    pip("--python", str(BUILDER), "wheel", "--no-deps", "--no-build-isolation", "-w", str(WHEELS), *map(str, sources))


def main(names: list[str], constraints: list[str]) -> None:
    sources = {name: source_of(re.sub(r"\[.*", "", name)) for name in names}
    WHEELS.mkdir(parents=True, exist_ok=True)
    with open(WHEELS / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        stale = [source for source in sources.values() if not wheel_of(source)]
        if stale:
            build(stale)
        fcntl.flock(lock, fcntl.LOCK_SH)  # until it is installed, no wheel is built again
        install(sources, constraints)


def install(sources: dict[str, Path], constraints: list[str]) -> None:
    wheels = [(str(wheel_of(source)), "".join(re.findall(r"\[.*", name))) for name, source in sources.items()]
    installed = {distribution.name for distribution in importlib.metadata.distributions()}
    again = [wheel for (wheel, _), source in zip(wheels, sources.values(), strict=True) if source.name in installed]
    pip("install", *constraints, *(wheel + extra for wheel, extra in wheels))
    if again:  # pip keeps an installed version, and all changes of the working tree have one version
        pip("install", "--no-deps", "--force-reinstall", *again)


if __name__ == "__main__":
    constraints = sys.argv[1:3] if sys.argv[1] == "-c" else []
    main(sys.argv[1 + len(constraints) :], constraints)
