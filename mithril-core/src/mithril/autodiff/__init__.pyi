"""Gradients: reverse mode, from a graph to a graph that computes the outputs and the gradients.

The forward nodes stay the very same (a ``scan`` additionally keeps what its gradient needs); backward nodes follow
them, each with the origin of the node it belongs to and the tag ``phase="backward"``. New inputs of the role
``cotangent`` belong to the outputs, new results of the role ``gradient`` to the inputs. Where a name is taken, as it is
in gradients of gradients, the name of that name is tried."""

from mithril.autodiff.gradient_graph import (
    gradients as gradients,
    value_and_gradients as value_and_gradients,
)
from mithril.autodiff.reverse import (
    living as living,
    zeros as zeros,
)
