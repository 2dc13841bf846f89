"""Writes the reference parts of pages from the code; ``--check`` only compares.

Each page keeps its hand-written beginning, up to the line that marks where the reference starts.
"""

from __future__ import annotations

import json
import runpy
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from mithril_tools.reference import entries

DOCS = Path(__file__).parent
MARK = "<!-- from here on written by docs/render.py -->"


def hooks() -> str:
    """Render every hook with its signature, purpose and example; then the descriptors."""
    from mithril.plugins import HOOKS, specs

    parts = [f"## `{name}`\n\n{entries.hook_text(name)}" for name in HOOKS]
    parts.append("## Descriptors\n\nAll are importable from `mithril`.")
    for name in entries.DESCRIPTORS:
        parts.append(f"### `{name}`\n\n```python\n{entries.declaration(getattr(specs, name))}\n```")
    return "\n\n".join([*parts, bad_plugins()])


def bad_plugins() -> str:
    """Render a table of the kinds of bad plugins that the tests install, with their outcome."""
    kinds = runpy.run_path(str(DOCS.parent / "mithril-core/tests/plugins/bad_plugins.py"))
    rows = [f"| {bad.what} | {kinds['OUTCOMES'][bad.outcome]} |" for bad in kinds["BAD"]]
    text = (
        f"The outcome of a compilation next to a plugin with one of {len(rows)} mistakes; the tests try each.\n"
        "A decision warns once per process, and `strict=True` refuses it. An unknown field is a warning alone."
    )
    return "\n".join(["## Outcomes of bad plugins", "", text, "", "| a plugin that | outcome |", "|---|---|", *rows])


def commands() -> str:
    """Render the help text of each command of mithril's own distributions."""
    from mithril import plugins
    from mithril_tools import cli

    names = {*cli.COMMANDS, *(name for name, e in plugins.commands().items() if e.plugin.first_party)}
    return "\n\n".join(f"## `mithril {n}`\n\n```\n{entries.command_help(n)}\n```" for n in sorted(names))


def options() -> str:
    """Render a table of options per installed owner."""
    from mithril.compiler import option_rows

    owners: dict[str, list[str]] = {}
    for row in option_rows():
        default = row["default"].replace("|", "\\|")
        aliases = f" Also: {', '.join(f'`{alias}`' for alias in row['aliases'])}." if row["aliases"] else ""
        line = f"| `{row['name']}` | {row['type']} | `{default}` | {entries.with_example(row)}{aliases} |"
        owners.setdefault(row["owner"], []).append(line)
    head = "| option | accepts | default | meaning |\n|---|---|---|---|\n"
    ordered = sorted(owners, key=lambda owner: (owner != "mithril-core", owner))
    return "\n\n".join(f"## {owner}\n\n{head}" + "\n".join(owners[owner]) for owner in ordered)


def versions() -> str:
    """Render the versions of frameworks that the kit was run with, from ``versions.json``."""
    rows = [
        "| framework | version | passed | failed | repaired | skipped | admitted |",
        "|---|---|---|---|---|---|---|",
    ]
    declared = {requirement.name: requirement.specifier for requirement in requirements()}
    for name, records in json.loads((DOCS / "versions.json").read_text()).items():
        for version, counts in sorted(records.items(), key=lambda item: Version(item[0])):
            figures = [str(counts.get(word, 0)) for word in ("passed", "failed", "repaired", "skipped")]
            figures = [counts["error"], "", "", ""] if "error" in counts else figures
            admitted = "yes" if version in declared[name] else "no"
            rows.append(f"| {name} | {version} | {' | '.join(figures)} | {admitted} |")
    return "\n".join(rows)


def requirements() -> list[Requirement]:
    """Return the requirements that the distributions declare."""
    files = sorted(DOCS.parent.glob("plugins/*/pyproject.toml"))
    projects = [tomllib.loads(path.read_text())["project"] for path in files]
    return [Requirement(text) for project in projects for text in project["dependencies"]]


PAGES = {"plugins.md": hooks, "cli.md": commands, "options.md": options, "versions.md": versions}


def page(name: str) -> tuple[Path, str, str]:
    """Return the path of a page, its current text, and its generated text."""
    path = DOCS / name
    text = path.read_text()
    begin, mark, _ = text.partition(MARK)
    if not mark:
        raise SystemExit(f"{path} lacks the line {MARK}")
    return path, text, f"{begin}{MARK}\n\n{PAGES[name]()}\n"


def architecture() -> tuple[Path, str, str]:
    """Return path, present text and expected text of the page with the drawing of the packages."""
    from drawing import drawing

    path, begin, end = DOCS / "architecture.md", "<!-- drawn by docs/drawing.py -->", "<!-- end of the drawing -->"
    text = path.read_text()
    before, _, rest = text.partition(begin)
    return path, text, f"{before}{begin}\n{drawing()}\n{end}{rest.partition(end)[2]}"


def main() -> int:
    stale = []
    pages = {**{name: page(name) for name in PAGES}, "architecture.md": architecture()}
    for name, (path, text, expected) in pages.items():
        if text != expected:
            stale.append(name)
            if "--check" not in sys.argv:
                path.write_text(expected)
    if stale:
        print(("stale: " if "--check" in sys.argv else "written: ") + ", ".join(stale))
    return 1 if stale and "--check" in sys.argv else 0


if __name__ == "__main__":
    raise SystemExit(main())
