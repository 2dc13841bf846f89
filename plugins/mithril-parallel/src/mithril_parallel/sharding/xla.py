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
