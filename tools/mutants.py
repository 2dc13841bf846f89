"""Change one line at a time and list the changes that no test notices.

``python tools/mutants.py FILES [--sample N] [--seed S]`` runs, for each change of a file, the tests that mirror it:
``src/PACKAGE/a/b.py`` is mirrored by ``tests/a/test_b*.py`` or ``tests/test_b*.py``; ``mutants.toml`` names the tests
of the other files, and the changes that have no effect. The sources are copied; the checkout is only read.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PRELOADED = ("pytest", "_pytest.assertion", "hypothesis", "numpy")  # once, before the forks: half of a short run
OPTIONS = ("-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-W", "ignore::pytest.PytestAssertRewriteWarning")
ALLOWED = 4.0  # a change may take this multiple of the clean run, and SLACK seconds
SLACK = 10.0
COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
ARITHMETIC = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult}
REMOVED = (ast.Raise, ast.AugAssign, ast.Continue, ast.Break, ast.Delete)


class Mutation(NamedTuple):
    """One change: its line, the text before and after, and the changed source."""

    line: int
    before: str
    after: str
    source: bytes

    @property
    def label(self) -> str:
        return f"{self.before} -> {self.after}"


def changed(node: ast.AST) -> Iterator[str]:
    """Yield the replacements of one node."""
    match node:
        case ast.Constant(value=bool() as value):
            yield str(not value)
        case ast.Constant(value=int() | float() as value):
            yield f"({value} + 1)"
        case ast.Compare(ops=[kind, *rest]) if type(kind) in COMPARISONS:
            yield f"({ast.unparse(ast.Compare(node.left, [COMPARISONS[type(kind)](), *rest], node.comparators))})"
        case ast.BoolOp(op=kind):
            other = ast.Or() if isinstance(kind, ast.And) else ast.And()
            yield f"({ast.unparse(ast.BoolOp(other, node.values))})"
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield f"({ast.unparse(operand)})"
        case ast.BinOp(op=kind) if type(kind) in ARITHMETIC:
            yield f"({ast.unparse(ast.BinOp(node.left, ARITHMETIC[type(kind)](), node.right))})"
        case ast.Expr(value=ast.Call()) | ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield "pass"
        case ast.Return(value=value) if value is not None and not isinstance(value, ast.Constant):
            yield "return None"
        case _ if isinstance(node, REMOVED):
            yield "pass"


def nodes(tree: ast.AST) -> Iterator[tuple[ast.AST, bool]]:
    """Yield the nodes that run, each with whether it is a condition."""
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns", "type_params") or isinstance(tree, ast.JoinedStr):
            continue  # Python 3.11 gives the parts of an f-string wrong places
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or (
                isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
            ):
                continue
            if isinstance(child, ast.keyword) and child.arg == "strict":
                continue  # of `zip`: an assertion, as those of `assert`, which no test can reach
            yield child, name == "test" and isinstance(tree, ast.If | ast.IfExp | ast.While)
            yield from nodes(child)


def mutations(source: bytes) -> list[Mutation]:
    """Return every change of a source that is still Python."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    all_mutations = []
    for node, condition in nodes(ast.parse(source)):
        replacements = list(changed(node))
        if condition and not replacements:
            replacements.append(f"(not ({ast.unparse(node)}))")
        for after in replacements:
            first = starts[node.lineno - 1] + node.col_offset
            last = starts[node.end_lineno - 1] + node.end_col_offset
            padding = "\n" * (node.end_lineno - node.lineno) if not after.startswith("(") else ""
            text = source[:first] + after.encode() + padding.encode() + source[last:]
            with contextlib.suppress(SyntaxError, ValueError):
                compile(text, "changed", "exec")
                before = " ".join(source[first:last].decode().split())
                all_mutations.append(Mutation(node.lineno, before, "removed" if after == "pass" else after, text))
    return all_mutations


def distribution_of(file: Path) -> Path:
    return next(parent.parent for parent in file.parents if parent.name == "src")


def mirrors(file: Path, table: dict[str, list[str]]) -> list[str]:
    """Return the tests of a file: those of the table, or those that bear its name."""
    distribution = distribution_of(file)
    for name, tests in table.items():
        if file.is_relative_to(Path(name).resolve()):
            return tests
    folder = file.relative_to(distribution / "src").parent.parts[1:]
    places = [distribution.joinpath("tests", *folder), distribution / "tests"]
    for place in places:
        if mirroring := sorted(place.glob(f"test_{file.stem}*.py")):
            return [str(test) for test in mirroring]
    sys.exit(f"no test mirrors {file}: name its tests in tools/mutants.toml")


def run(tests: list[str], overlay: Path, limit: float | None) -> str:
    """Run the tests in a fork that imports from the overlay; return how that ended."""
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        os.setsid()
        sys.path.insert(0, str(overlay))
        os.environ["PYTHONPATH"] = os.pathsep.join([str(overlay), os.environ.get("PYTHONPATH", "")])
        os.environ["MITHRIL_CACHE_DIR"] = os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = str(overlay.parent / "cache")
        quiet = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2) if limit is not None else ():  # a clean run that fails says why
            os.dup2(quiet, stream)
        try:
            status = int(sys.modules["pytest"].main([*OPTIONS, *tests]))
            sys.stdout.flush()  # which the exit of a fork does not do
            os._exit(status)
        finally:
            os._exit(1)
    while os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if limit is not None and time.monotonic() - began > limit:
            os.killpg(child, signal.SIGKILL)
        time.sleep(0.02)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    shutil.rmtree(overlay.parent / "cache", ignore_errors=True)  # a changed compiler may have written wrong programs
    return {0: "survived", -signal.SIGKILL: "time"}.get(status, "killed")


def survivors(file: Path, settings: argparse.Namespace, table: dict[str, dict]) -> int:
    """Try the changes of one file; print and count those that survive."""
    distribution = distribution_of(file)
    tests = settings.tests or mirrors(file, table.get("tests", {}))
    equivalent = next((v for k, v in table.get("equivalent", {}).items() if Path(k).resolve() == file), {})
    selected = [mutation for mutation in mutations(file.read_bytes()) if mutation.label not in equivalent]
    count = len(selected)
    if settings.sample is not None and settings.sample < count:
        selected = random.Random(settings.seed).sample(selected, settings.sample)
    with tempfile.TemporaryDirectory() as folder:
        sources, overlay = distribution / "src", Path(folder) / distribution.name / "src"
        shutil.copytree(sources, overlay, ignore=shutil.ignore_patterns("__pycache__"))
        for other in {*distribution.parent.iterdir()} - {distribution}:  # data files of the clone
            Path(folder, other.name).symlink_to(other)
        copy = overlay / file.relative_to(sources)
        outcomes, began = [], time.monotonic()
        if run(tests, overlay, None) != "survived":
            sys.exit(f"the tests of {file} fail without a change: {' '.join(tests)}")
        limit = ALLOWED * (time.monotonic() - began) + SLACK
        for mutation in sorted(selected):
            for stale in copy.parent.glob(f"__pycache__/{copy.stem}.*"):
                stale.unlink()  # its time and size may be those of the changed source
            copy.write_bytes(mutation.source)
            outcomes.append(run(tests, overlay, limit))
            if outcomes[-1] == "survived" or settings.verbose:
                print(f"{file}:{mutation.line}: {outcomes[-1]}: {mutation.label}", flush=True)
    alive, late = outcomes.count("survived"), outcomes.count("time")
    print(f"{file}: {len(selected)} of {count} changes, {alive} survive, {late} end by the limit")
    return alive


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--sample", type=int, help="try this many changes of each file")
    parser.add_argument("--seed", type=int, default=0, help="draws the sample")
    parser.add_argument("--tests", nargs="*", help="run these tests instead of the mirrors")
    parser.add_argument("--verbose", action="store_true", help="print the changes that tests notice, too")
    settings = parser.parse_args()
    for name in PRELOADED:
        importlib.import_module(name)
    table = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
    return min(1, sum(survivors(file.resolve(), settings, table) for file in settings.files))


if __name__ == "__main__":
    sys.exit(main())
