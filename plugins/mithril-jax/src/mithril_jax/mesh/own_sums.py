"""Sums of gradients over several batches, of which each device has its own term until the last batch of a step.

A program that adds a gradient to an argument is divided by ``ml.partition_graph`` instead of XLA, which would exchange
the gradient in each batch. Between programs such a sum is an array with the sharding ``PartitionSpec(unreduced=...)``;
in a program the terms of all devices are the rows of one array, as only meshes with explicit axes have unreduced ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import mithril as ml
from mithril import ops
from mithril.graph import Graph, Input, Output, is_source

DATA = "data"
Specs = Mapping[str, tuple[Any, ...]]


def partitioned(graph: Graph, devices: int, specs: Specs) -> tuple[Any, frozenset[str]] | None:
    """Return the graph of one device and the arguments of which it has a term; None if no argument gains by it."""
    results = {r.of: r for r in graph.results_of("state")}
    sums = [i.name for i in graph.with_role("param") if i.type.shape and _is_sum(graph, i, results.get(i.name))]
    while sums:
        local = ml.partition_graph(graph, {DATA: devices}, specs, sums=sums)
        arguments = {i.value: i.name for i in local.graph.arguments if i.name in sums}
        # Not added but exchanged: the gradient is complete already, so that terms would save nothing.
        users = [n for n in local.graph.nodes if n.op is not ops.add and n.operands]
        exchanged = {arguments[n.operands[0]] for n in users if n.operands[0] in arguments}
        if not exchanged:
            return local, frozenset(sums)
        sums = [n for n in sums if n not in exchanged]
    return None


def _is_sum(graph: Graph, i: Input, result: Output | None) -> bool:
    """Whether a program only adds to an argument, and returns the sum or zeros in its place."""
    readers = graph.users.get(i.value, ())
    if result is None or result.name != i.name or [n.op for n in readers] != [ops.add]:
        return False
    producer = graph.producers.get(result.value)
    if producer is readers[0]:
        return producer.operands[0] is i.value and result.value not in graph.users
    return producer is not None and is_source(producer) and producer.attributes.get("value") == 0


# -- arrays -----------------------------------------------------------------------------------------------------------
def is_unreduced(x: Any) -> bool:
    """Whether each device has a term of an array."""
    return bool(getattr(getattr(getattr(x, "sharding", None), "spec", None), "unreduced", None))


def complete(x: Any) -> Any:
    """Return the sum of the terms of all devices, which takes part in a program of all processes."""
    return jax.reshard(x, NamedSharding(x.sharding.mesh, PartitionSpec())) if is_unreduced(x) else x


def assemble(mesh: Mesh, total: Any) -> jax.Array:
    """Return an array of which the first device has all, and the others zeros."""
    total, first = np.asarray(total), mesh.devices.flat[0]
    devices = [d for d in mesh.devices.flat if d.process_index == jax.process_index()]
    # Copies: the device may use their memory, which steps overwrite.
    terms = [jax.device_put(np.array(total) if d == first else np.zeros_like(total), d) for d in devices]
    return _joined(mesh, total.shape, terms)


def as_rows(mesh: Mesh, x: jax.Array) -> jax.Array:
    """Return the terms of all devices as one array."""
    terms = [shard.data for shard in (x if is_unreduced(x) else assemble(mesh, x)).addressable_shards]
    shape = (x.shape[0] * mesh.shape[DATA], *x.shape[1:])
    return jax.make_array_from_single_device_arrays(shape, NamedSharding(mesh, PartitionSpec(DATA)), terms)


def from_rows(mesh: Mesh, x: jax.Array) -> jax.Array:
    """Return the array whose terms ``as_rows`` has joined."""
    shape = (x.shape[0] // mesh.shape[DATA], *x.shape[1:])
    return _joined(mesh, shape, [shard.data for shard in x.addressable_shards])


def _joined(mesh: Mesh, shape: tuple[int, ...], terms: list[jax.Array]) -> jax.Array:
    """Return the array whose terms are on the devices of this process."""
    explicit = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Explicit,) * len(mesh.axis_names))
    sharding = NamedSharding(explicit, PartitionSpec(unreduced={DATA}))
    return jax.make_array_from_single_device_arrays(shape, sharding, terms)
