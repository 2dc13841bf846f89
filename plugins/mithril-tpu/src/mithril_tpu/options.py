"""What ``ml.compile`` is told about TPUs and many devices: one schema, checked as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from mithril.base import OptionError


@dataclass(frozen=True, slots=True)
class DeviceRequest:
    """The devices asked for, and how the program is compiled for them.

    ``data`` x ``model`` devices; ``topology`` (``"2x4"``) is how the chips stand, found from their number if None.
    ``effort`` 0 to 3 is how long the TPU compiler may think; None leaves its default.
    """

    data: int = 1
    model: int = 1
    topology: str | None = None
    effort: int | None = None
    simulate: bool = False
    splits: Mapping[str, int] = field(default_factory=dict)
    fsdp: bool = False  # parameters are split over ``data`` too
    stages: int = 1  # of a pipeline, each of ``data`` x ``model`` devices
    chunks: int = 1
    schedule: Literal["1f1b", "gpipe"] = "1f1b"

    @property
    def devices(self) -> int:
        return self.data * self.model * self.stages


def precision_of(settings: Mapping[str, Any]) -> str | None:
    """``tpu_options["precision"]``, which must not contradict ``precision=``."""
    inner: str | None = settings["tpu_options"].get("precision")
    outer: str | None = settings["precision"]
    if inner is not None and outer is not None and inner != outer:
        raise OptionError(
            "options 'precision' and 'tpu_options' of ml.compile contradict each other",
            facts=[f"precision = {outer!r}", f"tpu_options['precision'] = {inner!r}"],
            hint="give only precision=",
        )
    return inner if inner is not None else outer


def read(settings: Mapping[str, Any]) -> DeviceRequest:
    """The options, checked for sense; every one of them counts as read."""
    values = dict(settings["tpu_options"])
    effort = values.get("effort")
    if effort is not None and not 0 <= effort <= 3:
        raise OptionError("tpu_options['effort'] must be 0, 1, 2 or 3", facts=[f"got {effort!r}"])
    kind, stages = settings["parallelism"], settings["pipeline_stages"]
    replicas = settings["tpu_replicas"]
    if stages is None:
        stages = (replicas or 1) if kind == "pipeline" else 1
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
        settings["pipeline_chunks"] or 1,
        settings["pipeline_schedule"],
    )


def _effort(level: str) -> int | None:
    """A low level asks for a quick answer, a high one for a good one; the middle is the compiler's own."""
    return {"none": 0, "low": 1, "high": 3}.get(level)


def _axes(replicas: int | None, model: int | None, parallelism: str | None, stages: int) -> tuple[int, int]:
    """Sizes of the axes ``data`` and ``model``; ``replicas`` is the number of all devices, those of all stages."""
    counts = {"tpu_replicas": replicas, "tpu_options['model_parallelism']": model, "pipeline_stages": stages}
    for name, value in counts.items():
        if value is not None and value < 1:
            raise OptionError(f"{name} must be at least 1", facts=[f"got {value}"])
    if parallelism == "data" and model not in (None, 1):
        raise OptionError(
            "parallelism='data' contradicts tpu_options['model_parallelism']",
            facts=[f"model_parallelism = {model} splits the model"],
            hint="leave one of them out",
        )
    if stages > 1 and parallelism not in (None, "pipeline"):
        raise OptionError(
            f"parallelism='{parallelism}' contradicts pipeline_stages={stages}",
            hint="leave parallelism out: tpu_replicas beyond the stages split the batch, model_parallelism the weights",
        )
    if replicas is not None and replicas % stages:
        raise OptionError(
            f"{replicas} devices cannot be divided into {stages} stages",
            hint=f"tpu_replicas={stages * -(-replicas // stages)}",
        )
    total = replicas // stages if replicas is not None else (model or 1)
    if model is None:
        model = total if parallelism == "model" else 1
    if total % model:
        raise OptionError(
            f"{total} devices cannot be divided into groups of {model}",
            facts=[f"tpu_replicas = {total} counts all devices, model_parallelism = {model} those that share a model"],
            hint=f"tpu_replicas={model * -(-total // model)}",
        )
    return total // model, model
