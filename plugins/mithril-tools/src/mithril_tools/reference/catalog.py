"""All pages by kind and name, and the search for a page."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

from mithril import plugins
from mithril.graph import LAYERS, OPERATIONS, PACKAGE, closest, expression_here, name_here
from mithril_tools.reference.author_names import author_pages, module_pages
from mithril_tools.reference.entries import class_pages, command_pages, hook_pages, option_pages, pass_pages
from mithril_tools.reference.error_pages import error_pages
from mithril_tools.reference.guides import guide_pages
from mithril_tools.reference.layers import layer_pages
from mithril_tools.reference.operations import operation_pages
from mithril_tools.reference.page import Page

# Kind -> the title of its index, and its pages.
KINDS: dict[str, tuple[str, Callable[[], Iterator[Page]]]] = {
    "operation": ("Operations", operation_pages),
    "layer": ("Layers", layer_pages),
    "class": ("Public names", class_pages),
    "name": ("Names for plugins", author_pages),
    "module": ("Modules for plugins", module_pages),
    "option": ("Options", option_pages),
    "pass": ("Passes", pass_pages),
    "hook": ("Hooks", hook_pages),
    "error": ("Errors", error_pages),
    "command": ("Commands", command_pages),
    "guide": ("Guides", guide_pages),
}
PREFIXES = (
    *("ml", "mithril", "graph", "ops", "passes", "plugins", "system", "backend", "derivatives", "compiler", "models"),
    "mithril_testing",
)


@cache
def pages(kind: str) -> dict[str, Page]:
    """Return the pages of a kind by name."""
    return {page.name: page for page in KINDS[kind][1]()}


def find(name: str) -> list[Page]:
    """Return the pages with this name, written ``softmax``, ``ml.ops.softmax`` or ``SOFTMAX``; empty if none has it.

    A pass is also found by its aliases and groups, a module without its package, a command without ``mithril``.
    """
    short = name.removesuffix(".md")
    while short.partition(".")[0] in PREFIXES and "." in short:
        short = short.partition(".")[2]
    groups = [n for n, entry in plugins.passes().items() if short in entry.spec.groups]
    names = {f"mithril.{short}", f"mithril {short}", plugins.pass_aliases().get(short, short), *groups}
    everything = [page for kind in KINDS for page in pages(kind).values()]
    key = short.lower().replace("_", "-")
    return (
        [page for page in everything if page.name == short]
        or [page for page in everything if page.name in names]
        or [page for page in everything if page.name.lower().replace("_", "-") == key]
    )


def suggestions(name: str) -> list[str]:
    """Return the names of pages for a name that has none: its translation from another framework, or similar names."""
    short = name.rpartition(".")[2]
    elsewhere = [name_here(short, table) for table in (OPERATIONS, LAYERS)] + [
        PACKAGE.get(short),
        expression_here(short),
    ]
    return list(filter(None, elsewhere)) or closest(
        name, {page.name for kind in KINDS for page in pages(kind).values()}
    )
