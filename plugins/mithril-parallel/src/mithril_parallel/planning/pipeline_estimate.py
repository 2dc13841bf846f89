"""What a pipeline needs and takes: its busiest stage in everything, and the time that stages wait for each other."""

from __future__ import annotations

from mithril.ir import Graph
from mithril.plugins import HardwareTarget
from mithril_parallel.mesh import Mesh
from mithril_parallel.placing.propagate import propagate
from mithril_parallel.placing.strategy import LINK, choose
from mithril_parallel.planning.memory_estimate import Needs, needs
from mithril_parallel.planning.step_time import Work, work
from mithril_parallel.sharding.pipeline_schedule import staged
from mithril_parallel.xla_model.fusion_model import fuse
from mithril_parallel.xla_model.image_layout import with_strips
from mithril_parallel.xla_model.tiling import stored


def of_pipeline(
    graph: Graph, mesh: Mesh, stages: int, chunks: int, target: HardwareTarget, *, slots: int
) -> tuple[Needs, Work]:
    """For ``stages`` groups of devices, each of which is ``mesh``."""
    made = staged(graph, stages, chunks)
    tiled = target.family == "tpu"
    memory = [[0, 0, 0, 0] for _ in range(stages)]  # parameters and their slots, sums, links kept, the largest run
    done = [[0.0, 0, 0, 0.0, 0.0] for _ in range(stages)]
    link = target.costs.get("interconnect") or target.bandwidth or 1e10
    for task in made.tasks:
        choice = choose(task.graph, mesh)
        placed = propagate(task.graph, mesh, choice.splits)
        fused = fuse(task.graph, tpu=tiled)
        if tiled:
            fused = with_strips(fused, placed)
        need = needs(fused, placed, tiled=tiled)
        found = work(fused, placed, target)
        here = memory[task.stage]
        params = sum(stored(placed.local(i.value), i.type.dtype.itemsize, tiled) for i in task.graph.with_role("param"))
        here[0] = max(here[0], params * (1 + slots))
        outputs = dict(zip(task.graph.output_names, task.graph.outputs, strict=True))
        sent = sum(placed.bytes(v) for name, v in outputs.items() if name.startswith(LINK) and name not in task.sums)
        here[1] += sum(placed.bytes(v) for name, v in outputs.items() if name in task.sums)
        here[2] += sent * made.alive(task.stage)
        here[3] = max(here[3], need.temporaries + need.outputs)
        spent, times = done[task.stage], 1 if task.once else chunks
        for k, n in enumerate((found.flops, found.traffic, found.exchanged + sent, found.compute_seconds)):
            spent[k] += n * times
        spent[4] += times * (found.exchange_seconds + sent / link)
    busiest = max(done, key=lambda d: d[3] + d[4])
    waits = (chunks + stages - 1) / chunks
    fullest = max(memory, key=sum)
    return (
        Needs(fullest[0], fullest[1], 0, fullest[2] + fullest[3]),
        Work(busiest[0], int(busiest[1]), int(busiest[2]), busiest[3] * waits, busiest[4] * waits),
    )
