"""``MlxComputationGraph``: predicted time and memory of a graph on MLX, and fusion opportunities.

Graphs are the framework's own, and so are the fusion rules, the memory plan and the cost model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mithril.backend import CheckedType, MemoryPlan, format_bytes, plan
from mithril.compiler import Interpreter, memory_use
from mithril.graph import Graph, InputError
from mithril.passes import random_arguments
from mithril.system import Lap, Stopwatch, lower_quartile
from mithril_mlx.backend import MlxBackend
from mithril_mlx.function_import import import_function
from mithril_mlx.utilities.fusion_opportunities import PLAIN, FusionOpportunity, lowered, opportunities, rewritten
from mithril_tools.calibrate import calibration
from mithril_tools.cost_model import CostModel, Sample, costly_nodes
from mithril_tools.op_timing import Key, sample_key

RUNS = 10  # for a graph whose operations are measured because there is no calibration


@dataclass(frozen=True)
class MemoryGroup:
    """Values that share the same memory at different times."""

    values: tuple[str, ...]
    offset: int
    size: int


@dataclass(frozen=True)
class MemoryLayout:
    """Offsets of all intermediate values in one arena."""

    memory_groups: tuple[MemoryGroup, ...]
    size: int
    without_reuse: int
    plan: MemoryPlan = field(repr=False)


@dataclass(frozen=True)
class ExecutionPlan:
    """The order of execution and its cost; ``estimated_by`` names the source of the time."""

    execution_order: tuple[str, ...]
    fusion_opportunities: tuple[FusionOpportunity, ...]
    memory_plan: MemoryLayout
    estimated_memory_usage: int
    estimated_execution_time: float
    flops: int
    estimated_by: str

    def __str__(self) -> str:
        time = f"{1e3 * self.estimated_execution_time:.3f} ms by {self.estimated_by}"
        memory = format_bytes(self.estimated_memory_usage)
        return "\n".join(
            [
                f"{len(self.execution_order)} operations: {', '.join(self.execution_order)}",
                f"{memory}, {len(self.memory_plan.memory_groups)} groups of values, {time}",
                *(f"{o.pattern}: {o.estimated_speedup:.2f} times as fast" for o in self.fusion_opportunities),
            ]
        )


class MlxComputationGraph(metaclass=CheckedType):
    """A graph that can be inspected before it runs, and run."""

    def __init__(self, graph: Graph, device: str | None = None) -> None:
        self.graph = graph
        self.backend = MlxBackend(device=device)
        self._lowered = lowered(graph, self.backend)
        self._samples: dict[Key, Sample] = {}

    @classmethod
    def from_function(cls, function: Callable[..., Any], *arrays: Any) -> MlxComputationGraph:
        """Trace a Python function of MLX arrays; its inputs are x0, x1, …"""
        return cls(import_function(function, *arrays))

    def run(self, **arrays: Any) -> dict[str, Any]:
        """Compute the outputs, by name."""
        missing = [i.name for i in self.graph.inputs if i.data is None and i.name not in arrays]
        if missing:
            raise InputError(f"the graph's input '{missing[0]}' is missing")
        outputs: dict[str, Any] = self.backend.build(self._lowered, PLAIN)(
            {}, {n: self.backend.array(a) for n, a in arrays.items()}
        )
        return outputs

    def topological_sort(self) -> list[str]:
        """Return the names of the operations' results in topological order.

        Graphs are built from existing values, so they contain no cycles; the parser rejects text with cycles.
        """
        return [n.result.name for n in costly_nodes(self.graph.nodes)]

    def find_fusion_opportunities(self) -> list[FusionOpportunity]:
        """Return matches of the framework's rules and fusible element-wise operations, the best first."""
        candidates = rewritten(self.graph)
        costs, _ = self._costs([self.graph, *(r.graph for r in candidates)])
        return opportunities(self.graph, candidates, self.backend, costs)

    def optimize_memory_layout(self) -> MemoryLayout:
        """Return which values share buffers and their offsets, from the framework's memory plan."""
        memory = plan(self._lowered)
        groups: dict[tuple[int, int], list[str]] = {}
        for buffer in memory.buffers:
            groups.setdefault((buffer.offset, buffer.size), []).extend(v.name for v in buffer.values)
        return MemoryLayout(
            tuple(MemoryGroup(tuple(names), offset, size) for (offset, size), names in sorted(groups.items())),
            memory.size,
            memory.total,
            memory,
        )

    def generate_execution_plan(self) -> ExecutionPlan:
        """Return order, fusion opportunities, memory plan, peak memory and seconds of a call."""
        costs, by = self._costs([self.graph])
        estimate = costs.estimate(self._lowered)
        layout = self.optimize_memory_layout()
        return ExecutionPlan(
            tuple(self.topological_sort()),
            tuple(self.find_fusion_opportunities()),
            layout,
            memory_use(self._lowered, self.backend).peak,
            estimate.seconds,
            estimate.flops,
            by,
        )

    # -- costs -------------------------------------------------------------------------------------------------------
    def _costs(self, graphs: Sequence[Graph]) -> tuple[CostModel, str]:
        """Return the calibration of this machine, or measure the operations of the graphs if there is none."""
        calibrated = calibration(self.backend)
        if calibrated is not None:
            return calibrated, "a calibration"
        for graph in graphs:
            self._measure(lowered(graph, self.backend))
        return CostModel(list(self._samples.values())), "measuring its operations, as there is no calibration"

    def _measure(self, graph: Graph) -> None:
        if all(sample_key(n) in self._samples for n in costly_nodes(graph.nodes)):
            return
        stepped = Interpreter(graph, self.backend)
        arguments = {n: self.backend.array(a) for n, a in random_arguments(graph).items()}
        stepped.run(arguments)
        laps: dict[Key, list[Lap]] = {}
        watch = Stopwatch()
        for _ in range(RUNS):
            stepped.run(
                arguments, lambda node, start, spent: laps.setdefault(sample_key(node), []).append(watch.lap(spent))
            )
        for (op, kind, size), samples in laps.items():
            self._samples[op, kind, size] = Sample(op, kind, size, lower_quartile(samples))
