"""What to do where a program does not fit: the smallest mesh, or the smallest TPU, that should hold it."""

from __future__ import annotations

from collections.abc import Iterator

from mithril.base import MithrilError
from mithril.ir import Graph
from mithril.plugins import HardwareTarget
from mithril_parallel.mesh import DATA, MODEL, Mesh
from mithril_parallel.placing.propagate import propagate
from mithril_parallel.placing.strategy import choose
from mithril_parallel.planning.memory_estimate import needs
from mithril_parallel.xla_model.fusion_model import fuse
from mithril_parallel.xla_model.image_layout import with_strips
from mithril_targets.tpu import GENERATIONS, generation
from mithril_tpu.aot.topology import dims
from mithril_tpu.options import Wanted

GPUS = 8  # of one machine
MARGIN = 0.85  # the compiler's peak is not known before it has run


def remedy(graph: Graph, wanted: Wanted, target: HardwareTarget, needed: float, there: float) -> str | None:
    """What to type instead: the compiler's ``needed`` bytes are taken to shrink as those of the plan do."""
    tiled = target.family == "tpu"
    now = _bytes(graph, Mesh({DATA: wanted.data, MODEL: wanted.model}), wanted, tiled)
    found = generation(target.name)
    if now:
        for data, model in _meshes(wanted, 256 if found is not None else GPUS):
            try:
                if found is not None:
                    dims(found, data * model)
                then = _bytes(graph, Mesh({DATA: data, MODEL: model}), wanted, tiled)
            except MithrilError:  # not sold in this size, or the batch cannot be divided so
                continue
            if then and needed * then / now < MARGIN * there:
                parts = [f"'replicas': {data * model}", *([f"'model_parallelism': {model}"] if model > 1 else [])]
                return f"tpu_options={{{', '.join(parts)}}}"
    if found is None:
        return None
    for larger in sorted(GENERATIONS, key=lambda g: g.usable):
        if needed < MARGIN * larger.usable * (1 << 30) and wanted.devices % larger.devices_per_chip == 0:
            return f"target_hardware='{larger.name}'"
    return None


def _meshes(wanted: Wanted, most: int) -> Iterator[tuple[int, int]]:
    """Meshes in the order in which they are tried: the same devices split otherwise, then more of them."""
    devices = wanted.devices
    while devices <= most:
        model = 1
        while model <= devices:
            if devices % model == 0 and (devices, model) != (wanted.devices, wanted.model):
                yield devices // model, model
            model *= 2
        devices *= 2


def _bytes(graph: Graph, mesh: Mesh, wanted: Wanted, tiled: bool) -> int:
    """Bytes that the plan expects one device to need."""
    choice = choose(graph, mesh, wanted.splits)
    placed = propagate(graph, mesh, choice.splits)
    fused = fuse(graph, tpu=tiled)
    if tiled:
        fused = with_strips(fused, placed)
    return needs(fused, placed, tiled=tiled).peak
