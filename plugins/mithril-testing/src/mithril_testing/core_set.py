"""The core set: the primitives that a new backend lowers first.

With rows for these 40 and a host function for the rest, a backend runs every layer of ``mithril.models``, its gradients
included. Linear, convolutional, recurrent and attention layers, norms and most activations need no host calls; dropout,
pooling, sorting, gradients of embeddings, and layers of a single operation that is not in the set need them.
"""

from __future__ import annotations

# The primitives that a new backend lowers first: with them and host, every layer runs.
CORE_SET = frozenset(
    (
        *("abs", "add", "div", "exp", "log", "maximum", "minimum", "mul", "neg", "sqrt", "sub"),
        *("cos", "erf", "expm1", "log1p", "sin", "tanh"),
        *("equal", "greater", "greater_equal", "less", "where"),
        *("cast", "full", "iota"),
        *("broadcast_to", "concat", "pad", "reshape", "slice", "take", "transpose"),
        *("max", "mean", "sum"),
        *("conv", "conv_input_grad", "conv_weight_grad", "matmul", "scan"),
    )
)
