"""Build the sdist of each distribution and from it the wheel, twice, and check metadata, license, content and bytes.

``audit_distributions.py OUTPUT [FOLDER...]`` needs build, hatchling, twine and check-wheel-contents.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
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


def build(folder: Path, output: Path) -> list[Path]:
    """Return the sdist and the wheel of a distribution; the same sources give the same bytes."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(output), str(folder)]
    environment = {"SOURCE_DATE_EPOCH": "1704067200", **os.environ}
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
    return sorted(output.glob("*"))


def audit(folder: Path, output: Path) -> list[str]:
    """Build a distribution into ``output``, and return its faults."""
    run = [sys.executable, "-m"]
    archives = build(folder, output)
    checks = [[*run, "twine", "check", "--strict", *map(str, archives)]]
    checks.append(
        [*run, "check_wheel_contents", "--config", str(folder / "pyproject.toml"), *map(str, output.glob("*.whl"))]
    )
    results = [subprocess.run(command, capture_output=True, text=True, check=False) for command in checks]
    faults = [f"{done.stdout}{done.stderr}" for done in results if done.returncode]
    with tempfile.TemporaryDirectory() as scratch:
        pairs = zip(archives, build(folder, Path(scratch)), strict=True)
        faults += [f"{a.name}: a second build has other bytes" for a, b in pairs if a.read_bytes() != b.read_bytes()]
    for archive in archives:
        names = content(archive)
        faults += [f"{archive.name}: no {name}" for name in ("LICENSE",) if not any(n.endswith(name) for n in names)]
        if archive.suffix == ".whl" and not any(name.endswith("py.typed") for name in names):
            faults.append(f"{archive.name}: no py.typed")
    return faults


def main(output: str, *folders: str) -> None:
    distributions = [Path(folder) for folder in folders] or DISTRIBUTIONS
    faults = []
    for folder in distributions:
        result = audit(folder, Path(output) / folder.name)
        faults += [f"{folder.name}: {fault}" for fault in result]
        print(f"{'faults' if result else 'passes'}: {folder.name}", flush=True)
    print(f"{len(distributions)} distributions, {2 * len(distributions)} archives, {len(faults)} faults")
    sys.exit("\n".join(faults) or 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
