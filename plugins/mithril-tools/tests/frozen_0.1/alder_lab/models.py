# Frozen with mithril 0.1: never edit this file. Later versions must run it unchanged.
"""A class of models of the vendor, and its conversion to a graph."""

from dataclasses import dataclass

import numpy as np

from mithril import Builder, ModelError
from mithril.compiler import GraphSource


@dataclass(frozen=True)
class Polynomial:
    """A polynomial in ``x``, with its coefficients from the lowest power on."""

    coefficients: tuple[float, ...]
    size: int = 1


def source(model, *, outputs, inference):
    if not model.coefficients:
        raise ModelError("a polynomial without coefficients has no value", hint="give it one")
    with Builder("polynomial") as builder:
        x = builder.input("x", (model.size,))
        data = np.array(model.coefficients, np.float32)
        coefficients = builder.param("coefficients", data.shape)
        y = coefficients[len(data) - 1]
        for k in reversed(range(len(data) - 1)):
            y = y * x + coefficients[k]
    result = GraphSource(builder.build({"y": y}), outputs=outputs, inference=inference)
    result.pretrained = {"coefficients": data}
    return result
