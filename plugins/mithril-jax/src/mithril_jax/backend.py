"""``ml.JaxBackend``: generated JAX source, compiled by XLA."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, ClassVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mithril.backend import (
    BuildOptions,
    Capabilities,
    Form,
    Forward,
    Lowerings,
    Source,
    SourceBackend,
    SourceExecutable,
    as_numpy,
)
from mithril.base import BackendError, OptionError, dtype as as_dtype
from mithril.ir import Graph, cotangent_name, iterate, result_name
from mithril.ops import conv, conv_input_grad, conv_weight_grad, linear
from mithril_jax import process_config
from mithril_jax.execution import analysis, described, read, runner
from mithril_jax.lowering import table, unrolled
from mithril_jax.mesh import mesh_execution, pipeline_parallel
from mithril_jax.native_semantics import DIFFERENT, own

ALIGNMENT = 64
PLATFORMS = {"gpu": "cuda", "cuda": "cuda", "cpu": "cpu", "tpu": "tpu"}


class JaxBackend(SourceBackend):
    """Arrays are JAX's, on one device or over a mesh of them; programs are compiled by XLA unless ``jit=False``.

    ``device_mesh=(4,)`` splits batches over four devices; ``(2, 4)`` batches over two and weights over four; the third
    of three numbers is how many stages of a pipeline share the layers.
    ``num_threads``, ``pre_allocate`` (a GPU's memory at once) and a mesh of simulated devices are settings of the
    process, which JAX reads when it is first used.
    """

    name = "jax"
    devices = ("cpu", "gpu", "cuda", "tpu")
    unforkable = "JAX"
    tables: ClassVar[Mapping[str, Lowerings]] = {"portable": table, "native": own}

    def __init__(
        self,
        *,
        device: str | None = None,
        dtype: Any = None,
        precision: str | None = None,
        device_mesh: int | Sequence[int] | None = None,
        pre_allocate: bool | None = None,
        num_threads: int | None = None,
    ) -> None:
        if pre_allocate is not None:
            process_config.pre_allocate(pre_allocate)
        if num_threads is not None:
            process_config.limit_threads(num_threads)
        self.pre_allocate = pre_allocate
        self.mesh: Mesh | None = None
        if device_mesh is not None:
            self.mesh = self._mesh(device, mesh_execution.shape_of(device_mesh))
        super().__init__(device=device or jax.default_backend(), dtype=dtype, precision=precision)
        self.jax_device = self._find(self.device)
        self._unrolled: dict[tuple[int, int], Lowerings] = {}
        self.placement: Any = self.jax_device if self.mesh is None else NamedSharding(self.mesh, PartitionSpec())

    def _mesh(self, device: str | None, sizes: tuple[int, ...]) -> Mesh:
        platform, _, number = (device or "").partition(":")
        if number:
            raise OptionError(
                f"device='{device}' is one device, device_mesh={sizes} is many",
                hint=f"device='{platform}'",
            )
        return mesh_execution.make(PLATFORMS.get(platform), sizes)

    def with_precision(self, precision: str) -> JaxBackend:
        made = copy.copy(self)
        made.precision, made.dtype = precision, as_dtype(precision)
        return made

    def _find(self, device: str) -> Any:
        platform, _, number = device.partition(":")
        try:
            found = jax.local_devices(backend=PLATFORMS[platform])
            return found[int(number) if number else 0]
        except (RuntimeError, IndexError, ValueError) as error:
            raise BackendError(
                f"JAX has no device '{device}' here",
                facts=[f"there is: {', '.join(str(d) for d in jax.devices())}", str(error).splitlines()[0]],
                hint="install the JAX build for that hardware, or choose another device",
            ) from None

    @property
    def capabilities(self) -> Capabilities:
        own = super().capabilities
        nvidia = own.family in ("gpu", "cuda")
        shifted = (Form.POINTWISE_MATMUL, Form.DEPTHWISE_SHIFTS)
        on_cpu = {linear: (Form.MATVEC,)} | dict.fromkeys((conv, conv_input_grad, conv_weight_grad), shifted)
        return replace(
            own,
            families=("gpu", "nvidia") if nvidia else own.families,
            recompiles=True,
            donates=True,
            autodiff="native",
            memory="library",
            prefers=on_cpu if own.family == "cpu" else {},
        )

    def branches(self, options: BuildOptions) -> bool:
        return True

    def identity(self) -> tuple[Any, ...]:
        mesh = None if self.mesh is None else (dict(self.mesh.shape), [str(d) for d in self.mesh.devices.flat])
        return (*super().identity(), str(mesh))

    @classmethod
    def diagnose(cls) -> dict[str, str]:
        """For ``mithril doctor``."""
        return {
            "devices": ", ".join(str(d) for d in jax.devices()),
            "threads": f"{process_config.threads()}, one pool for the process (NPROC, or JaxBackend(num_threads=))",
        }

    # -- building ----------------------------------------------------------------------------------------------------
    def table(self, options: BuildOptions | None = None) -> Lowerings:
        """The lowering table; with ``unroll`` its loops write several steps out."""
        made = super().table(options)
        steps = dict(options.settings.get("jax_options", {})).get("unroll") if options is not None else None
        if steps is None:
            return made
        known = self._unrolled.get((id(made), steps))
        if known is None:
            known = self._unrolled[id(made), steps] = unrolled(made, steps)
        return known

    def build(self, graph: Graph, options: BuildOptions | None = None) -> SourceExecutable:
        options = options or BuildOptions()
        parts = pipeline_parallel.stages_of(self.mesh, options, self.jax_device.platform)
        if parts is None:
            return self.build_whole(graph, options)
        return pipeline_parallel.build(self._build_stage, graph, options, parts)

    def _build_stage(self, mesh: Mesh, graph: Graph, options: BuildOptions) -> SourceExecutable:
        stage = copy.copy(self)
        stage.mesh = mesh
        return stage.build_whole(graph, options)

    def build_whole(self, graph: Graph, options: BuildOptions) -> SourceExecutable:
        """One program, all of which runs on every device of the mesh."""
        return super().build(graph, options)

    def build_with_gradients(
        self, graph: Graph, of: Sequence[str], wrt: Sequence[str], options: BuildOptions | None = None
    ) -> SourceExecutable:
        if (
            options is not None
            and pipeline_parallel.stages_of(self.mesh, options, self.jax_device.platform) is not None
        ):
            raise OptionError(
                "autodiff='native' contradicts a pipeline",
                facts=["its stages are cut from the graph, which has no gradients then"],
                hint="leave autodiff out",
            )
        return super().build_with_gradients(graph, of, wrt, options)

    def loaded(self, source: Source) -> Forward:
        """Constants of 64 bits keep them, whatever the process has switched on; each states its dtype."""
        with jax.enable_x64(True):
            return super().loaded(source)

    def finish(self, forward: Forward, graph: Graph, options: BuildOptions) -> Forward:
        if options.semantics == "native":
            for name in sorted({node.op.name for node, _ in iterate(graph)} & set(DIFFERENT)):
                options.decisions.record("choice", f"'{name}' as JAX has it: {DIFFERENT[name]}")
        running = read(options, self.jax_device.platform)
        if self.pre_allocate is not None and self.jax_device.platform == "cpu":
            options.decisions.record(
                "ignored", f"pre_allocate={self.pre_allocate}: XLA takes memory in advance on GPUs only"
            )
        if isinstance(forward, Differentiated):
            graph = described(graph, forward.of, forward.wrt)
        return runner(forward, graph, running, options, self._shares(graph, options))

    def _shares(self, graph: Graph, options: BuildOptions) -> mesh_execution.Shares | None:
        """How arguments are split over the mesh; ``pjit=True`` without one takes all devices there are."""
        mesh = self.mesh
        wanted = bool(options.settings.get("pjit", False))
        if wanted and mesh is None:
            everything = jax.devices(self.jax_device.platform)
            if len(everything) > 1:
                mesh = mesh_execution.make(self.jax_device.platform, (len(everything),))
            else:
                options.decisions.record("ignored", f"pjit=True: there is one device to share work, {everything[0]}")
        if mesh is None:
            kind = options.settings.get("parallelism")
            if kind is not None:
                options.decisions.record(
                    "ignored", f"parallelism='{kind}': JaxBackend(device_mesh=(4,)) says over how many devices"
                )
            return None
        if options.jit is False:
            raise OptionError(
                "jit=False contradicts a mesh of devices", facts=["XLA's compiler puts in what devices exchange"]
            )
        return mesh_execution.Shares(mesh, graph, options.settings, options.decisions)

    def differentiated(self, forward: Forward, of: tuple[str, ...], wrt: tuple[str, ...]) -> Forward:
        return Differentiated(forward, of, wrt)

    # -- memory ------------------------------------------------------------------------------------------------------
    def exact_memory(self, executable: Any, sizes: Mapping[str, int]) -> tuple[int, str] | None:
        found = analysis(executable, sizes)
        if found is None:
            return None
        return found.temp_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes, "XLA"

    def measured_memory(self, run: Callable[[], Any], executable: Any = None) -> int:
        """XLA's own analysis of the program: it allocates outside of all that Python can count."""
        self.synchronize(run())
        exact = None
        if executable is not None and all(i.type.is_static for i in executable.graph.inputs):
            exact = self.exact_memory(executable, {})
        return exact[0] if exact is not None else super().measured_memory(run)

    # -- arrays ------------------------------------------------------------------------------------------------------
    def array(self, data: Any, dtype: Any = None) -> jax.Array:
        if isinstance(data, jax.Array) and dtype is None:
            return mesh_execution.put(data, self.placement)
        made = as_numpy(self.shared(data) if _only_dlpack(data) else data, self.dtype)
        if dtype is not None:
            made = made.astype(as_dtype(dtype).numpy)
        with jax.enable_x64(True) if made.dtype.itemsize == 8 else nullcontext():
            return mesh_execution.put(_private(made), self.placement)  # jnp.asarray would compile a program

    def shared(self, data: Any) -> jax.Array:
        """Another framework's array in the same memory where that is possible: nobody may write into it any more."""
        if isinstance(data, np.ndarray):
            return self.array(data)
        source = data.detach() if hasattr(data, "detach") else data
        wide = str(source.dtype).endswith("64")
        with jax.enable_x64(True) if wide else nullcontext():
            return jax.device_put(jax.dlpack.from_dlpack(source), self.placement)

    def to_numpy(self, array: Any) -> np.ndarray[Any, Any]:
        if isinstance(array, jax.Array) and not array.is_fully_addressable:
            from jax.experimental.multihost_utils import process_allgather

            return np.asarray(process_allgather(array, tiled=True))
        return np.asarray(array)

    def is_array(self, x: Any) -> bool:
        return isinstance(x, jax.Array)

    def build_step(self, graph: Graph) -> SourceExecutable:
        """Jitted, as one dispatch per primitive would be measured otherwise."""
        return self.build(graph, BuildOptions(jit=True))

    def synchronize(self, value: Any = None) -> None:
        if value is not None:
            jax.block_until_ready(value)


def _private(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A copy that nobody writes into: JAX reads later, or forever, and takes memory of this alignment as its own."""
    raw = np.empty(array.nbytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    made: np.ndarray[Any, Any] = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    made[...] = array
    return made


def _only_dlpack(data: Any) -> bool:
    """An array whose dtype, bfloat16 say, its framework cannot tell NumPy."""
    known = isinstance(data, (jax.Array, np.ndarray, np.generic)) or hasattr(data, "detach")
    return hasattr(data, "__dlpack__") and not known


class Differentiated:
    """A generated function with gradients by JAX; cotangents come as further inputs."""

    def __init__(self, forward: Forward, of: tuple[str, ...], wrt: tuple[str, ...]) -> None:
        self.forward, self.of, self.wrt = forward, of, wrt

    def __call__(self, params: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
        def outputs(wanted: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
            made = self.forward(
                {name: wanted.get(name, x) for name, x in params.items()},
                {name: wanted.get(name, x) for name, x in inputs.items()},
            )
            return {name: made[name] for name in self.of}, made

        wanted = {name: params[name] if name in params else inputs[name] for name in self.wrt}
        _, pull, made = jax.vjp(outputs, wanted, has_aux=True)
        (found,) = pull({name: inputs[cotangent_name(name)] for name in self.of})
        return {**made, **{result_name("gradient", name): found[name] for name in self.wrt}}
