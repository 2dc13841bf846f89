# Frozen with mithril 0.1: never edit this file. Later versions must run it unchanged.
"""A template, a writer and a kernel of arrays."""

import numpy as np

from mithril.backend import Call
from mithril.graph import float32

TEMPLATE = "np.exp(-{x} * {x}).astype({dtype})"


def written(call: Call) -> str:
    square = call.temp("square")
    call.line(f"{square} = {call.x} * {call.x}")
    return f"np.exp(-{square}).astype({call.dtype()})"


def is_single(node):
    return node.result.dtype is float32


def soft_clip(x, limit, dtype):
    return (np.tanh(x / limit) * limit).astype(x.dtype)
