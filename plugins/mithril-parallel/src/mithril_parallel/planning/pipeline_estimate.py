"""Memory and time of a pipeline: the maximum over stages, and the time that stages wait for each other."""

from __future__ import annotations

from mithril.graph import Graph
from mithril.plugins import HardwareTarget
from mithril_parallel.mesh import Mesh
from mithril_parallel.placing.propagate import propagate
from mithril_parallel.placing.strategy import LINK, choose
from mithril_parallel.planning.memory_estimate import MemoryEstimate, estimate_memory
from mithril_parallel.planning.step_time import Work, estimate_work
from mithril_parallel.sharding.pipeline_schedule import staged
from mithril_parallel.xla_model.fusion_model import fuse
from mithril_parallel.xla_model.image_layout import with_strips
from mithril_parallel.xla_model.tiling import stored_bytes


def estimate_pipeline(
    graph: Graph, mesh: Mesh, stages: int, chunks: int, target: HardwareTarget, *, slots: int
) -> tuple[MemoryEstimate, Work]:
    """Estimate a pipeline over ``stages`` groups of devices, each with the mesh ``mesh``."""
    pipeline = staged(graph, stages, chunks)
    tiled = target.family == "tpu"
    estimates: list[MemoryEstimate] = []
    # Parameters with slots, sums, saved activations, temporaries.
    memory = [[0, 0, 0, 0] for _ in range(stages)]
    totals = [[0.0, 0, 0, 0.0, 0.0] for _ in range(stages)]
    link = target.costs.get("interconnect") or target.bandwidth or 1e10
    for task in pipeline.tasks:
        strategy = choose(task.graph, mesh)
        sharding = propagate(task.graph, mesh, strategy.splits)
        fused = fuse(task.graph, tpu=tiled)
        if tiled:
            fused = with_strips(fused, sharding)
        estimate = estimate_memory(fused, sharding, tiled=tiled)
        estimates.append(estimate)
        task_work = estimate_work(fused, sharding, target)
        stage_memory = memory[task.stage]
        params = sum(
            stored_bytes(sharding.local(i.value), i.type.dtype.itemsize, tiled) for i in task.graph.with_role("param")
        )
        stage_memory[0] = max(stage_memory[0], params * (1 + slots))
        outputs = dict(zip(task.graph.output_names, task.graph.outputs, strict=True))
        link_bytes = sum(
            sharding.bytes(v) for name, v in outputs.items() if name.startswith(LINK) and name not in task.sums
        )
        stage_memory[1] += sum(sharding.bytes(v) for name, v in outputs.items() if name in task.sums)
        stage_memory[2] += link_bytes * pipeline.alive(task.stage)
        stage_memory[3] = max(stage_memory[3], estimate.temporaries + estimate.outputs)
        total, runs = totals[task.stage], 1 if task.once else chunks
        for k, n in enumerate(
            (task_work.flops, task_work.traffic, task_work.exchanged + link_bytes, task_work.compute_seconds)
        ):
            total[k] += n * runs
        total[4] += runs * (task_work.exchange_seconds + link_bytes / link)
    busiest = max(totals, key=lambda d: d[3] + d[4])
    waits = (chunks + stages - 1) / chunks
    fullest = max(memory, key=sum)
    error = max((estimate.error for estimate in estimates), key=lambda factors: factors[1])
    return (
        MemoryEstimate(fullest[0], fullest[1], 0, fullest[2] + fullest[3], error, fullest[0] // (1 + slots) * slots),
        Work(busiest[0], int(busiest[1]), int(busiest[2]), busiest[3] * waits, busiest[4] * waits),
    )
