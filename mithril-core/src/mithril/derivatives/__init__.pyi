"""Derivatives of every order and rows of a batch, each as a transformation of graphs.

Reverse mode gives a graph that computes the outputs and the gradients.
The forward nodes are unchanged (a ``scan`` additionally saves its residuals); backward nodes follow them, each with the
origin of its forward node and the tag ``phase="backward"``. New inputs of the role ``cotangent`` belong to the outputs,
new results of the role ``gradient`` to the inputs. If a name is in use, as in gradients of gradients, the gradient name
of that name is tried."""

from mithril.derivatives.framework_gradients import (
    operation_gradient as operation_gradient,
    require_framework_gradients as require_framework_gradients,
    with_marked_surrogates as with_marked_surrogates,
)
from mithril.derivatives.function_derivatives import (
    grad_function as grad_function,
    hessian_function as hessian_function,
    hvp_function as hvp_function,
    jacobian_function as jacobian_function,
    jvp_function as jvp_function,
    vjp_function as vjp_function,
)
from mithril.derivatives.gradient_graph import (
    gradients as gradients,
    value_and_gradients as value_and_gradients,
)
from mithril.derivatives.graph_derivatives import (
    grad_graph as grad_graph,
    hessian_graph as hessian_graph,
    hvp_graph as hvp_graph,
    jacobian_graph as jacobian_graph,
    jvp_graph as jvp_graph,
    tangent_name as tangent_name,
    vjp_graph as vjp_graph,
)
from mithril.derivatives.reverse import (
    live_nodes as live_nodes,
    zeros as zeros,
)
from mithril.derivatives.vmap import (
    same_rows as same_rows,
    vmap_function as vmap_function,
    vmap_graph as vmap_graph,
)
