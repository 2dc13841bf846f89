"""Pipelines compiled ahead of time: one program per task, each for the devices of its stage."""

from __future__ import annotations

from collections.abc import Callable

from mithril.backend import BuildOptions, SourceExecutable
from mithril.ir import Graph
from mithril_jax.mesh.pipeline_parallel import PipelineExecutable, texts
from mithril_parallel.sharding.pipeline_schedule import Pipeline, staged
from mithril_tpu.aot.program import AheadProgram, SimulatedProgram
from mithril_tpu.options import DeviceRequest

BuildStage = Callable[[int, Graph, BuildOptions], SourceExecutable]


class AheadPipeline(PipelineExecutable):
    """A pipeline with one program per task in ``programs``; a call requires the devices, or ``simulate``."""

    def __init__(self, pipeline: Pipeline, executables: list[SourceExecutable], graph: Graph) -> None:
        super().__init__(pipeline, executables, graph)
        programs = [call.ahead if isinstance(call, SimulatedProgram) else call for call in self.calls]
        self.programs: list[AheadProgram | None] = programs

    def memory(self, stage: int) -> int:
        """Return the bytes on a device of a stage: parameters, activations of all live chunks and temporaries."""
        tasks = [k for k, task in enumerate(self.staged.tasks) if task.stage == stage]
        params: dict[str, int] = {}
        retained = temporaries = 0
        for k in tasks:
            program = self.programs[k]
            if program is None:
                continue
            split = {i.name: program.local_bytes(i) for i in program.graph.arguments}
            params |= {i.name: split[i.name] for i in program.graph.with_role("param")}
            links = sum(n for name, n in split.items() if name in self.staged.tasks[k].takes)
            retained = max(retained, links * (1 if self.staged.tasks[k].once else self.staged.alive(stage)))
            m = program.analysis.memory
            temporaries = max(temporaries, m.peak - m.arguments)
        return sum(params.values()) + retained + temporaries

    def report(self) -> str:
        """Return a short readable report."""
        lines = [
            f"{self.staged.stages} stages, {self.staged.chunks} chunk(s): "
            + ", ".join(f"{share:.0%}" for share in self.staged.shares)
            + " of the work"
        ]
        for stage in range(self.staged.stages):
            lines.append(f"stage {stage}: {self.memory(stage) / 2**20:.1f} MiB on each device")
        for task, program in zip(self.staged.tasks, self.programs, strict=True):
            if program is not None:
                lines.append(f"{task.graph.name}: " + program.report().partition("\n")[0])
        return "\n".join(lines)


def build(build_stage: BuildStage, graph: Graph, options: BuildOptions, request: DeviceRequest) -> SourceExecutable:
    """Build the executable of a graph over pipeline stages, each task for the devices of its stage."""
    pipeline = staged(graph, request.stages, request.chunks, request.schedule)
    programs = [build_stage(task.stage, task.graph, options) for task in pipeline.tasks]
    return SourceExecutable(graph, texts(programs), AheadPipeline(pipeline, programs, graph))
