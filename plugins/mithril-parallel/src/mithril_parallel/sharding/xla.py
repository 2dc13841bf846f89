"""The constraint ``mesh.constrain`` for XLA."""

from __future__ import annotations

from typing import Any

from mithril_parallel.sharding.collectives import split_from_text


def constrain(x: Any, split: str) -> Any:
    """Return the array with a sharding constraint; the mesh is that of the context in which the program is traced."""
    import jax
    from jax.sharding import PartitionSpec

    return jax.lax.with_sharding_constraint(x, PartitionSpec(*split_from_text(split)))
