"""Measure the structure of the sources: ``measure_structure.py [--trace] [CHECKOUT]``, by default of this checkout.

Counts lines, comments, small files, exports without users, late bindings and generated files from the text alone. With
``--trace`` it also compiles a model of three layers for NumPy from the installed distributions and counts Python calls.
"""

from __future__ import annotations

import argparse
import ast
import io
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

Definition = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def sources(root: Path) -> list[Path]:
    """Return the source files of all distributions, without tests and templates."""
    folders = [root / "mithril-core" / "src", *sorted(root.glob("plugins/*/src"))]
    return [path for folder in folders for path in sorted(folder.rglob("*.py")) if "new_plugin" not in path.parts[:-1]]


def comments(text: str) -> tuple[int, int]:
    """Return the numbers of lines that are a comment of their own, without rulers of sections, and that end in one."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    lines = [token for token in tokens if token.type == tokenize.COMMENT and "----" not in token.string]
    separate = sum(token.line.lstrip().startswith("#") for token in lines)
    return separate, len(lines) - separate


def late_bindings(tree: ast.Module) -> set[str]:
    """Return the attributes of imported classes and modules that a file assigns when it is imported."""
    imports = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    imported = {alias.asname or alias.name for node in imports for alias in node.names}
    targets = [target for node in tree.body if isinstance(node, ast.Assign) for target in node.targets]
    attributes = [target.value if isinstance(target, ast.Subscript) else target for target in targets]
    return {ast.unparse(a) for a in attributes if isinstance(a, ast.Attribute) and ast.unparse(a.value) in imported}


def exports(tree: ast.Module) -> set[str]:
    """Return the names that the ``__init__`` of a package exports for code: its imports, or a table of homes."""
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mithril"):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, (ast.Assign, ast.AnnAssign)) and "HOMES" in ast.unparse(node).split("=")[0]:
            tables = [n for n in ast.walk(node) if isinstance(n, ast.Dict)]  # home -> names
            values = [(h, v) for table in tables for h, v in zip(table.keys, table.values, strict=True)]
            # `mithril docs` has a page for each layer.
            listed = [v for h, v in values if not (isinstance(h, ast.Constant) and str(h.value).startswith("layers"))]
            constants = [n for v in listed for n in ast.walk(v) if isinstance(n, ast.Constant)]
            strings = [n.value for n in constants if isinstance(n.value, str)]
            names |= {part for text in strings for part in text.split() if part.isidentifier()}
    return {name for name in names if not name.startswith("_")}


def words_of(tree: ast.AST) -> Iterator[str]:
    """Yield each name that a file imports or reads as an attribute."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Attribute):
            yield node.attr


def unused_exports(root: Path, trees: dict[Path, ast.Module]) -> tuple[int, int]:
    """Return how many names the packages of the core export, and how many no other package, plugin or page uses."""
    core = root / "mithril-core" / "src" / "mithril"
    users = {path: set(words_of(tree)) for path, tree in trees.items()}
    pages = "".join(path.read_text() for path in sorted(root.glob("docs/*.md")))
    face = (core / "__init__.py").read_text()
    total, unused = 0, 0
    for package in sorted(p.parent for p in core.glob("*/__init__.py")):
        names = exports(trees[package / "__init__.py"])
        foreign = set().union(*(words for path, words in users.items() if package not in path.parents))
        total += len(names)
        unused += sum(name not in foreign and name not in face and f"{name}" not in pages for name in names)
    return total, unused


def trace() -> Iterator[tuple[str, object]]:
    """Yield calls and files of one warm compilation of Linear-Relu-Linear on NumPy."""
    import mithril as ml
    from mithril.models import Linear, Model, Relu

    def compile_once() -> None:
        ml.compile(Model(Linear(8), Relu(), Linear(4)), "numpy", shapes={"input": [2, 3]})

    compile_once()
    calls: Counter[str] = Counter()

    def count(frame: object, event: str, _: object) -> None:
        if event == "call" and "mithril" in (name := frame.f_code.co_filename):  # type: ignore[attr-defined]
            calls[name] += 1

    sys.setprofile(count)
    try:
        compile_once()
    finally:
        sys.setprofile(None)
    yield "Python calls of a warm compile", sum(calls.values())
    yield "files of a warm compile", len(calls)


def measure(root: Path) -> Iterator[tuple[str, object]]:
    texts = {path: path.read_text() for path in sources(root)}
    trees = {path: ast.parse(text) for path, text in texts.items()}
    lines = {path: text.count("\n") for path, text in texts.items()}
    yield "source files", len(texts)
    yield "source lines", sum(lines.values())
    counts = {path: comments(text) for path, text in texts.items()}
    for n, name in enumerate(("lines that are comments", "lines that end in a comment")):
        yield name, f"{sum(count[n] for count in counts.values()) / sum(lines.values()):.1%}"
    one = {p for p, t in trees.items() if sum(isinstance(n, Definition) for n in t.body) <= 1}
    small = [p for p in one if lines[p] < 60 and p.name not in ("__init__.py", "__main__.py", "plugin.py")]
    yield "files of at most one definition below 60 lines", len(small)
    yield "of these in the core", sum("mithril-core" in path.parts for path in small)
    yield "late bindings", sum(len(late_bindings(tree)) for path, tree in trees.items() if "mithril-core" in path.parts)
    total, unused = unused_exports(root, trees)
    yield "names that packages of the core export", total
    yield "of these used by no other package", unused
    tracked = subprocess.run(["git", "ls-files"], cwd=root, capture_output=True, text=True, check=True).stdout.split()
    generated = [root / name for name in tracked if name.endswith(("coverage.json", ".pyi", "known.json"))]
    yield "lines of generated files", sum(path.read_text().count("\n") for path in generated if path.exists())
    benchmarks = sorted(root.glob("benchmarks/*.py"))
    yield "benchmarks", f"{len(benchmarks)} files, {sum(p.read_text().count(chr(10)) for p in benchmarks)} lines"
    yield "lines of CHANGELOG.md", (root / "CHANGELOG.md").read_text().count("\n")
    for folder in [root / "mithril-core", *sorted(root.glob("plugins/mithril-*"))]:
        files = [path for path in lines if folder in path.parents]
        total, share = sum(lines[path] for path in files), sum(sum(counts[path]) for path in files)
        yield f"lines of {folder.name}", f"{total}, {share / total:.1%} with a comment"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", action="store_true", help="also compile a model and count calls")
    parser.add_argument("checkout", nargs="?", type=Path, default=Path(__file__).resolve().parents[1])
    arguments = parser.parse_args()
    for name, value in [*measure(arguments.checkout.resolve()), *(trace() if arguments.trace else ())]:
        print(f"{name:50} {value}")


if __name__ == "__main__":
    main()
