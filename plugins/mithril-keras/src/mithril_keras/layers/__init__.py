"""The functions of Keras layers and operations, by family."""

from mithril_keras.layers import (
    activations,
    attention,
    convolution,
    convolutional_recurrent,
    core,
    merging,
    normalization,
    operations,
    pooling,
    preprocessing,
    recurrent,
    regularization,
    reshaping,
)

__all__ = [
    "activations",
    "attention",
    "convolution",
    "convolutional_recurrent",
    "core",
    "merging",
    "normalization",
    "operations",
    "pooling",
    "preprocessing",
    "recurrent",
    "regularization",
    "reshaping",
]
