"""Weight norm and spectral norm: wrappers that normalize a parameter of a layer."""

from __future__ import annotations

from typing import Any

from mithril import ops
from mithril.backend import to_numpy
from mithril.compiler import norms_of
from mithril.graph import Input, ModelError, Value, normalize_axis, product
from mithril.models.language.arguments import positive
from mithril.models.language.layer import Layer
from mithril.models.layers.wrapper import Reparametrization


class WeightNorm(Reparametrization):
    """weight_g * weight / |weight|, with a norm for each index of ``axis``: it learns direction and length separately.

    At the beginning ``weight_g`` holds the norms of ``weight``, so the results are those of the layer itself.
    """

    def __init__(self, inner: Layer, target: str = "weight", *, axis: int = 0) -> None:
        super().__init__(inner, target)
        self.axis = axis

    def parameter(self, stored: Value) -> Any:
        axis = normalize_axis(self.axis, max(stored.ndim, 1))
        shape = tuple(n if k == axis else 1 for k, n in enumerate(stored.shape))
        declared = self._declaration(stored)
        sizes, inner = list(stored.shape), declared.tags["init"]
        init = f"norms(parameter={declared.name!r}, sizes={sizes}, init={inner!r}, axis={axis})"
        name, context = f"{self.parameter_name}_g", self.context
        if declared.name in context.pretrained:
            scope = context.parameter_scopes[self]
            norms = norms_of(to_numpy(context.pretrained[declared.name]), axis)
            context.adopt(scope, {name: norms})
        length = self.param(name, shape, init, stored.dtype)
        reduced = tuple(k for k in range(stored.ndim) if k != axis)
        norm = ops.sqrt(ops.sum(stored * stored, axis=reduced, keepdims=True))
        return stored * (length / norm)

    def _declaration(self, parameter: Value) -> Input:
        """Return the input of the graph that declares a parameter."""
        declared = next((i for i in self.context.root.inputs if i.value is parameter), None)
        if declared is None:
            raise ModelError(
                f"'{self.parameter_name}' of {self.inner!r} is computed, not a parameter of the layer",
                hint="normalize the computed value instead, or remove the connection to it",
            )
        return declared


class SpectralNorm(Reparametrization):
    """weight / its largest singular value, estimated by power iterations that continue from call to call in training.

    The matrix has the index of ``axis`` as rows. The state ``weight_u`` is the left singular vector.
    """

    def __init__(
        self, inner: Layer, target: str = "weight", *, axis: int = 0, iterations: int = 1, eps: float = 1e-12
    ) -> None:
        super().__init__(inner, target)
        self.axis = axis
        self.iterations = positive("SpectralNorm", "iterations", iterations)
        self.eps = eps

    def parameter(self, stored: Value) -> Any:
        axis = normalize_axis(self.axis, max(stored.ndim, 1))
        rows = stored.shape[axis]
        perm = (axis, *(k for k in range(stored.ndim) if k != axis))
        matrix = ops.reshape(ops.transpose(stored, perm=perm), shape=(rows, product(stored.shape) // rows))
        fixed = ops.stop_gradient(matrix)
        state = f"{self.parameter_name}_u"
        u = self.state(state, (rows,), "normal(std=1.0)", stored.dtype)
        for _ in range(self.iterations):
            v = ops.normalize(ops.matmul(u, fixed), axis=-1, eps=self.eps)
            u = ops.normalize(ops.matmul(fixed, v), axis=-1, eps=self.eps)
        if self.training:
            self.update_state(state, u)
        u, v = ops.stop_gradient(u), ops.stop_gradient(v)
        return stored / ops.sum(u * ops.matmul(matrix, v))
