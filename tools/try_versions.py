"""Run the conformance kit of a backend with other versions of its framework, and record which pass.

``try_versions.py FOLDER numpy==2.0.2 "jax==0.8.0 jaxlib==0.8.0"`` installs each set of requirements into a folder
of its own, in front of the installed packages, and adds the counts to ``docs/versions.json``.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "docs" / "versions.json"
BACKENDS = {
    "apache-tvm": "cbackend", "ggml-python": "ggml", "jax": "jax", "mlx": "mlx", "numpy": "numpy", "torch": "torch",
}  # fmt: skip


def run_kit(folder: Path, requirements: list[str]) -> dict[str, object]:
    """Return the counts of the kit with these requirements, or the error that prevents it."""
    backend = BACKENDS[requirements[0].partition("==")[0]]
    environment = {name: value for name, value in os.environ.items() if name != "PIP_CONSTRAINT"}
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder), *requirements]
    done = subprocess.run(install, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"error": "there is no wheel for this machine"}
    environment["PYTHONPATH"] = f"{folder}{os.pathsep}{environment.get('PYTHONPATH', '')}"
    tests = f"plugins/mithril-{backend}/tests/test_conformance.py"
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", "--tb=line", tests]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    print(done.stdout[-3000:], done.stderr[-500:], flush=True)
    counts = {word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|skipped|error)", done.stdout)}
    return counts if "passed" in counts else {"error": "the tests cannot start"}


def main(folder: str, *sets: str) -> None:
    for requirements in (text.split() for text in sets):
        name, _, version = requirements[0].partition("==")
        place = Path(folder) / requirements[0].replace("==", "-")
        record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
        record.setdefault(name, {})[version] = run_kit(place, requirements)
        RECORD.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
        shutil.rmtree(place, ignore_errors=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
