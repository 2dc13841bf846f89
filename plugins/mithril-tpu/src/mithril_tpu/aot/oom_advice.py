"""Advice for programs that do not fit: the smallest mesh, or the smallest TPU, with enough memory."""

from __future__ import annotations

from collections.abc import Iterator

from mithril.graph import Graph, MithrilError
from mithril.plugins import HardwareTarget
from mithril_parallel.mesh import DATA, MODEL, Mesh
from mithril_parallel.placing.propagate import propagate
from mithril_parallel.placing.strategy import choose
from mithril_parallel.planning.memory_estimate import estimate_memory
from mithril_parallel.xla_model.fusion_model import fuse
from mithril_parallel.xla_model.image_layout import with_strips
from mithril_targets.tpu import GENERATIONS, generation
from mithril_tpu.aot.topology import dims
from mithril_tpu.options import DeviceRequest

GPUS = 8  # GPUs of one machine
MARGIN = 0.85  # usable fraction of the memory, since the compiler's peak is only estimated


def remedy(graph: Graph, request: DeviceRequest, target: HardwareTarget, needed: float, available: float) -> str | None:
    """Return the options of a configuration that should fit, or None.

    The compiler's ``needed`` bytes are assumed to scale like the estimate of the plan.
    """
    tiled = target.family == "tpu"
    current = _bytes(graph, Mesh({DATA: request.data, MODEL: request.model}), request, tiled)
    tpu = generation(target.name)
    if current:
        for data, model in _meshes(request, 256 if tpu is not None else GPUS):
            try:
                if tpu is not None:
                    dims(tpu, data * model)
                estimate = _bytes(graph, Mesh({DATA: data, MODEL: model}), request, tiled)
            except MithrilError:  # no such topology, or the batch is not divisible
                continue
            if estimate and needed * estimate / current < MARGIN * available:
                parts = [f"'replicas': {data * model}", *([f"'model_parallelism': {model}"] if model > 1 else [])]
                return f"tpu_options={{{', '.join(parts)}}}"
    if tpu is None:
        return None
    for larger in sorted(GENERATIONS, key=lambda g: g.usable):
        if needed < MARGIN * larger.usable * (1 << 30) and request.devices % larger.devices_per_chip == 0:
            return f"target_hardware='{larger.name}'"
    return None


def _meshes(request: DeviceRequest, limit: int) -> Iterator[tuple[int, int]]:
    """Yield meshes in the order in which they are tried: other splits of the same devices, then more devices."""
    devices = request.devices
    while devices <= limit:
        model = 1
        while model <= devices:
            if devices % model == 0 and (devices, model) != (request.devices, request.model):
                yield devices // model, model
            model *= 2
        devices *= 2


def _bytes(graph: Graph, mesh: Mesh, request: DeviceRequest, tiled: bool) -> int:
    """Return the estimated memory of one device in bytes."""
    strategy = choose(graph, mesh, request.splits)
    sharding = propagate(graph, mesh, strategy.splits)
    fused = fuse(graph, tpu=tiled)
    if tiled:
        fused = with_strips(fused, sharding)
    return estimate_memory(fused, sharding, tiled=tiled).peak
