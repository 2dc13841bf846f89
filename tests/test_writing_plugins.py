"""docs/writing-plugins.md: its files form a distribution whose own tests pass."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "writing-plugins.md"
BLOCK = re.compile(r"^```(?:python|toml)\n# (\S+)\n(.*?)^```$", re.S | re.M)


def test_files_of_the_page_form_a_working_distribution(tmp_path):
    text = PAGE.read_text()
    files = dict(BLOCK.findall(text))
    assert len(files) == text.count("\n```python") + text.count("\n```toml") == 12
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
    info = tmp_path / "mithril_acme-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mithril-acme\nVersion: 1.0\n")
    entry = re.search(r"entry-points.mithril\]\n(.*\n)", files["pyproject.toml"])
    (info / "entry_points.txt").write_text(f"[mithril]\n{entry[1].replace(chr(34), '')}")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_acme.py"]
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout
