"""``autodiff="native"``: gradients by PyTorch's autograd around the generated function."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mithril.backend import Forward
from mithril.ir import cotangent_name, result_name


class Differentiated:
    """A generated function, compiled or not, with its gradients; cotangents come as further inputs."""

    def __init__(self, forward: Forward, of: tuple[str, ...], wrt: tuple[str, ...]) -> None:
        self.forward, self.of, self.wrt = forward, of, wrt

    def __call__(self, params: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
        with torch.enable_grad():
            wanted = {n: (params[n] if n in params else inputs[n]).detach().requires_grad_() for n in self.wrt}
            made = self.forward(
                {name: wanted.get(name, x) for name, x in params.items()},
                {name: wanted.get(name, x) for name, x in inputs.items()},
            )
            found = torch.autograd.grad(
                [made[name] for name in self.of],
                list(wanted.values()),
                [inputs[cotangent_name(name)] for name in self.of],
                allow_unused=True,
            )
        outputs = {name: x.detach() for name, x in made.items()}
        for name, x, gradient in zip(self.wrt, wanted.values(), found, strict=True):
            outputs[result_name("gradient", name)] = torch.zeros_like(x) if gradient is None else gradient
        return outputs
