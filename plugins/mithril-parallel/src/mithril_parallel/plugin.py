"""What mithril-parallel adds to mithril; importing this module imports no framework."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

from mithril import Export, OpsSpec, Option, hookimpl


@hookimpl
def mithril_options() -> Sequence[Option]:
    """Keywords about many devices."""
    nothing: Mapping[str, Any] = MappingProxyType({})
    return [
        Option(
            "parallelism",
            Literal["data", "fsdp", "model", "pipeline"] | None,
            None,
            "What many devices share: the batch (fsdp: parameters with it), the weights, or the layers; None follows "
            "the mesh.",
        ),
        Option("pipeline_stages", int | None, None, "How many stages share the layers; None: as the mesh has."),
        Option("pipeline_chunks", int | None, None, "Into how many pieces a pipeline cuts the batch; None is one."),
        Option(
            "pipeline_schedule",
            Literal["1f1b", "gpipe"],
            "1f1b",
            "Whether gradients begin as soon as they can (1f1b), or after the last chunk's forward part (gpipe).",
        ),
        Option(
            "tensor_split_dims",
            Mapping[str, int],
            nothing,
            "Axis to split over devices: 'weights', 'activations', a parameter's name or a pattern -> axis.",
        ),
    ]


@hookimpl
def mithril_ops() -> Sequence[OpsSpec]:
    """What devices exchange."""
    names = ("mesh.all_gather", "mesh.all_reduce", "mesh.chunk_sum", "mesh.reduce_scatter")
    return [OpsSpec("mithril_parallel.sharding.collectives", names)]


@hookimpl
def mithril_exports() -> Sequence[Export]:
    """How models are planned for, placed on and cut for many devices."""
    return [
        Export("staged", "mithril_parallel.sharding.pipeline_schedule:staged"),
        Export("plan", "mithril_parallel.planning.plan:plan"),
        Export("load_sharded", "mithril_parallel.sharding.checkpoint:load_sharded"),
        Export("placement", "mithril_parallel.sharding.api:placement"),
        Export("save_sharded", "mithril_parallel.sharding.checkpoint:save_sharded"),
        Export("shard", "mithril_parallel.sharding.api:shard"),
    ]
