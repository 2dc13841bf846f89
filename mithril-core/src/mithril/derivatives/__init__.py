"""Derivatives of every order and rows of a batch, each as a transformation of graphs.

Reverse mode gives a graph that computes the outputs and the gradients.
The forward nodes are unchanged (a ``scan`` additionally saves its residuals); backward nodes follow them, each with the
origin of its forward node and the tag ``phase="backward"``. New inputs of the role ``cotangent`` belong to the outputs,
new results of the role ``gradient`` to the inputs. If a name is in use, as in gradients of gradients, the gradient name
of that name is tried.
"""

from mithril.derivatives import regions  # noqa: F401  (enters the gradients of control flow and of bodies)
from mithril.graph.lazy_exports import lazy_exports

HOMES = {
    "framework_gradients": ("operation_gradient", "require_framework_gradients", "with_marked_surrogates"),
    "function_derivatives": (
        *("grad_function", "hessian_function", "hvp_function", "jacobian_function", "jvp_function", "vjp_function"),
    ),
    "gradient_graph": ("gradients", "value_and_gradients"),
    "graph_derivatives": (
        *("grad_graph", "hessian_graph", "hvp_graph", "jacobian_graph", "jvp_graph", "tangent_name", "vjp_graph"),
    ),
    "reverse": ("live_nodes", "zeros"),
    "vmap": ("same_rows", "vmap_function", "vmap_graph"),
}
__all__, __getattr__, __dir__ = lazy_exports(__name__, HOMES)
