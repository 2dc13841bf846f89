"""The options of ``ml.compile`` for TPUs and many devices, checked together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mithril.graph import OptionError
from mithril_jax.mesh.pipeline_parallel import check_schedule


@dataclass(frozen=True, slots=True)
class DeviceRequest:
    """The requested devices and the compiler settings.

    ``data`` x ``model`` devices per stage; ``topology`` (``"2x4"``) is the arrangement of the chips, derived from
    their number if None. ``effort`` 0 to 3 is the optimization effort of the TPU compiler; None keeps its default.
    """

    data: int = 1
    model: int = 1
    topology: str | None = None
    effort: int | None = None
    simulate: bool = False
    splits: Mapping[str, int] = field(default_factory=dict)
    fsdp: bool = False  # parameters are split over ``data`` too
    stages: int = 1  # pipeline stages, each of ``data`` x ``model`` devices

    @property
    def devices(self) -> int:
        return self.data * self.model * self.stages


def precision_of(settings: Mapping[str, Any]) -> str | None:
    """Return ``tpu_options["precision"]`` or ``precision``; raise OptionError if they conflict."""
    inner: str | None = settings["tpu_options"].get("precision")
    outer: str | None = settings["precision"]
    if inner is not None and outer is not None and inner != outer:
        raise OptionError(
            "tpu_options['precision'] of ml.compile conflicts with precision",
            facts=[f"precision = {outer!r}", f"tpu_options['precision'] = {inner!r}"],
            hint=f"pass only precision={outer!r}",
        )
    return inner if inner is not None else outer


def read(settings: Mapping[str, Any]) -> DeviceRequest:
    """Return the checked options; all of them count as read."""
    values = dict(settings["tpu_options"])
    effort = values.get("effort")
    if effort is not None and not 0 <= effort <= 3:
        raise OptionError(f"tpu_options['effort'] must be 0, 1, 2 or 3, got {effort!r}")
    kind, stages = settings["parallelism"], settings["pipeline_stages"]
    if kind not in (None, "data", "fsdp", "model", "pipeline"):
        raise OptionError(
            f"parallelism={kind!r} is not available on TPUs",
            facts=["available: 'data', 'fsdp', 'model', 'pipeline'"],
            hint="use one of these",
        )
    replicas = settings["tpu_replicas"]
    if stages is None:
        stages = (replicas or 1) if kind == "pipeline" else 1
    if stages > 1:
        check_schedule(settings)
    data, model = _axes(replicas, values.get("model_parallelism"), kind, stages)
    return DeviceRequest(
        data,
        model,
        values.get("topology"),
        _effort(settings["optimization_level"]) if effort is None else effort,
        bool(values.get("simulate", False)),
        dict(settings["tensor_split_dims"]),
        kind == "fsdp",
        stages,
    )


def _effort(level: str) -> int | None:
    """Map an optimization level to the compiler's effort; "medium" keeps the compiler's default."""
    return {"none": 0, "low": 1, "high": 3}.get(level)


def _axes(replicas: int | None, model: int | None, parallelism: str | None, stages: int) -> tuple[int, int]:
    """Return the sizes of the axes ``data`` and ``model``; ``replicas`` counts the devices of all stages."""
    counts = {"tpu_replicas": replicas, "tpu_options['model_parallelism']": model}
    for name, value in counts.items():
        if value is not None and value < 1:
            raise OptionError(f"{name} must be at least 1, got {value}")
    if parallelism == "data" and model not in (None, 1):
        raise OptionError(
            f"parallelism='data' conflicts with tpu_options['model_parallelism']={model}",
            hint="remove one of them",
        )
    if stages > 1 and parallelism not in (None, "pipeline"):
        raise OptionError(
            f"parallelism='{parallelism}' conflicts with pipeline_stages={stages}",
            hint="remove parallelism: tpu_replicas beyond the stages split the batch, model_parallelism the weights",
        )
    if replicas is not None and replicas % stages:
        raise OptionError(
            f"{replicas} devices cannot be divided into {stages} stages",
            hint=f"set tpu_replicas={stages * -(-replicas // stages)}",
        )
    total = replicas // stages if replicas is not None else (model or 1)
    if model is None:
        model = total if parallelism == "model" else 1
    if total % model:
        raise OptionError(
            f"{total} devices cannot be divided into groups of {model}",
            facts=[f"tpu_replicas = {total} counts all devices, model_parallelism = {model} the devices per model"],
            hint=f"set tpu_replicas={model * -(-total // model)}",
        )
    return total // model, model
