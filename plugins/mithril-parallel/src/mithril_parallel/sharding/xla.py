"""The operations of a mesh for XLA: a constraint where it partitions, and collectives inside ``jax.shard_map``."""

from __future__ import annotations

from typing import Any

from mithril_parallel.sharding.collectives import split_from_text


def constrain(x: Any, split: str) -> Any:
    """Return the array with a sharding constraint; the mesh is that of the context in which the program is traced."""
    import jax
    from jax.sharding import PartitionSpec

    return jax.lax.with_sharding_constraint(x, PartitionSpec(*split_from_text(split)))


def all_reduce(x: Any, mesh: str, kind: str) -> Any:
    """Return the sum, maximum or minimum over the devices of an axis."""
    from jax import lax

    return getattr(lax, f"p{kind}")(x, mesh)  # psum, pmax, pmin


def all_gather(x: Any, mesh: str, axis: int) -> Any:
    """Return the parts of all devices, concatenated."""
    from jax import lax

    return lax.all_gather(x, mesh, axis=axis, tiled=True)


def reduce_scatter(x: Any, mesh: str, axis: int) -> Any:
    """Return this device's part of the sum."""
    from jax import lax

    return lax.psum_scatter(x, mesh, scatter_dimension=axis, tiled=True)


def all_to_all(x: Any, mesh: str, split: int, axis: int) -> Any:
    """Return the parts of all devices along ``axis``, concatenated, of one part along ``split``."""
    from jax import lax

    return lax.all_to_all(x, mesh, split_axis=split, concat_axis=axis, tiled=True)


def to_experts(x: Any, experts: Any, mesh: str, parts: int, count: int) -> Any:
    """Return the rows for the experts of this device, their numbers, and how many each device has sent to each."""
    import jax.numpy as jnp

    order, outgoing = _by_expert(experts, parts * count)
    incoming = all_to_all(outgoing.reshape(parts, count), mesh, 0, 0)
    rows = x.reshape(-1, x.shape[-1])[order // experts.shape[-1]]
    capacity = parts * experts.size
    segments = jnp.searchsorted(jnp.cumsum(incoming.reshape(-1)), jnp.arange(capacity), side="right")
    numbers = jnp.where(segments < parts * count, segments % count, count).astype(experts.dtype)
    received = _exchanged(rows, outgoing.reshape(parts, count).sum(1), incoming.sum(1), capacity, mesh)
    return received, numbers, incoming.reshape(-1)


def from_experts(y: Any, experts: Any, counts: Any, mesh: str, parts: int, count: int) -> Any:
    """Return the results of the experts in the order of the rows of this device."""
    import jax.numpy as jnp

    order, outgoing = _by_expert(experts, parts * count)
    outward, back = (n.reshape(parts, count).sum(1) for n in (counts, outgoing))
    rows = _exchanged(y, outward, back, experts.size, mesh)
    return jnp.zeros_like(rows).at[order].set(rows).reshape(*experts.shape, y.shape[-1])


def _by_expert(experts: Any, count: int) -> tuple[Any, Any]:
    """Return the rows in the order of their experts, those without one last, and how many each expert has."""
    import jax.numpy as jnp

    numbers = experts.reshape(-1)
    valid = jnp.where((numbers >= 0) & (numbers < count), numbers, count).astype(jnp.int32)
    return jnp.argsort(valid, stable=True), jnp.bincount(valid, length=count + 1)[:count].astype(jnp.int32)


def _exchanged(rows: Any, outgoing: Any, incoming: Any, capacity: int, mesh: str) -> Any:
    """Return the rows in the order of their senders, and zeros, of those in the order of their receivers."""
    import jax.numpy as jnp
    from jax import lax

    ends = jnp.cumsum(incoming)
    starts, places = jnp.cumsum(outgoing) - outgoing, ends - incoming  # of the parts in both arrays
    buffer = jnp.zeros((capacity, rows.shape[1]), rows.dtype)

    def ragged() -> Any:
        targets = all_to_all(places, mesh, 0, 0)
        return lax.ragged_all_to_all(rows, buffer, starts, outgoing, targets, incoming, axis_name=mesh)

    def gathered() -> Any:  # XLA for CPUs has no ragged exchange
        first = all_to_all(starts, mesh, 0, 0)
        position = jnp.arange(capacity)
        sender = jnp.searchsorted(ends, position, side="right")
        source = sender * len(rows) + first.at[sender].get(mode="clip") + position - places.at[sender].get(mode="clip")
        source = jnp.where(position < ends[-1], source, len(ends) * len(rows))
        return all_gather(rows, mesh, 0).at[source].get(mode="fill", fill_value=0)

    return lax.platform_dependent(cpu=gathered, default=ragged)
