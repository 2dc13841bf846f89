"""Weights of eight bits: large parameters become int8, with one scale per row, and are widened where they are read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from mithril import ops
from mithril.graph import Graph, Input, Value
from mithril.types import TensorType, float32, int8
from mithril_cbackend.lowering.reader import shape_of

LEAST = 256  # elements; of less there is nothing to be saved
Arrays = dict[str, np.ndarray[Any, Any]]


def quantized(graph: Graph, params: Mapping[str, np.ndarray[Any, Any]]) -> tuple[Graph, Arrays]:
    """The graph that reads such weights, not decomposed yet, and its parameters."""
    inputs: list[Input] = []
    arrays: Arrays = dict(params)
    narrowed: dict[Value, tuple[Value, Value]] = {}
    for i in graph.inputs:
        if not worth_it(i) or i.value in graph.outputs:
            inputs.append(i)
            continue
        whole = i.data if i.role == "constant" else params[i.name]
        assert whole is not None
        numbers, scale = rounded(whole)
        narrow = Value(i.name, TensorType(int8, i.type.shape))
        scales = Value(f"{i.name}.scale", TensorType(float32, scale.shape))
        narrowed[i.value] = narrow, scales
        if i.role == "param":
            arrays[narrow.name], arrays[scales.name] = numbers, scale
            numbers = scale = None
        inputs += [Input(narrow, i.role, numbers), Input(scales, i.role, scale)]
    editor = graph.edit()
    for node in editor.nodes():
        for v in node.operands:
            if v in narrowed:  # widened just before it is first read, so that its floats are not held for long
                with editor.before(node):
                    wide = ops.dequantize(*narrowed.pop(v), axis=0)
                editor.replace_value(v, wide)
    return editor.freeze().replaced(inputs=tuple(inputs)), arrays


def worth_it(i: Input) -> bool:
    """Whether an input is a matrix of weights, or more than a matrix."""
    weights = i.role in ("param", "constant") and i.type.dtype is float32
    return weights and len(i.type.shape) >= 2 and math.prod(shape_of(i.value)) >= LEAST


def rounded(whole: np.ndarray[Any, Any]) -> tuple[Any, Any]:
    """The nearest of 255 steps between plus and minus the largest magnitude of each row."""
    top = np.abs(whole).max(axis=tuple(range(1, whole.ndim)))
    scale = np.where(top > 0, top / 127, 1).astype(np.float32)
    spread = scale.reshape(-1, *(1,) * (whole.ndim - 1))
    return np.rint(whole / spread).astype(np.int8), scale
