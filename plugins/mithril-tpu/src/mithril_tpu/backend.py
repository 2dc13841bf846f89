"""The JAX backend compiling ahead of time: the same generated code, on a mesh, for hardware that may be elsewhere."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mithril import plugins
from mithril.backend import BuildOptions, Capabilities, Forward, SourceExecutable
from mithril.ir import Graph, Input, Value, cotangent_name, iterate
from mithril.plugins import HardwareTarget
from mithril_jax.backend import JaxBackend
from mithril_parallel.mesh import DATA, MODEL, Mesh
from mithril_parallel.placing.strategy import Strategy, choose
from mithril_parallel.xla_model.program import PREFERS
from mithril_targets.tpu import generation
from mithril_tpu import options as tpu_options
from mithril_tpu.aot import gpus, stages, topology
from mithril_tpu.aot.oom_advice import remedy
from mithril_tpu.aot.program import AheadProgram, SimulatedProgram, cpu_devices
from mithril_tpu.options import DeviceRequest


class AheadBackend(JaxBackend):
    """What ``ml.compile(model, ml.JaxBackend(), target_hardware="tpu_...")`` works with; likewise for NVIDIA's GPUs.

    Arrays stay where the JAX backend has them; programs are compiled for the target, which this machine need not have.
    """

    devices = ("cpu", "tpu")  # type: ignore[assignment]  # fewer than its base has
    stage = 0  # of a pipeline
    is_lazy = False  # whether programs are compiled when they are first used, not when they are built

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
        """This backend with another one's device and precision, and with what ``ml.compile`` was told."""
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
            symbolic=False,  # a program for given devices and splits wants numbers
            donates=False,
            keeps="nothing",
            prefers=PREFERS if base.family == "cpu" else {},  # those of plans
        )

    def _families(self) -> tuple[str, ...]:
        """That of the target. The core asks this first of all, so what is wrong with the options is said at once."""
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
        return stages.build(self._build_of_stage, graph, options, request)

    def _build_of_stage(self, number: int, graph: Graph, options: BuildOptions) -> SourceExecutable:
        stage = copy.copy(self)
        stage.stage = number
        return stage.build_whole(graph, options)

    def build_with_gradients(
        self, graph: Graph, of: Sequence[str], wrt: Sequence[str], options: BuildOptions | None = None
    ) -> SourceExecutable:
        # The cotangents are arguments of the differentiated function, so the graph that describes it has them too.
        outputs = dict(zip(graph.output_names, graph.outputs, strict=True))
        cotangents = tuple(Input(Value(cotangent_name(n), outputs[n].type), "cotangent", of=n) for n in of)
        return super().build_with_gradients(graph.replaced(inputs=graph.inputs + cotangents), of, wrt, options)

    def dump(self, executable: Any) -> dict[str, bytes] | None:
        """Nothing: what takes time here is the TPU's compiler, whose programs only a TPU can read back."""
        return None

    def finish(self, forward: Forward, graph: Graph, options: BuildOptions) -> Forward:
        """The program of the TPU compiler; with ``simulate`` the same on CPU devices."""
        request = tpu_options.read(options.settings)
        target = plugins.target(options.settings["target_hardware"]).spec
        mesh = Mesh({DATA: request.data, MODEL: request.model})
        strategy = choose(graph, mesh, request.splits, fsdp=request.fsdp)
        for name, reason in strategy.unsplit.items():
            options.decisions.record("choice", f"'{name}' is whole on every device: {reason}")
        x64 = _has_64_bits(graph)
        ahead = self._ahead_program(forward, graph, strategy, target, request, options, x64)
        if ahead is not None and not self.is_lazy:
            ahead.ready()
        if request.simulate and (ahead is None or not ahead.present):
            options.decisions.record("choice", f"programs for {target.name} run on {mesh.devices} device(s) of the CPU")
            devices = self._devices_of_stage(cpu_devices(request.devices), request)
            return SimulatedProgram(forward, graph, strategy, devices, x64=x64, ahead=ahead)
        assert ahead is not None
        return ahead

    def _devices_of_stage(self, devices: list[Any], request: DeviceRequest) -> list[Any]:
        """The devices of this stage: neighbors along the pipeline are neighbors in the list."""
        return devices[self.stage :: request.stages]

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
            options.decisions.record("ignored", f"the compiler of {target.name} is not installed: only simulated")
            return None
        if local is not None:
            devices = local
        elif tpu is not None:
            devices = topology.described_devices(tpu, request.devices, request.topology)
        else:
            devices = gpus.described_gpus(target, request.devices)
        if options.semantics == "native":
            options.decisions.record("choice", f"products of float32 have the digits that {target.name} prefers")
        return AheadProgram(
            forward,
            graph,
            strategy,
            target,
            self._devices_of_stage(devices, request),
            present=local is not None,
            effort=request.effort if tpu is not None else None,  # XLA for GPUs knows no such thing
            x64=x64,
            exact=options.semantics == "portable",
            remedy=lambda needed, there: remedy(graph, request, target, needed, there),
        )


def _has_64_bits(graph: Graph) -> bool:
    dtypes = [i.type.dtype for i in graph.inputs]
    dtypes += [v.dtype for node, _ in iterate(graph) for v in node.results]
    return any(d.bits == 64 for d in dtypes)
