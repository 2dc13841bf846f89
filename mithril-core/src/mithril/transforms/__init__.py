"""Transformations of graphs that give graphs: rows of a batch, and derivatives of every order."""

from mithril.base.lazy_exports import lazy_exports

HOMES = {
    "derivatives": (
        *("grad_graph", "hessian_graph", "hvp_graph", "jacobian_graph", "jvp_graph", "tangent_name", "vjp_graph"),
    ),
    "function_derivatives": (
        *("grad_function", "hessian_function", "hvp_function", "jacobian_function", "jvp_function", "vjp_function"),
    ),
    "vmap": ("same_rows", "vmap_function", "vmap_graph"),
}
__all__, __getattr__, __dir__ = lazy_exports(__name__, HOMES)
