"""Gradients against central differences in float64: along random directions, and element by element to say where."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mithril.derivatives import gradients
from mithril.graph import Graph, cotangent_name, evaluate, float64, result_name

Array = np.ndarray[Any, Any]
# Near the cube root of float64's epsilon, where truncation and rounding of a central difference are balanced.
STEP = 1e-5
RELATIVE, ABSOLUTE = 2e-4, 2e-6  # of differences with that step, for functions whose values are about one
DIRECTIONS = 3
ELEMENTS = 6  # of each operand


def check_gradients(graph: Graph, inputs: Mapping[str, Array]) -> None:
    """Raise AssertionError where the gradient of a graph of float64 values is not that of its results."""
    outputs, wrt = float_outputs(graph), float_inputs(graph)
    weights = cotangents(graph, outputs)
    computed = evaluate(gradients(graph, outputs, wrt), {**inputs, **weights})

    def loss(changed: Mapping[str, Array]) -> float:
        with np.errstate(all="ignore"):
            results = evaluate(graph, {**inputs, **changed})
            return sum(float((results[n] * weights[cotangent_name(n)]).sum()) for n in outputs)

    def slope(directions: Mapping[str, Array]) -> float:
        up = {n: inputs[n] + STEP * d for n, d in directions.items()}
        down = {n: inputs[n] - STEP * d for n, d in directions.items()}
        return (loss(up) - loss(down)) / (2 * STEP)

    for name in wrt:
        gradient = computed[result_name("gradient", name)]
        assert gradient.shape == inputs[name].shape, f"the gradient for '{name}' has shape {list(gradient.shape)}"
        for index in _sampled_positions(inputs[name]):
            direction: Array = np.zeros_like(inputs[name])
            direction[index] = 1.0
            label = f"the gradient for '{name}' at {[int(k) for k in index]}"
            _compare(label, float(gradient[index]), slope({name: direction}), 1.0)
    rng = np.random.default_rng(2)
    for _ in range(DIRECTIONS):
        directions: dict[str, Array] = {n: np.asarray(rng.uniform(-1, 1, inputs[n].shape)) for n in wrt}
        parts = [computed[result_name("gradient", n)] * d for n, d in directions.items()]
        size = max(1.0, sum(float(np.abs(p).sum()) for p in parts))
        _compare("the slope along a random direction", sum(float(p.sum()) for p in parts), slope(directions), size)


def check_second_gradients(graph: Graph, inputs: Mapping[str, Array]) -> None:
    """Raise AssertionError where the gradient of the gradient of a graph is not that of the gradient."""
    outputs = float_outputs(graph)
    slopes = gradients(graph, outputs, float_inputs(graph))
    outputs_of_slopes = tuple(replace(r, name=f"slope/{r.of}", role="output") for r in slopes.results_of("gradient"))
    check_gradients(slopes.replaced(results=outputs_of_slopes), {**inputs, **cotangents(graph, outputs)})


def check_no_slope(graph: Graph, inputs: Mapping[str, Array], reason: str) -> None:
    """Raise AssertionError where a result moves with its operands although there is said to be no gradient."""
    outputs, wrt = float_outputs(graph), float_inputs(graph)
    rng = np.random.default_rng(3)
    up, down = dict(inputs), dict(inputs)
    for name in wrt:
        step = STEP * rng.uniform(-1, 1, inputs[name].shape)
        up[name], down[name] = inputs[name] + step, inputs[name] - step
    high, low = evaluate(graph, up), evaluate(graph, down)
    for name in outputs:
        with np.errstate(all="ignore"):
            change = np.nanmax(np.abs(high[name] - low[name]), initial=0.0)
        assert change < STEP * 1e-3, f"'{name}' moves with its operands, yet there is no gradient: {reason}"


def float_outputs(graph: Graph) -> list[str]:
    return [n for n, v in zip(graph.output_names, graph.outputs, strict=True) if v.dtype is float64]


def float_inputs(graph: Graph) -> list[str]:
    return [i.name for i in graph.arguments if i.type.dtype is float64]


def cotangents(graph: Graph, outputs: Sequence[str], seed: int = 0) -> dict[str, Array]:
    """Draw random weights for the outputs, so that elements have different weights."""
    rng = np.random.default_rng(seed)
    types = dict(zip(graph.output_names, graph.outputs, strict=True))
    return {cotangent_name(n): rng.uniform(0.5, 1.5, types[n].shape) for n in outputs}


def _sampled_positions(x: Array) -> list[tuple[Any, ...]]:
    positions = np.random.default_rng(1).permutation(x.size)[:ELEMENTS]
    return [np.unravel_index(int(k), x.shape) for k in positions]


def _compare(label: str, value: float, measured: float, size: float) -> None:
    if np.isfinite(measured):  # at the edge of a domain there is no difference to measure
        allowed = RELATIVE * abs(measured) + ABSOLUTE * size
        assert abs(value - measured) <= allowed, f"{label} is {value:.9g}, by differences {measured:.9g}"
