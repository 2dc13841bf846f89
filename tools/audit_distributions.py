"""Build the sdist and the wheel of each distribution, and check their metadata, license and content.

``audit_distributions.py OUTPUT [FOLDER...]`` needs build, hatchling, twine and check-wheel-contents.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
DISTRIBUTIONS = [ROOT / "mithril-core", *sorted((ROOT / "plugins").glob("mithril-*"))]


def content(archive: Path) -> list[str]:
    """Return the names of the files of a wheel or an sdist."""
    if archive.suffix == ".whl":
        return zipfile.ZipFile(archive).namelist()
    with tarfile.open(archive) as files:
        return files.getnames()


def audit(folder: Path, output: Path) -> list[str]:
    """Build a distribution into ``output``, and return its faults."""
    run = [sys.executable, "-m"]
    subprocess.run([*run, "build", "-q", "--no-isolation", "--outdir", str(output), str(folder)], check=True)
    archives = sorted(output.glob("*"))
    checks = [[*run, "twine", "check", "--strict", *map(str, archives)]]
    checks.append(
        [*run, "check_wheel_contents", "--config", str(folder / "pyproject.toml"), *map(str, output.glob("*.whl"))]
    )
    results = [subprocess.run(command, capture_output=True, text=True, check=False) for command in checks]
    faults = [f"{done.stdout}{done.stderr}" for done in results if done.returncode]
    for archive in archives:
        names = content(archive)
        faults += [f"{archive.name}: no {name}" for name in ("LICENSE",) if not any(n.endswith(name) for n in names)]
        if archive.suffix == ".whl" and not any(name.endswith("py.typed") for name in names):
            faults.append(f"{archive.name}: no py.typed")
    return faults


def main(output: str, *folders: str) -> None:
    faults = []
    for folder in [Path(folder) for folder in folders] or DISTRIBUTIONS:
        faults += [f"{folder.name}: {fault}" for fault in audit(folder, Path(output) / folder.name)]
        print(f"built: {folder.name}", flush=True)
    sys.exit("\n".join(faults) or 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
