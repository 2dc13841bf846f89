"""Install each backend from wheels into an empty environment: packages, megabytes, seconds, first result.

``python benchmarks/bench_install.py [BACKEND ...]`` writes the table of docs/start.md. Wheels of this project are built
before, those of others come from the index or pip's cache: their download is part of the wall time, not of the
processor time.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BACKENDS = {
    "numpy": "mithril-numpy",
    "jax": "mithril-jax",
    "torch": "mithril-torch",
    "mlx": "mithril-mlx",
    "c": "mithril-cbackend",
    "ggml": "mithril-ggml",
}
FIRST = """
import time
start = time.process_time()
import mithril as ml
from mithril.models import Linear, Model, Relu
compiled = ml.compile(Model(Linear(8), Relu(), Linear(3)), {backend!r}, shapes={{"input": [2, 4]}})
compiled.evaluate(compiled.randomize_params(), {{"input": [[0.0] * 4] * 2}})
print(time.process_time() - start)
"""


def megabytes(*folders: Path) -> float:
    return sum(f.stat().st_size for folder in folders for f in folder.rglob("*") if f.is_file()) / 1e6


def measure(backend: str, distribution: str, wheels: Path, folder: Path) -> str:
    """Return the row of one backend."""
    venv.create(folder, with_pip=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    before, count = megabytes(packages), len([*packages.glob("*.dist-info")])
    command = [folder / "bin/pip", "install", "-q", "--no-compile", "--find-links", wheels, "-c", "constraints.txt"]
    start, used = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([*command, "mithril-core", distribution], cwd=ROOT, check=True)
    wall, now = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
    total = megabytes(packages) - before
    project = megabytes(*packages.glob("mithril*"))
    added = len([*packages.glob("*.dist-info")]) - count
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    run = [folder / "bin/python", "-c", FIRST.format(backend=backend)]
    first = subprocess.run(run, cwd=folder, env=environment, check=True, capture_output=True, text=True).stdout
    return (
        f"| `pip install mithril-core {distribution}` | {added} | {total:.0f} | {project:.1f} "
        f"| {wall:.0f} | {seconds:.0f} | {float(first):.1f} |"
    )


def main(backends: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        wheels = Path(folder, "dist")
        sources = [ROOT / "mithril-core", *sorted((ROOT / "plugins").glob("mithril-*"))]
        command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", wheels, *sources]
        subprocess.run(command, check=True)
        print("| line | packages | MB | of mithril | s | s of a processor | first result, s of a processor |")
        print("|---|---|---|---|---|---|---|")
        for backend in backends:
            print(measure(backend, BACKENDS[backend], wheels, Path(folder, backend)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or [*BACKENDS])
