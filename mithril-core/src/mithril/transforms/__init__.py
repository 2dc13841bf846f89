"""Transformations of graphs that give graphs: rows of a batch, and derivatives of every order."""

from mithril.base.lazy_exports import lazy_exports

HOMES = {
    "vmap": ("same_rows", "vmap_function", "vmap_graph"),
}
__all__, __getattr__, __dir__ = lazy_exports(__name__, HOMES)
