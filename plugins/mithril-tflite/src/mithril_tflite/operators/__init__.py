"""The operators, a file per family; importing this package registers them."""

from mithril_tflite.operators import (
    activations,
    control,
    convolution,
    elementwise,
    indexing,
    products,
    recurrent,
    reduction,
    resize,
    shape,
)

__all__ = [
    "activations",
    "control",
    "convolution",
    "elementwise",
    "indexing",
    "products",
    "recurrent",
    "reduction",
    "resize",
    "shape",
]
