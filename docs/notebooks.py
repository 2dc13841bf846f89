"""Notebooks: run without Jupyter, store outputs, show them as Markdown; ``python docs/notebooks.py`` stores them."""

from __future__ import annotations

import ast
import io
import json
import sys
from collections.abc import Mapping
from contextlib import chdir, redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

FOLDER = Path(__file__).parents[1] / "examples/notebooks"
Notebook = Mapping[str, Any]


def markdown_of(notebook: Notebook) -> str:
    """Return a notebook as Markdown with its stored outputs."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            text = "".join(output.get("text", data.get("text/plain", "")))
            parts.append("".join(data["text/html"]) if "text/html" in data else f"```text\n{text.rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


def outputs_of(notebook: Notebook) -> list[list[dict[str, Any]]]:
    """Run the code cells in order, in an empty folder, and return the outputs of each."""
    names: dict[str, Any] = {"__name__": "__main__"}
    results = []
    with TemporaryDirectory() as folder, chdir(folder):
        for cell in notebook["cells"]:
            if cell["cell_type"] == "code":
                results.append(_run("".join(cell["source"]), names))
    return results


def _run(source: str, names: dict[str, Any]) -> list[dict[str, Any]]:
    """Run a cell as a notebook does: printed text is an output, and so is the value of a last expression."""
    body = ast.parse(source).body
    last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(compile(ast.Module(body, []), "cell", "exec"), names)
        value = eval(compile(ast.Expression(last.value), "cell", "eval"), names) if isinstance(last, ast.Expr) else None
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        outputs.append({"output_type": "stream", "name": "stdout", "text": printed.getvalue().splitlines(True)})
    if value is not None:
        data = {"text/plain": repr(value).splitlines(True)}
        if hasattr(value, "_repr_html_"):
            data["text/html"] = value._repr_html_().splitlines(True)
        outputs.append({"output_type": "execute_result", "execution_count": None, "data": data, "metadata": {}})
    return outputs


def stored(path: Path) -> Any:
    """Read a notebook."""
    return json.loads(path.read_text(encoding="utf-8"))


def main() -> None:
    for path in [Path(name) for name in sys.argv[1:]] or sorted(FOLDER.glob("*.ipynb")):
        notebook = stored(path)
        code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
        for cell, outputs in zip(code, outputs_of(notebook), strict=True):
            cell["outputs"] = outputs
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
