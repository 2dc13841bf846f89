"""Pages name benchmarks that exist, and each benchmark is named: its figures are published."""

from __future__ import annotations

import re
from pathlib import Path

PROJECT = Path(__file__).parents[1]
SCRIPTS = {path.stem for path in (PROJECT / "benchmarks").glob("bench_*.py")}


def test_pages_and_benchmarks_name_each_other():
    folders = [PROJECT / name for name in ("docs", "plugins", "mithril-core", "tests")]
    files = [PROJECT / "README.md", *(path for f in folders for kind in ("*.md", "*.py") for path in f.rglob(kind))]
    words = {name for path in files if path != Path(__file__) for name in re.findall(r"\bbench_\w+", path.read_text())}
    scripts = {name for name in words if (PROJECT / "benchmarks" / f"{name}.py").exists()}
    assert SCRIPTS - scripts == set()
    pages = [path for path in files if path.suffix == ".md"]
    quoted = {name for path in pages for name in re.findall(r"\bbench_\w+", path.read_text())}
    assert quoted - SCRIPTS == set()
