"""The hooks of mithril-parallel; importing this module imports no framework."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

from mithril import Export, Lowering, OpsSpec, Option, hookimpl
from mithril.backend import Positive

Kind = Literal["data", "fsdp", "hsdp", "expert", "model", "sequence", "context", "pipeline"]
Schedule = Literal[
    "1f1b", "gpipe", "interleaved1f1b", "loopedbfs", "interleavedzerobubble", "zbvzerobubble", "dualpipev"
]


@hookimpl
def mithril_options() -> Sequence[Option]:
    """Return the options for many devices."""
    nothing: Mapping[str, Any] = MappingProxyType({})
    return [
        Option(
            "parallelism",
            Kind | tuple[Kind, ...] | None,
            None,
            "Dimension to split over the devices: the batch (fsdp, hsdp: the parameters too; expert: experts), the "
            "weights (sequence: the activations too), the positions of sequences (context) or the layers; several as a "
            "tuple; None follows the mesh.",
            example='"fsdp"',
        ),
        Option(
            "fsdp_reshard",
            bool,
            True,
            "Whether fsdp gathers parameters again for the backward pass, instead of storing them complete.",
        ),
        Option(
            "pipeline_stages",
            Positive | None,
            None,
            "Number of pipeline stages; None takes it from the mesh.",
            example="2",
        ),
        Option("pipeline_chunks", Positive, 1, "Number of chunks of the batch in a pipeline.", example="4"),
        Option(
            "pipeline_schedule",
            Schedule,
            "1f1b",
            "Schedule of the backward steps: as early as possible (1f1b), after the last forward step (gpipe); PyTorch "
            "has others, with several stages in each process.",
        ),
        Option(
            "tensor_split_dims",
            Mapping[str, int],
            nothing,
            "Axes to split over the devices: 'weights', 'activations', a parameter's name or a pattern -> axis.",
            example='{"weights": 1}',
        ),
    ]


@hookimpl
def mithril_ops() -> Sequence[OpsSpec]:
    """Return the collective operations, and the gradients that a framework computes."""
    names = (
        "mesh.all_gather",
        "mesh.all_reduce",
        "mesh.all_to_all",
        "mesh.chunk_sum",
        "mesh.constrain",
        "mesh.cotangent",
        "mesh.from_experts",
        "mesh.reduce_scatter",
        "mesh.ring_attention",
        "mesh.to_experts",
    )
    return [
        OpsSpec("mithril_parallel.sharding.collectives", names),
        OpsSpec("mithril_parallel.sharding.framework_gradients", ("mesh.gradients",)),
    ]


@hookimpl
def mithril_lowerings(backend: str) -> Sequence[Lowering]:
    """Return the constraint for XLA, which partitions most programs by itself, and collectives for the others."""
    names = ("constrain", "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "to_experts", "from_experts")
    return [Lowering(f"mesh.{name}", f"mithril_parallel.sharding.xla:{name}") for name in names if backend == "jax"]


@hookimpl
def mithril_exports() -> Sequence[Export]:
    """Return the functions that plan, shard and checkpoint models over many devices."""
    return [
        Export("staged", "mithril_parallel.sharding.pipeline_schedule:staged"),
        Export("plan", "mithril_parallel.planning.plan:plan"),
        Export("constrain_placement", "mithril_parallel.sharding.constraints:constrained"),
        Export("divided_experts", "mithril_parallel.placing.experts:divided_experts"),
        Export("expert_parameters", "mithril_parallel.placing.experts:expert_parameters"),
        Export("export_checkpoint", "mithril_parallel.sharding.interchange:export_checkpoint"),
        Export("import_checkpoint", "mithril_parallel.sharding.interchange:import_checkpoint"),
        Export("load_sharded", "mithril_parallel.sharding.checkpoint:load_sharded"),
        Export("forward_pipeline", "mithril_parallel.sharding.forward_pipeline:forward_pipeline"),
        Export("partition_graph", "mithril_parallel.sharding.spmd:partition_graph"),
        Export("placement", "mithril_parallel.sharding.api:placement"),
        Export("save_sharded", "mithril_parallel.sharding.checkpoint:save_sharded"),
        Export("with_sequences_in_parts", "mithril_parallel.sharding.sequence_constraints:with_sequences_in_parts"),
        Export("with_model_layout", "mithril_parallel.sharding.model_layout:with_model_layout"),
        Export("with_framework_gradients", "mithril_parallel.sharding.framework_gradients:with_framework_gradients"),
    ]
