"""``ml.plan``: memory and time of a model for each way to distribute it over devices, best first; compiles nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mithril import plugins
from mithril.compiler import ProgramKey, ProgramKind
from mithril.graph import Graph, InputError, OptionError, UnsupportedError, unknown
from mithril.plugins import HardwareTarget
from mithril.system import notebook
from mithril_parallel.mesh import DATA, MODEL, Mesh
from mithril_parallel.placing.fully_sharded import propagate_fully_sharded
from mithril_parallel.placing.propagate import propagate
from mithril_parallel.placing.strategy import Strategy, choose
from mithril_parallel.planning.memory_estimate import MemoryEstimate, estimate_memory
from mithril_parallel.planning.pipeline_estimate import estimate_pipeline
from mithril_parallel.planning.step_time import Work, estimate_work, unknown_flops
from mithril_parallel.xla_model.fusion_model import FusedGraph, fuse
from mithril_parallel.xla_model.image_layout import with_strips
from mithril_parallel.xla_model.program import XlaGraphs

if TYPE_CHECKING:
    from mithril.models import Model


@dataclass(frozen=True)
class PlanEntry:
    """One way to distribute a model: a mesh, the memory and work of a device, and the inputs that cannot be split.

    With ``fsdp`` parameters are split along ``data``, too. For a pipeline, ``mesh`` is the mesh of each stage, and the
    figures are those of the most loaded stage. ``compiled_peak`` is the compiler's memory, if it was asked.
    """

    mesh: Mesh
    strategy: Strategy
    memory: MemoryEstimate
    work: Work
    limit: float | None
    fsdp: bool = False
    stages: int = 1
    chunks: int = 1
    compiled_peak: int | None = None

    @property
    def devices(self) -> int:
        return self.mesh.devices * self.stages

    @property
    def fits(self) -> bool:
        """Whether the upper end of the expected interval fits, or the compiled program."""
        needed = self.memory.interval[1] if self.compiled_peak is None else self.compiled_peak
        return self.limit is None or needed <= self.limit

    @property
    def seconds(self) -> float:
        """Estimated time of one step."""
        return self.work.seconds

    @property
    def options(self) -> dict[str, Any]:
        """The options of ``ml.compile`` for this entry."""
        tpu = {"replicas": self.devices}
        if self.mesh.size(MODEL) > 1:
            tpu["model_parallelism"] = self.mesh.size(MODEL)
        options: dict[str, Any] = {"tpu_options": tpu}
        if self.fsdp:
            options["parallelism"] = "fsdp"
        if self.stages > 1:
            options |= {"pipeline_stages": self.stages, "pipeline_chunks": self.chunks}
        return options


@dataclass
class Plan:
    """All entries, best first: those that fit, sorted by time, then the others by memory. Printing shows a table."""

    target: HardwareTarget
    training: bool
    entries: list[PlanEntry]
    refused: dict[str, str] = field(default_factory=dict)  # mesh -> reason why it is impossible
    model: Model | None = field(default=None, repr=False)
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)  # those of ml.compile
    outputs: tuple[str, ...] = ()  # differentiated
    unknown_flops: tuple[str, ...] = ()  # operations of which nothing says their flops: they count one per element

    @property
    def best(self) -> PlanEntry | None:
        """The fastest entry that fits; None if none fits."""
        return next((w for w in self.entries if w.fits), None)

    def __iter__(self) -> Iterator[PlanEntry]:
        return iter(self.entries)

    def sort(self) -> None:
        """Sort the entries: those that fit by time, then the others by memory."""
        self.entries.sort(key=lambda w: (not w.fits, w.seconds if w.fits else w.memory.peak, w.mesh.size(MODEL)))

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as JSON-serializable data."""
        return {
            "target": self.target.name,
            "training": self.training,
            "entries": [
                {
                    "mesh": dict(w.mesh.axes),
                    "stages": w.stages,
                    "fsdp": w.fsdp,
                    "fits": w.fits,
                    "peak_bytes": w.memory.peak,
                    "peak_interval": list(w.memory.interval),
                    "compiled_peak_bytes": w.compiled_peak,
                    "argument_bytes": w.memory.arguments,
                    "temporary_bytes": w.memory.temporaries,
                    "flops": w.work.flops,
                    "exchanged_bytes": w.work.exchanged,
                    "seconds": w.seconds,
                    "left_whole": dict(w.strategy.unsplit),
                }
                for w in self.entries
            ],
            "refused": dict(self.refused),
            "unknown_flops": list(self.unknown_flops),
        }

    def _repr_html_(self) -> str:
        head = ("mesh", "stages", "memory MiB", "exchanged MiB", "step ms", "fits")
        slowest = max((w.seconds for w in self.entries), default=0.0) or 1.0
        rows = [
            (
                " x ".join(f"{name} {size}" for name, size in dict(w.mesh.axes).items()),
                w.stages,
                _peak_text(w),
                f"{w.work.exchanged / 2**20:.1f}",
                f"{w.seconds * 1e3:.3f}",
                "yes" if w.fits else "no",
            )
            for w in self.entries
        ]
        table = notebook.table(head, rows, [w.seconds / slowest for w in self.entries])
        refused = notebook.text("\n".join(f"{mesh}: {reason}" for mesh, reason in self.refused.items()))
        return notebook.heading(str(self).partition("\n")[0]) + table + (refused if self.refused else "")

    def __str__(self) -> str:
        limit = self.entries[0].limit if self.entries else None
        subject = "one training step" if self.training else "one call"
        work = f"{'operations':>13}{'exchanged':>12}{'step':>11}"
        lines = [
            f"{subject} on {self.target.name}" + (f", {limit / 2**30:.2f} GiB each" if limit else ""),
            f"{'data':>5}{'model':>7}{'stages':>8}{'memory (expected)':>28}{work}  fits",
        ]
        for w in self.entries:
            lines.append(
                f"{w.mesh.size(DATA):>5}{w.mesh.size(MODEL):>7}{w.stages:>8}"
                f"{_peak_text(w):>24} MiB{w.work.flops:>13.3g}"
                f"{w.work.exchanged / 2**20:>8.1f} MiB{w.seconds * 1e3:>8.3f} ms  {'yes' if w.fits else 'no'}"
                + ("  fsdp" if w.fsdp else "")
            )
        lines += [f"{mesh}: {reason}" for mesh, reason in self.refused.items()]
        if self.unknown_flops:
            lines.append(f"unknown flops, counted as one per element: {', '.join(self.unknown_flops)}")
        return "\n".join(lines)


def _peak_text(entry: PlanEntry) -> str:
    if entry.compiled_peak is not None:
        return f"{entry.compiled_peak / 2**20:.1f} (compiled)"
    low, high = entry.memory.interval
    return f"{entry.memory.peak / 2**20:.1f} ({low / 2**20:.0f} to {high / 2**20:.0f})"


def plan(
    model: Model,
    target: str | HardwareTarget,
    *,
    shapes: Mapping[str, Sequence[int]] | None = None,
    devices: int | Sequence[int] = 1,
    of: str | Sequence[str] = (),  # english: ok, documented
    slots: int = 0,
    stages: int | Sequence[int] = (),
    chunks: int = 8,
    tensor_split_dims: Mapping[str, int] | None = None,
    **options: Any,
) -> Plan:
    """Estimate memory and time of ``model`` on ``devices`` devices of a target (one number, or several to compare).

    ``of`` names the outputs to differentiate: the plan is then for a training step that updates the parameters, with
    ``slots`` optimizer values per parameter (0 for SGD, 2 for Adam). Such a plan contains every mesh twice, the second
    time with parameters split along ``data`` (fsdp). ``stages`` adds pipelines with these numbers of stages, which
    process the batch in ``chunks``. Further options are options of ``ml.compile`` that change the graph.
    """
    spec = plugins.target(target).spec if isinstance(target, str) else target
    names = (of,) if isinstance(of, str) else tuple(of)
    compile_options = {**options, **({"shapes": shapes} if shapes else {})}
    fused = fuse(_graph(model, names, compile_options), tpu=spec.family == "tpu")
    limit = spec.costs.get("usable_memory", spec.memory)
    result = Plan(spec, bool(names), [], model=model, options=compile_options, outputs=names)
    result.unknown_flops = unknown_flops(fused.graph, spec)
    counts = (devices,) if isinstance(devices, int) else tuple(devices)
    for mesh in _meshes(counts):
        for fsdp in (False, True) if names and mesh.size(DATA) > 1 else (False,):
            try:
                result.entries.append(
                    _plan_entry(fused, mesh, spec, limit, bool(names), slots, tensor_split_dims, fsdp)
                )
            except OptionError as error:
                result.refused[str(mesh)] = error.what
    for n in (stages,) if isinstance(stages, int) else stages:
        for mesh in _meshes([count // n for count in counts if count % n == 0 and count >= n > 1]):
            try:
                needed, spent = estimate_pipeline(fused.graph, mesh, n, chunks, spec, slots=slots)
                result.entries.append(PlanEntry(mesh, Strategy(mesh), needed, spent, limit, stages=n, chunks=chunks))
            except (OptionError, UnsupportedError) as error:
                result.refused[f"{mesh} x {n} stages"] = error.what
    result.sort()
    return result


def _plan_entry(
    fused: FusedGraph,
    mesh: Mesh,
    target: HardwareTarget,
    limit: float | None,
    training: bool,
    slots: int,
    splits: Mapping[str, int] | None,
    fsdp: bool,
) -> PlanEntry:
    strategy = choose(fused.graph, mesh, splits)
    if fsdp:
        parts = choose(fused.graph, mesh, splits, fsdp=True)
        sharding = propagate_fully_sharded(fused.graph, mesh, strategy.splits, parts.splits, reshard=True)
        strategy = parts
    else:
        sharding = propagate(fused.graph, mesh, strategy.splits)
    if target.family == "tpu":
        fused = with_strips(fused, sharding)
    memory = estimate_memory(fused, sharding, tiled=target.family == "tpu", updates=training, slots=slots)
    return PlanEntry(mesh, strategy, memory, estimate_work(fused, sharding, target), limit, fsdp)


def _graph(model: Model, outputs: tuple[str, ...], options: Mapping[str, Any]) -> Graph:
    """Return the graph that XLA would compile, gradients included; nothing is compiled."""
    from mithril import compile

    compiled = compile(model, XlaGraphs, **options)
    if not compiled.programs or not all(t.is_static for _, t in compiled.programs[0].request.types):
        raise InputError(
            "a plan needs the shapes of all inputs as numbers",
            hint="pass shapes={'x': [32, 128]}",
        )
    program = compiled.programs[0]
    if outputs:
        output_names = [r.name for r in compiled.interface.results_of("output")]
        for name in outputs:
            if name not in output_names:
                message, facts, hint = unknown("output", name, output_names)
                raise InputError(message, facts=facts, hint=hint)
        program = compiled.compiler.specialize(ProgramKey(program.request.types, ProgramKind(True, outputs)))
    graph: Graph = program.executable.graph
    return graph


def _meshes(counts: Sequence[int]) -> Iterator[Mesh]:
    for n in counts:
        if n < 1:
            raise OptionError(f"devices={n} must be at least 1")
        for model in (k for k in range(1, n + 1) if n % k == 0):
            yield Mesh({DATA: n // model, MODEL: model})
