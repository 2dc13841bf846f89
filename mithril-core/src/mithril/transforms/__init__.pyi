"""Transformations of graphs that give graphs: rows of a batch, and derivatives of every order."""

from mithril.transforms.vmap import (
    same_rows as same_rows,
    vmap_function as vmap_function,
    vmap_graph as vmap_graph,
)
