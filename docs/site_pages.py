"""Writes the sources of the site: guides, how-to pages, reference, notebooks, benchmarks, and its navigation.

``python docs/site_pages.py`` fills build/pages and build/mkdocs.yml; ``mkdocs build -f build/mkdocs.yml`` writes HTML.
Pages that are written by hand are copied with their links adapted; the others are computed from the declarations.
"""

from __future__ import annotations

import json
import re
import shutil
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from notebooks import markdown_of, stored

DOCS = Path(__file__).parent
PROJECT = DOCS.parent

GUIDES = ("recipes", "migrating", "compiling", "optimizing", "training", "data", "derivatives", "deploying", "models")
GUIDES += ("mathematics", "looking", "trust", "mlx-utilities")
TUTORIALS = ("image-classifier", "language-model", "porting-pytorch", "browser", "microcontroller")
TUTORIALS += ("laptop-to-many-devices", "a-pass", "a-backend")
PLACED = {*GUIDES, "start", "gallery", "writing-plugins", "plugins", "operations", "architecture", "benchmarks"}
PLACED |= {"semantics", "errors", "options", "cli"}  # every other page of the folder is a guide
REFERENCE = {  # kind -> folder of its pages; the other kinds are one page each, with a section for each name
    "operation": "operations",
    "layer": "layers",
    "class": "names",
    "name": "plugin-names",
}
ONE_PAGE = {"option": "options", "pass": "passes", "hook": "hooks", "error": "errors"}
# Weights of pages in the search, by the beginning of their place: guides come before the reference, decisions last.
GUIDE_WEIGHT = 4
WEIGHTS = {"decisions/": 0.05, "changelog": 0.1, "contributing": 0.2, "how-to/": 0.3, "reference/": 1, "examples/": 0.5}
WEIGHTS |= {
    "distributions/": 1,
    "gallery": 0.5,
    "notebooks/": 2,
    "recipes": 12,
    "tutorials/": 2,
    "start": 6,
    "errors": 6,
    "options": 6,
    "optimizing": 6,
}
Nav = list[Any]


def write(pages: Path) -> Nav:
    """Write the sources of the site to a folder and return its navigation."""
    site = Site(pages)
    for name in ("site.css", "iframe-worker.js"):
        site.copy(DOCS / name, name)
    for path in sorted((DOCS / "pictures").glob("*")):
        site.copy(path, f"pictures/{path.name}")
    remaining = sorted(path.stem for path in DOCS.glob("*.md") if path.stem not in PLACED)
    return [
        {"Start": [site.page(PROJECT / "README.md", "index.md"), site.guide("start"), site.guide("gallery")]},
        {"Tutorials": [site.guide(f"tutorials/{name}") for name in TUTORIALS]},
        {"Guides": [*(site.guide(name) for name in (*GUIDES, *remaining)), *site.notebooks(), site.distributions()]},
        {"Plugins": [site.guide("writing-plugins"), site.guide("plugins"), site.guide("operations"), *site.how_to()]},
        {"Reference": site.reference()},
        {
            "Project": [
                site.guide("architecture"),
                site.guide("benchmarks"),
                {"Decisions": site.decisions()},
                site.page(PROJECT / "CONTRIBUTING.md", "contributing.md"),
                site.page(PROJECT / "CHANGELOG.md", "changelog.md"),
            ]
        },
    ]


class Site:
    """The folder of the pages, with the place of every file of the repository that became a page."""

    def __init__(self, pages: Path) -> None:
        self.pages = pages
        self.places = self._places()

    def _places(self) -> dict[Path, str]:
        """Return the page of the site for each page of the repository."""
        places = {PROJECT / "README.md": "index.md", PROJECT / "CONTRIBUTING.md": "contributing.md"}
        places |= {PROJECT / "CHANGELOG.md": "changelog.md"}
        places |= {path: path.name for path in DOCS.glob("*.md")}
        places |= {path: f"tutorials/{path.name}" for path in DOCS.glob("tutorials/*.md")}
        places |= {path: f"decisions/{path.name}" for path in (DOCS / "decisions").glob("*.md")}
        places[DOCS / "decisions/README.md"] = "decisions/index.md"
        for path in PROJECT.glob("plugins/*/README.md"):
            places[path] = f"distributions/{path.parent.name}.md"
        for path in PROJECT.glob("examples/*/README.md"):
            places[path] = f"examples/{path.parent.name}.md"
        places |= {path: f"notebooks/{path.stem}.md" for path in PROJECT.glob("examples/notebooks/*.ipynb")}
        return places

    # -- pages written by hand ---------------------------------------------------------------------------------------
    def copy(self, path: Path, place: str) -> None:
        """Copy a file that is not a page."""
        (self.pages / place).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, self.pages / place)

    def put(self, place: str, text: str) -> str:
        """Write a page and return its place."""
        path = self.pages / place
        path.parent.mkdir(parents=True, exist_ok=True)
        boost = next((weight for start, weight in WEIGHTS.items() if place.startswith(start)), GUIDE_WEIGHT)
        path.write_text(f"---\nsearch:\n  boost: {boost}\n---\n\n{_table_bars(text)}", encoding="utf-8")
        return place

    def page(self, path: Path, place: str) -> str:
        """Copy a page of the repository; its links lead to pages of the site, or are plain text."""
        return self.put(place, self._adapted(path.read_text(encoding="utf-8"), path, place))

    def _adapted(self, text: str, path: Path, place: str) -> str:
        text = re.sub(r"<!--.*?-->\n?", "", text)
        blocks = re.split(r"(^```.*?^```$)", text, flags=re.S | re.M)
        return "".join(b if b.startswith("```") else self._with_links(b, path, place) for b in blocks)

    def guide(self, name: str) -> str:
        """Copy a page of the folder docs."""
        return self.page(DOCS / f"{name}.md", f"{name}.md")

    def _with_links(self, text: str, path: Path, place: str) -> str:
        def link(match: re.Match[str]) -> str:
            label, target, anchor = match[1], match[2], match[3] or ""
            if "://" in target or not target:
                return match[0]
            file = (path.parent / target).resolve()
            file = file / "README.md" if file.is_dir() else file
            if file.suffix in (".svg", ".png"):
                shown = f"pictures/{file.name}"
                if not (self.pages / shown).exists():
                    self.copy(file, shown)
                return f"[{label}]({_relative(shown, place)}{anchor})"
            if file not in self.places:
                return label if file.exists() else match[0]  # the site shows no source files
            return f"[{label}]({_relative(self.places[file], place)}{anchor})"

        return re.sub(r"\[([^\]]*(?:\[[^\]]*\][^\]]*)*)\]\(([^)#\s]*)(#[^)\s]*)?\)", link, text)

    def decisions(self) -> list[str]:
        """Copy the pages on decisions, their index first."""
        names = sorted(path for path in self.places if path.parent.name == "decisions" and path.name != "README.md")
        return [self.page(path, self.places[path]) for path in [DOCS / "decisions/README.md", *names]]

    def distributions(self) -> dict[str, list[str]]:
        """Copy the README of each distribution, and of the examples of plugins."""
        selected = [path for path, place in self.places.items() if place.startswith(("distributions/", "examples/"))]
        return {"Distributions": [self.page(path, self.places[path]) for path in sorted(selected)]}

    def notebooks(self) -> Nav:
        """Write the notebooks with their stored outputs."""
        pages = []
        for path in sorted(PROJECT.glob("examples/notebooks/*.ipynb")):
            place = self.places[path]
            pages.append(self.put(place, self._adapted(markdown_of(stored(path)), path, place)))
        return [{"Notebooks": pages}] if pages else []

    # -- pages computed from declarations ------------------------------------------------------------------------------
    def how_to(self) -> Nav:
        """Write a page for each kind of plugin: the complete distribution that ``mithril new-plugin`` writes."""
        from mithril_tools.cli import new_plugin

        pages = []
        for kind in sorted(new_plugin.KINDS):
            files = new_plugin.render(kind, new_plugin.facts(kind, "shiny"))
            parts = [_file(name, text) for name, text in sorted(files.items(), key=_order) if text.strip()]
            lines = sum(len(text.splitlines()) for name, text in files.items() if name.endswith(".py"))
            head = (
                f"# How to write a plugin: {kind}\n\n`mithril new-plugin {kind} shiny` writes this distribution: "
                f"{lines} lines of Python, tests included.\n\n```\nmithril new-plugin {kind} shiny\n"
                "pip install -e ./mithril-shiny\npytest mithril-shiny\n```\n\n[Hooks](../reference/hooks.md) lists the "
                "arguments of every hook, [writing plugins](../writing-plugins.md) builds one step by step.\n\n"
            )
            pages.append({kind: self.put(f"how-to/{kind}.md", head + "\n\n".join(parts) + "\n")})
        return [{"How-to by kind": pages}]

    def reference(self) -> Nav:
        """Write the reference."""
        from mithril_tools.reference import KINDS, pages

        nav: Nav = [self._reference_index()]
        for kind, folder in REFERENCE.items():
            entries = pages(kind)
            for page in entries.values():
                self.put(f"reference/{folder}/{page.name}.md", page.text())
            groups: dict[str, list[Any]] = defaultdict(list)
            for page in entries.values():
                groups[page.group].append(page)
            index = [f"# {KINDS[kind][0]}\n"]
            for group, members in sorted(groups.items()):
                index.append(f"## {group[:1].upper()}{group[1:]}\n\n| name | meaning |\n|---|---|")
                index += [f"| [`{p.name}`]({p.name}.md) | {_cell(p.summary)} |" for p in members]
                index.append("")
            self.put(f"reference/{folder}/index.md", "\n".join(index))
            by_group = [
                {f"{group[:1].upper()}{group[1:]}": [f"reference/{folder}/{p.name}.md" for p in members]}
                for group, members in sorted(groups.items())
            ]
            nav.append({KINDS[kind][0]: [f"reference/{folder}/index.md", *by_group]})
        for kind, name in ONE_PAGE.items():
            parts = [f"# {KINDS[kind][0]}"]
            for page in pages(kind).values():
                body = re.sub(r"^## ", "### ", page.text(), flags=re.M)
                parts.append(re.sub(r"^# ", "## ", body, count=1))
            nav.append(self.put(f"reference/{name}.md", "\n\n".join(parts)))
        return [
            *nav,
            self.guide("semantics"),
            self.guide("errors"),
            self.guide("cli"),
            {"Options by owner": self.guide("options")},
        ]

    def _reference_index(self) -> str:
        from mithril_tools.reference import KINDS, pages

        text = ["# Reference\n", "Every page is computed from the declarations of the installed distributions.\n"]
        for kind, (title, _) in KINDS.items():
            if kind not in REFERENCE and kind not in ONE_PAGE:
                continue  # commands and guides have pages of their own
            entries = pages(kind)
            folder = REFERENCE.get(kind)
            home = f"{folder}/index.md" if folder else f"{ONE_PAGE[kind]}.md"
            text.append(f"## [{title}]({home})\n\n{len(entries)} pages.\n\n<div class=names markdown>\n")
            for page in entries.values():
                target = f"{folder}/{page.name}.md" if folder else f"{ONE_PAGE[kind]}.md#{_anchor(page.name)}"
                text.append(f"* [{page.name}]({target})")
            text.append("\n</div>\n")
        return self.put("reference/index.md", "\n".join(text))


def _table_bars(text: str) -> str:
    """Remove the escapes of bars within code in tables: GitHub requires them, Python-Markdown shows them."""

    def line(match: re.Match[str]) -> str:
        return re.sub(r"`[^`]*`", lambda code: code[0].replace("\\|", "|"), match[0])

    return re.sub(r"^\|.*$", line, text, flags=re.M)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _relative(target: str, place: str) -> str:
    return "../" * place.count("/") + target


def _anchor(name: str) -> str:
    return re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", name).strip().lower())


def _order(item: tuple[str, str]) -> tuple[bool, bool, str]:
    """Sort files of a plugin: the project file, the package, then its tests."""
    name = item[0]
    return (name != "pyproject.toml", name.startswith("tests"), name)


def _file(name: str, text: str) -> str:
    language = {"py": "python", "toml": "toml", "md": "markdown"}.get(name.rpartition(".")[2], "")
    return f"## `{name}`\n\n````{language}\n{text.rstrip()}\n````"


def sections_of(nav: Iterable[Any]) -> Iterable[str]:
    """Yield the pages of a navigation in order."""
    for entry in nav:
        if isinstance(entry, Mapping):
            for value in entry.values():
                yield from sections_of([value] if isinstance(value, str) else value)
        else:
            yield entry


if __name__ == "__main__":
    build = PROJECT / "build"
    shutil.rmtree(build / "pages", ignore_errors=True)
    nav = write(build / "pages")
    settings = {"INHERIT": "../docs/mkdocs.yml", "docs_dir": "pages", "site_dir": "site", "nav": nav}
    (build / "mkdocs.yml").write_text(json.dumps(settings, indent=1), encoding="utf-8")
    print(f"{sum(1 for _ in sections_of(nav))} pages in {build / 'pages'}")
