"""Gradients by PyTorch's autograd: around generated functions (``autodiff="native"``), and through them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import torch

from mithril.backend import Forward
from mithril.graph import Graph, cotangent_name, result_name


class Differentiated:
    """A generated function, compiled or not, that also returns gradients; cotangents are additional inputs."""

    def __init__(self, forward: Forward, of: tuple[str, ...], wrt: tuple[str, ...]) -> None:
        self.forward, self.of, self.wrt = forward, of, wrt

    def __call__(self, params: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
        with torch.enable_grad():
            variables = {n: (params[n] if n in params else inputs[n]).detach().requires_grad_() for n in self.wrt}
            outputs_with_graph = self.forward(
                {name: variables.get(name, x) for name, x in params.items()},
                {name: variables.get(name, x) for name, x in inputs.items()},
            )
            gradients = torch.autograd.grad(
                [outputs_with_graph[name] for name in self.of],
                list(variables.values()),
                [inputs[cotangent_name(name)] for name in self.of],
                allow_unused=True,
            )
        outputs = {name: x.detach() for name, x in outputs_with_graph.items()}
        for name, x, gradient in zip(self.wrt, variables.values(), gradients, strict=True):
            outputs[result_name("gradient", name)] = torch.zeros_like(x) if gradient is None else gradient
        return outputs


class DifferentiableProgram:
    """A forward graph as a function for autograd; ``load`` generates code for the graph or for a part of it."""

    def __init__(self, graph: Graph, load: Callable[[Graph], Forward]) -> None:
        self.graph, self.load = graph, load

    @cached_property
    def forward(self) -> Forward:
        """The function of the complete graph."""
        return self.load(self.graph)

    def __call__(self, params: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
        return self.forward(params, inputs)
