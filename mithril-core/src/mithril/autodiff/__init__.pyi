"""Gradients: reverse mode, from a graph to a graph that computes the outputs and the gradients.

The forward nodes are unchanged (a ``scan`` additionally saves its residuals); backward nodes follow them, each with the
origin of its forward node and the tag ``phase="backward"``. New inputs of the role ``cotangent`` belong to the outputs,
new results of the role ``gradient`` to the inputs. If a name is in use, as in gradients of gradients, the gradient name
of that name is tried."""

from mithril.autodiff.framework_gradients import (
    operation_gradient as operation_gradient,
    require_framework_gradients as require_framework_gradients,
    with_marked_surrogates as with_marked_surrogates,
)
from mithril.autodiff.gradient_graph import (
    gradients as gradients,
    value_and_gradients as value_and_gradients,
)
from mithril.autodiff.reverse import (
    live_nodes as live_nodes,
    zeros as zeros,
)
