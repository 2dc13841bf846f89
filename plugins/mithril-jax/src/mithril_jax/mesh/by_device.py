"""Programs divided over the first axis of a mesh by ``ml.partition_graph``, and over the others by XLA."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from mithril.backend import Forward

AXIS = "data"


class ByDevice:
    """The function of complete arguments that runs that of one device on each; it is traced inside ``jax.jit``."""

    def __init__(self, local: Any, sums: frozenset[str], forward: Forward) -> None:
        self.local, self.sums, self.forward = local, sums, forward
        self.generated = (forward,)
        arguments = [i for i in local.graph.arguments if i.name not in local.indices]
        self.params = {i.name: self._spec(i.name, local.inputs[i.name]) for i in arguments if i.role == "param"}
        self.inputs = {i.name: self._spec(i.name, local.inputs[i.name]) for i in arguments if i.role != "param"}
        self.results = {name: self._spec(name, part.split) for name, part in local.outputs.items()}

    def _spec(self, name: str, split: Sequence[Any]) -> PartitionSpec:
        return PartitionSpec(AXIS) if name in self.sums else PartitionSpec(*split)

    def __call__(self, params: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
        run = jax.shard_map(
            self._on_device,
            in_specs=(PartitionSpec(AXIS), self.params, self.inputs),
            out_specs=self.results,
            axis_names={AXIS},
            check_vma=False,
        )
        numbers = jnp.arange(self.local.mesh.size(AXIS), dtype=jnp.int32)
        results = run(numbers, {n: params[n] for n in self.params}, {n: inputs[n] for n in self.inputs})
        return {name: results[name] for name in self.results}  # JAX sorts dictionaries

    def _on_device(self, number: Any, params: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
        return self.forward(params, {**inputs, **dict.fromkeys(self.local.indices, number[0])})
