"""The ahead-of-time JAX backend: the same generated code, compiled on a mesh for hardware of another machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mithril import plugins
from mithril.backend import BuildOptions, Capabilities, Forward, SourceExecutable
from mithril.graph import Graph, Input, Value, cotangent_name, iterate
from mithril.plugins import HardwareTarget
from mithril_jax.backend import JaxBackend
from mithril_parallel.mesh import DATA, MODEL, PIPELINE, Mesh
from mithril_parallel.placing.strategy import Strategy, choose
from mithril_parallel.sharding.constraints import constrained
from mithril_parallel.xla_model.program import PREFERS
from mithril_targets.tpu import generation
from mithril_tpu import options as tpu_options
from mithril_tpu.aot import gpus, topology
from mithril_tpu.aot.oom_advice import remedy
from mithril_tpu.aot.program import AheadProgram, SimulatedProgram, cpu_devices
from mithril_tpu.options import DeviceRequest


class AheadBackend(JaxBackend):
    """The backend of ``ml.compile(model, ml.JaxBackend(), target_hardware="tpu_...")``; likewise for NVIDIA's GPUs.

    Arrays are those of the JAX backend; programs are compiled for the target, which this machine need not have.
    """

    devices = ("cpu", "tpu")  # type: ignore[assignment]  # fewer than the base class supports
    is_lazy = False  # compile programs when they are first used, not when they are built

    def __init__(
        self,
        *,
        device: str | None = None,
        dtype: Any = None,
        precision: str | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.settings = settings
        super().__init__(device=device, dtype=dtype, precision=precision)

    @classmethod
    def in_place_of(cls, backend: JaxBackend, settings: Mapping[str, Any]) -> AheadBackend:
        """Create the backend with another backend's device and precision, and the options of ``ml.compile``."""
        return cls(
            device=backend.device,
            dtype=backend.dtype if backend.precision is None else None,
            precision=backend.precision,
            settings=settings,
        )

    @property
    def capabilities(self) -> Capabilities:
        base = super().capabilities
        return replace(
            base,
            families=self._families(),
            local=base.family != "cpu" or (self.settings is not None and tpu_options.read(self.settings).simulate),
            symbolic=False,  # devices and splits require static sizes
            donates=False,
            keeps="nothing",
            prefers=PREFERS if base.family == "cpu" else {},  # as in plans
        )

    def _families(self) -> tuple[str, ...]:
        """Return the target's family. The core calls this first, so that invalid options are reported early."""
        if self.settings is None:
            return ("tpu",)
        target = plugins.target(self.settings["target_hardware"]).spec
        request = tpu_options.read(self.settings)
        self._apply_precision(tpu_options.precision_of(self.settings))
        tpu = generation(target.name)
        if tpu is not None:
            topology.dims(tpu, request.devices, request.topology)
        return (target.family,)

    def _apply_precision(self, precision: str | None) -> None:
        if precision is not None and self.precision is None:
            fresh = JaxBackend(device=self.device, precision=precision)
            self.precision, self.dtype = fresh.precision, fresh.dtype

    # -- building ----------------------------------------------------------------------------------------------------
    def build(self, graph: Graph, options: BuildOptions | None = None) -> SourceExecutable:
        options = options or BuildOptions()
        request = tpu_options.read(options.settings)
        if request.stages == 1:
            return self.build_whole(graph, options)
        mesh = _mesh(request)
        splits = choose(graph, mesh, request.splits, fsdp=request.fsdp).splits
        return self.build_pipeline(graph, options, mesh.axes, splits)

    def build_with_gradients(
        self,
        graph: Graph,
        of: Sequence[str],  # english: ok, the name in the base class
        wrt: Sequence[str],
        options: BuildOptions | None = None,
    ) -> SourceExecutable:
        # Cotangents are arguments of the differentiated function, so its graph must contain them.
        outputs = dict(zip(graph.output_names, graph.outputs, strict=True))
        cotangents = tuple(Input(Value(cotangent_name(n), outputs[n].type), "cotangent", of=n) for n in of)
        return super().build_with_gradients(graph.replaced(inputs=graph.inputs + cotangents), of, wrt, options)

    def _holds(self, options: BuildOptions) -> bool:
        return False  # a saved program contains its weights

    def dump(self, executable: Any) -> dict[str, bytes] | None:
        """Return None: only a TPU can load the TPU compiler's programs, so that there is nothing to cache."""
        return None

    def constrained(self, graph: Graph, options: BuildOptions) -> Graph:
        request = tpu_options.read(options.settings)
        if not request.fsdp or request.data == 1:
            return graph
        mesh = Mesh({DATA: request.data, MODEL: request.model})
        splits, stored = (choose(graph, mesh, request.splits, fsdp=fsdp).splits for fsdp in (False, True))
        return constrained(graph, mesh.axes, splits, stored, reshard=options.settings["fsdp_reshard"])

    def mesh_axes(self, options: BuildOptions | None) -> Mapping[str, int]:
        return _mesh(tpu_options.read(options.settings)).axes if options is not None else {}

    def finish(self, forward: Forward, graph: Graph, options: BuildOptions) -> Forward:
        """Return the TPU compiler's program, or with ``simulate`` the same function on CPU devices."""
        request = tpu_options.read(options.settings)
        target = plugins.target(options.settings["target_hardware"]).spec
        mesh = _mesh(request)
        strategy = choose(graph, mesh, request.splits, fsdp=request.fsdp)
        for name, reason in strategy.unsplit.items():
            options.decisions.record("choice", f"'{name}' is replicated: {reason}")
        x64 = _has_64_bits(graph)
        ahead = self._ahead_program(forward, graph, strategy, target, request, options, x64)
        if ahead is not None and not self.is_lazy:
            ahead.ready()
        if request.simulate and (ahead is None or not ahead.present):
            options.decisions.record("choice", f"programs for {target.name} run on {mesh.devices} CPU device(s)")
            devices = cpu_devices(request.devices)
            return SimulatedProgram(forward, graph, strategy, devices, x64=x64, ahead=ahead)
        assert ahead is not None
        return ahead

    def _ahead_program(
        self,
        forward: Forward,
        graph: Graph,
        strategy: Strategy,
        target: HardwareTarget,
        request: DeviceRequest,
        options: BuildOptions,
        x64: bool,
    ) -> AheadProgram | None:
        tpu = generation(target.name)
        local = topology.local_devices(tpu, request.devices) if tpu is not None else None
        has_compiler = topology.has_compiler() if tpu is not None else gpus.has_compiler()
        if local is None and request.simulate and not has_compiler:
            options.decisions.record(
                "ignored", f"compiler of {target.name} (not installed): the program is only simulated"
            )
            return None
        if local is not None:
            devices = local
        elif tpu is not None:
            devices = topology.described_devices(tpu, request.devices, request.topology)
        else:
            devices = gpus.described_gpus(target, request.devices)
        if options.semantics == "native":
            options.decisions.record("choice", f"float32 products use the default precision of {target.name}")
        return AheadProgram(
            forward,
            graph,
            strategy,
            target,
            devices,
            present=local is not None,
            effort=request.effort if tpu is not None else None,  # XLA for GPUs has no such option
            x64=x64,
            exact=options.semantics == "portable",
            remedy=lambda needed, there: remedy(graph, request, target, needed, there),
        )


def _mesh(request: DeviceRequest) -> Mesh:
    axes = {DATA: request.data, MODEL: request.model}
    return Mesh({**axes, PIPELINE: request.stages} if request.stages > 1 else axes)


def _has_64_bits(graph: Graph) -> bool:
    dtypes = [i.type.dtype for i in graph.inputs]
    dtypes += [v.dtype for node, _ in iterate(graph) for v in node.results]
    return any(d.bits == 64 for d in dtypes)
