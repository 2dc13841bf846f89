"""Gradients: reverse mode, from a graph to a graph that computes the outputs and the gradients.

The forward nodes are unchanged (a ``scan`` additionally saves its residuals); backward nodes follow them, each with the
origin of its forward node and the tag ``phase="backward"``. New inputs of the role ``cotangent`` belong to the outputs,
new results of the role ``gradient`` to the inputs. If a name is in use, as in gradients of gradients, the gradient name
of that name is tried.
"""

from mithril.autodiff import derived, regions  # noqa: F401  (enter the gradients of control flow and of bodies)
from mithril.base.lazy_exports import lazy_exports

HOMES = {
    "gradient_graph": ("gradients", "value_and_gradients"),
    "framework_gradients": ("operation_gradient", "require_framework_gradients", "with_marked_surrogates"),
    "reverse": ("live_nodes", "zeros"),
}
__all__, __getattr__, __dir__ = lazy_exports(__name__, HOMES)
