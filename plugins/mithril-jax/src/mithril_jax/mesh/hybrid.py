"""Hybrid sharding (hsdp): the groups along the first axis of a mesh have equal copies of fully sharded parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jax.sharding import Mesh

import mithril as ml
from mithril.graph import Decisions, Graph
from mithril_jax.mesh import mesh_execution

GROUPS, PARTS = "data", "model"  # the axes of the mesh


def partitioned(mesh: Mesh, graph: Graph, settings: Mapping[str, Any]) -> Any:
    """Return the graph of one group, which sums gradients over groups, with the splits of values in the group.

    A group sums a gradient over its devices first, so that groups exchange one part of it each.
    """
    shardings = mesh_execution.ArgumentShardings(mesh, graph, settings, Decisions())
    specs = {
        name: tuple(GROUPS if isinstance(axis, tuple) else None for axis in spec)
        for name, spec in shardings.padded_specs(graph).items()
    }
    local = ml.partition_graph(graph, {GROUPS: mesh.shape[GROUPS]}, specs)
    group = mesh_execution.group_mesh(mesh)
    return replace(local, graph=mesh_execution.constrained(group, local.graph, settings, over=PARTS))
