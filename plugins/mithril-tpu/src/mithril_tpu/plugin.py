"""What mithril-tpu adds to mithril; importing this module imports no framework."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

from mithril import CompileContext, Export, Found, HardwareTarget, OpsSpec, Option, hookimpl


@hookimpl
def mithril_targets() -> Sequence[HardwareTarget]:
    """All hardware that the project knows."""
    from mithril_tpu.targets import all_targets

    return all_targets()


@hookimpl
def mithril_detect_targets() -> Sequence[Found]:
    """What of it this machine has."""
    from mithril_tpu.targets import detected

    return detected()


@hookimpl
def mithril_options() -> Sequence[Option]:
    """Keywords about TPUs and many devices."""
    nothing: Mapping[str, Any] = MappingProxyType({})
    return [
        Option(
            "tpu_options",
            Mapping[str, Any],
            nothing,
            "About a TPU target; effort is 0 to 3.",
            keys={
                "model_parallelism": int | None,
                "precision": str | None,
                "topology": str | None,
                "effort": int | None,
                "simulate": bool | None,
            },
        ),
        Option(
            "tpu_replicas",
            int | None,
            None,
            "Number of TPU devices to compile for; None is one.",
            aliases=("tpu_options.replicas",),
        ),
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
    return [OpsSpec("mithril_tpu.sharding.collectives", names)]


@hookimpl
def mithril_exports() -> Sequence[Export]:
    """How models are planned for, placed on and cut for many devices."""
    return [
        Export("staged", "mithril_tpu.sharding.pipeline_schedule:staged"),
        Export("plan", "mithril_tpu.planning.plan:plan"),
        Export("load_sharded", "mithril_tpu.sharding.checkpoint:load_sharded"),
        Export("placement", "mithril_tpu.sharding.api:placement"),
        Export("save_sharded", "mithril_tpu.sharding.checkpoint:save_sharded"),
        Export("shard", "mithril_tpu.sharding.api:shard"),
    ]


@hookimpl
def mithril_compile_begin(context: CompileContext) -> None:
    """For a TPU or a GPU that is elsewhere the JAX backend makes way for one that compiles ahead of time.

    The check of the target against the backend's device comes after this; every other backend fails it, and says so.
    """
    name = context.options["target_hardware"]
    family = _family(name) if name is not None and context.backend.name == "jax" else None
    if family not in ("tpu", "nvidia") or (family in context.backend.families() and family == "nvidia"):
        return
    from mithril_jax.backend import JaxBackend
    from mithril_tpu.backend import AheadBackend

    if type(context.backend) is JaxBackend and context.backend.device.split(":")[0] in AheadBackend.devices:
        context.backend = AheadBackend.in_place_of(context.backend, context.options)


def _family(name: str) -> str | None:
    from mithril_tpu.targets import all_targets

    return next((t.family for t in all_targets() if name == t.name or name in t.aliases), None)
