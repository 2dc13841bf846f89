"""Notebooks as Markdown with their stored outputs; ``python docs/notebooks.py`` executes and stores them."""

from __future__ import annotations

import base64
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "examples/notebooks"


def markdown_of(notebook: Mapping[str, Any], stem: str) -> tuple[str, dict[str, bytes]]:
    """Return a notebook as Markdown, and its pictures by file name."""
    parts, pictures = [], {}
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {})
            kind = next((k for k in ("image/svg+xml", "image/png") if k in data), None)
            if kind:
                name = f"{stem}-{len(pictures)}.{'svg' if 'svg' in kind else 'png'}"
                content = "".join(data[kind])
                pictures[name] = content.encode() if "svg" in kind else base64.b64decode(content)
                parts.append(f"![]({name})")
            else:
                text = "".join(output.get("text", data.get("text/plain", "")))
                parts.append(f"```text\n{text.rstrip()}\n```")
    return "\n\n".join(parts) + "\n", pictures


def execute(path: Path) -> Any:
    """Run all cells of a notebook in its folder and return it with the outputs."""
    import nbclient
    import nbformat

    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(path.parent)}}).execute()
    for cell in notebook.cells:
        cell.metadata.clear()  # times of execution
    return notebook


if __name__ == "__main__":
    import nbformat

    for path in [Path(name) for name in sys.argv[1:]] or sorted(FOLDER.glob("*.ipynb")):
        nbformat.write(execute(path), path)
