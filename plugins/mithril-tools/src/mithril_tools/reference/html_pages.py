"""The reference as HTML files for a browser: one folder, written from the same Markdown as the site."""

from __future__ import annotations

import re
from html import escape
from pathlib import Path
from urllib.parse import quote

from markdown_it import MarkdownIt

from mithril import __version__
from mithril.system import Store, files
from mithril_tools.reference.catalog import KINDS, pages
from mithril_tools.reference.page import Page

STYLE = """
:root { color-scheme: light dark; --ink: light-dark(#1d2330, #dfe3ea); --line: light-dark(#dfe3ea, #394150);
  --code: light-dark(#f5f6f9, #232a36); --paper: light-dark(#fff, #171c25); --link: light-dark(#3f51b5, #9fa8da) }
body { font: 16px/1.55 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 0 auto;
  max-width: 52rem; padding: 1.5rem 1rem 4rem }
a { color: var(--link); text-decoration: none } a:hover { text-decoration: underline }
pre, code { font: .875em/1.45 ui-monospace, monospace; background: var(--code); border-radius: 4px }
code { padding: .1em .3em } pre { padding: .7em .9em; overflow-x: auto } pre code { padding: 0 }
table { border-collapse: collapse; display: block; overflow-x: auto } td, th { border-bottom: 1px solid var(--line);
  padding: .3em .8em .3em 0; text-align: left; vertical-align: top }
input { font: inherit; width: 100%; box-sizing: border-box; padding: .4em .6em; border: 1px solid var(--line);
  border-radius: 4px; background: var(--paper); color: var(--ink) }
li.absent { display: none } ul.names { columns: 14rem; padding-left: 1.2em }
"""
FILTER = """
const box = document.querySelector("input"), items = [...document.querySelectorAll("ul.names li")];
const matches = item => item.textContent.toLowerCase().includes(box.value.toLowerCase());
box.oninput = () => items.forEach(item => item.classList.toggle("absent", !matches(item)));
box.focus();
"""


def address(page: Page) -> str:
    """Return the path of a page below the folder; names that differ only in case are in different folders."""
    return f"{page.kind}/{page.name.replace(' ', '-')}.html"


def write(folder: Path | None = None) -> Path:
    """Write all pages and their index to a folder, by default in the user's cache, and return the index."""
    folder = folder or Store().folder / "docs" / __version__
    markdown = MarkdownIt("commonmark").enable("table")
    for kind in KINDS:
        for page in pages(kind).values():
            body = markdown.render(_links(page))
            files.write(
                folder / address(page), _document(page.name, f'<p><a href="../index.html">mithril</a></p>{body}')
            )
    sections = [f"<h2>{title}</h2><ul class=names>{_names(kind)}</ul>" for kind, (title, _) in KINDS.items()]
    body = (
        f"<h1>mithril {__version__}</h1><input placeholder='Find a name'>{''.join(sections)}<script>{FILTER}</script>"
    )
    return files.write(folder / "index.html", _document("Reference", body))


def _names(kind: str) -> str:
    rows = [(quote(address(p)), escape(p.name), escape(p.summary, quote=True)) for p in pages(kind).values()]
    return "".join(f'<li><a href="{url}" title="{summary}">{name}</a></li>' for url, name, summary in rows)


def _links(page: Page) -> str:
    """Return the text of a page with links to these files; a link that leads elsewhere becomes its name."""

    def link(match: re.Match[str]) -> str:
        label, target = match[1], match[2].partition("#")[0]
        folder, _, name = target.removesuffix(".md").rpartition("/")
        kind = next((k for k in KINDS if f"{k}s" == folder.rpartition("/")[2]), "guide")
        target_page = pages(kind).get(name)
        return f"[{label}](../{address(target_page)})" if target_page else label

    return re.sub(r"\[([^\]]+)\]\((?!https?:)([^)]*)\)", link, page.text())


def _document(title: str, body: str) -> str:
    return (
        f"<!doctype html><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        f"<title>{escape(title)} - mithril</title><style>{STYLE}</style>{body}\n"
    )
