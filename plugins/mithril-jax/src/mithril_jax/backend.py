"""``ml.JaxBackend``: generated JAX source, compiled by XLA."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, ClassVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import mithril as ml
from mithril import ops
from mithril.backend import (
    Backend,
    BuildOptions,
    Call,
    Capabilities,
    ExactSizesRequired,
    Form,
    Forward,
    LazyGraph,
    Lowerings,
    Source,
    SourceBackend,
    SourceExecutable,
    as_numpy,
    is_integer,
    with_stored_operands,
)
from mithril.graph import (
    BackendError,
    Decisions,
    Graph,
    Node,
    OptionError,
    Registry,
    UnsupportedError,
    cotangent_name,
    dtype as as_dtype,
    result_name,
)
from mithril.ops import conv, conv_input_grad, conv_weight_grad, linear, max_pool_grad
from mithril_jax import held_weights, helpers, process_config
from mithril_jax.execution import analysis, read, runner, with_gradient_signature, with_precision
from mithril_jax.half_products import with_contracted_rows
from mithril_jax.lowering import (
    is_wide,
    table,
    with_blocked_attention,
    with_differentiable_loops,
    with_ring_attention,
    with_rows_by_device,
    with_unroll,
)
from mithril_jax.mesh import hybrid, mesh_execution, own_sums, pipeline_parallel
from mithril_jax.mesh.by_device import ByDevice
from mithril_jax.scanned_layers import with_scanned_layers

native_table = table.extend()
DIFFERENT: Registry[str] = Registry(
    "native semantics",
    {
        "argsort": "descending order puts nan first",
        "cast": "a float outside an integer's range, or nan, converts as in XLA",
        "floordiv": "an integer over 0 is -1 or less",
        "mod": "an integer modulo 0 is computed as in XLA",
        "pow": "a negative integer exponent is computed as in XLA",
        "sort": "descending order puts nan first",
        "take": "an index out of range returns nan, or the largest integer",
        "take_along_axis": "an index out of range returns nan, or the largest integer",
    },
)


@native_table.function("take", "take_along_axis")
def _take(call: Call) -> str:
    return f"jnp.{call.node.op.name}({call.x}, jnp.asarray({call.indices}), {call.axis})"


@native_table.function("floordiv", "mod", "pow", when=is_integer)
def _arithmetic(call: Call) -> str:
    name = {"floordiv": "floor_divide", "mod": "mod", "pow": "power"}[call.node.op.name]
    return f"jnp.{name}({call.array('a')}, {call.array('b')})"


@native_table.function("cast")
def _cast(call: Call) -> str:
    return f"jnp.asarray({call.x}).astype({call.dtype()})"


@native_table.function("argsort", "sort")
def _sort(call: Call) -> str:
    sorted_code = f"jnp.{call.node.op.name}({call.x}, axis={call.axis}, stable=True, descending={call.descending})"
    return f"{sorted_code}.astype(jnp.int32)" if call.node.op is ops.argsort else sorted_code


def with_tpu_rows(base: Lowerings) -> Lowerings:
    """Return the table with the rows of TPUs."""
    table = base.extend()
    table.helper(helpers.max_pool_grad_by_element, op="max_pool_grad", when=lambda node: not is_wide(node))
    return table


ALIGNMENT = 64
OWN_COMPARISONS = frozenset({max_pool_grad})  # compares elements with the maximum of their window
TPU_TABLES = {"portable": with_tpu_rows(table), "native": with_tpu_rows(native_table)}
CPU_TABLES = {"portable": with_blocked_attention(table), "native": with_blocked_attention(native_table)}
PLATFORMS = {"gpu": "cuda", "cuda": "cuda", "cpu": "cpu", "tpu": "tpu"}


class JaxBackend(SourceBackend):
    """Backend whose arrays are JAX arrays, on one device or over a mesh; XLA compiles programs unless ``jit=False``.

    ``device_mesh=(4,)`` splits batches over four devices; ``(2, 4)`` batches over two and weights over four; a third
    number is the number of pipeline stages. ``num_threads``, ``pre_allocate`` (reserve most of a GPU's memory) and a
    mesh of simulated devices are settings of the process, which JAX reads when it is first used.
    """

    name = "jax"
    devices = ("cpu", "gpu", "cuda", "tpu")
    unforkable = "JAX"
    tables: ClassVar[Mapping[str, Lowerings]] = {"portable": table, "native": native_table}
    differences: ClassVar[Mapping[str, str]] = DIFFERENT
    embedded_copies: ClassVar[float] = 3.4  # measured 3.0 to 3.8: arrays, XLA's literals, those folded by its compiler

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
            self.mesh = self._mesh(device, mesh_execution.parse_mesh(device_mesh))
        super().__init__(device=device or jax.default_backend(), dtype=dtype, precision=precision)
        self.jax_device = self._find(self.device)
        self._tables: dict[tuple[int, int | None, bool, int], Lowerings] = {}
        self.placement: Any = self.jax_device if self.mesh is None else NamedSharding(self.mesh, PartitionSpec())

    def _mesh(self, device: str | None, sizes: tuple[int, ...]) -> Mesh:
        platform, _, number = (device or "").partition(":")
        if number:
            raise OptionError(
                f"device='{device}' is a single device, but device_mesh={sizes} requires several",
                hint=f"use device='{platform}'",
            )
        return mesh_execution.make(PLATFORMS.get(platform), sizes)

    def _find(self, device: str) -> Any:
        platform, _, number = device.partition(":")
        try:
            local_devices = jax.local_devices(backend=PLATFORMS[platform])
            return local_devices[int(number) if number else 0]
        except (RuntimeError, IndexError, ValueError) as error:
            raise BackendError(
                f"JAX has no device '{device}' here",
                facts=[f"available: {', '.join(str(d) for d in jax.devices())}", str(error).splitlines()[0]],
                hint="install the JAX build for that hardware, or choose another device",
            ) from None

    @property
    def capabilities(self) -> Capabilities:
        base = super().capabilities
        nvidia = base.family in ("gpu", "cuda")
        shifted = (Form.POINTWISE_MATMUL, Form.DEPTHWISE_SHIFTS)
        on_cpu = {linear: (Form.MATVEC,)} | dict.fromkeys((conv, conv_input_grad, conv_weight_grad), shifted)
        return replace(
            base,
            families=("gpu", "nvidia") if nvidia else base.families,
            recompiles=True,
            donates=True,
            autodiff="native",
            memory="library",
            images="compiler",
            prefers=on_cpu if base.family == "cpu" else {},
        )

    def branches(self, options: BuildOptions) -> bool:
        return True

    def identity(self) -> tuple[Any, ...]:
        mesh = None if self.mesh is None else (dict(self.mesh.shape), [str(d) for d in self.mesh.devices.flat])
        return (*super().identity(), str(mesh))

    @classmethod
    def diagnose(cls) -> dict[str, str]:
        """Return the devices and the size of the thread pool, for ``mithril doctor``."""
        return {
            "devices": ", ".join(str(d) for d in jax.devices()),
            "threads": f"{process_config.threads()}, one pool for the process (NPROC, or JaxBackend(num_threads=))",
        }

    # -- building ----------------------------------------------------------------------------------------------------
    def table(self, options: BuildOptions | None = None) -> Lowerings:
        """Return the lowering table; the option ``unroll`` unrolls its loops."""
        base = super().table(options)
        steps = dict(options.settings["jax_options"]).get("unroll") if options is not None else None
        axes = self.mesh_axes(options)
        is_divided = axes.get("data", 1) > 1
        in_context = options is not None and options.settings.get("parallelism") == "context"
        positions = axes.get("model", 1) if in_context else 1
        key = (id(base), steps, is_divided, positions)
        if key not in self._tables:
            divided = with_rows_by_device(base) if is_divided else base
            divided = with_ring_attention(divided, positions) if positions > 1 else divided
            self._tables[key] = divided if steps is None else with_unroll(divided, steps)
        return self._tables[key]

    def differentiable_table(self, options: BuildOptions) -> Lowerings:
        return with_differentiable_loops(self.table(options))

    def mesh_axes(self, options: BuildOptions | None) -> Mapping[str, int]:
        """Return the axes of the mesh over which programs are divided, and their sizes."""
        if self.mesh is None and options is not None and options.settings["pjit"]:
            return {"data": len(jax.devices(self.jax_device.platform))}
        return dict(self.mesh.shape) if self.mesh is not None else {}

    def has_whole_parameters(self, options: BuildOptions) -> bool:
        return super().has_whole_parameters(options) and not self.mesh_axes(options)

    def lowers(self, node: Node, options: BuildOptions | None = None) -> bool:
        if node.op in (ops.expert_matmul, ops.expert_weight_grad) and self.mesh_axes(options).get("model", 1) > 1:
            return False  # divided weights would be summed over devices for each block of rows
        return super().lowers(node, options)

    def base_table(self, semantics: str) -> Lowerings:
        if "tpu" in self.capabilities.families:
            return TPU_TABLES[semantics]
        return CPU_TABLES[semantics] if self.capabilities.family == "cpu" else super().base_table(semantics)

    def build(self, graph: Graph, options: BuildOptions | None = None) -> SourceExecutable:
        options = options or BuildOptions()
        mesh = pipeline_parallel.pipeline_mesh(self.mesh, options, self.jax_device.platform)
        if mesh is None:
            by_device = self._by_device(graph, options)
            return self.build_whole(graph, options) if by_device is None else by_device
        if not all(i.type.is_static for i in graph.arguments):
            raise ExactSizesRequired("a pipeline is cut into stages for each size")
        backend = copy.copy(self)
        backend.mesh = mesh
        specs = mesh_execution.ArgumentShardings(mesh, graph, options.settings, Decisions()).specs
        return backend.build_pipeline(graph, options, dict(mesh.shape), specs)

    def build_whole(self, graph: Graph, options: BuildOptions) -> SourceExecutable:
        """Build one program without pipeline stages; one with embedded weights passes them as arguments."""
        graph = with_stored_operands(graph, OWN_COMPARISONS)
        is_bound = any(i.tags.get("bound") for i in graph.with_role("param"))
        reduced, weights = held_weights.extracted(graph) if is_bound or self._holds(options) else (graph, {})
        if text := held_weights.orders(weights.values()):
            options.decisions.record("choice", text)
        return self._holding(super().build(reduced, options), graph, weights)

    def packed_weights(
        self, executable: Any, options: BuildOptions, weights: dict[str, Any], forms: MutableMapping[str, Any]
    ) -> dict[str, Any]:
        return held_weights.arranged(executable.graph, weights)

    def _holds(self, options: BuildOptions) -> bool:
        """Whether a program passes weights as arguments; a source file contains them instead."""
        return options.static and options.file_path is None

    def _holding(
        self, executable: SourceExecutable, graph: Graph | LazyGraph, weights: Mapping[str, held_weights.Held]
    ) -> SourceExecutable:
        """Let a program pass the weights that it holds; its graph contains them."""
        if not weights:
            return executable
        shardings = getattr(getattr(executable.call, "jitted_call", executable.call), "shardings", None)

        def placed(name: str, weight: held_weights.Held) -> jax.Array:
            if shardings is None:
                return weight.placed(self.array, self.placement)
            sharding = shardings.sharding(name)
            return weight.placed(lambda x: mesh_execution.put(np.asarray(x, order="C"), sharding), sharding)

        arrays = {name: placed(name, weight) for name, weight in weights.items()}
        embedded = sum(x.nbytes for x in executable.arrays.values())
        executable.call = held_weights.HeldCall(executable.call, arrays, embedded)
        executable.forward = held_weights.HeldCall(executable.forward, arrays, embedded)
        executable._graph = graph if isinstance(graph, LazyGraph) else LazyGraph(graph)
        return executable

    def revive(self, parts: Mapping[str, bytes], graph: LazyGraph, options: BuildOptions) -> SourceExecutable:
        if not self._holds(options):
            return super().revive(parts, graph, options)
        reduced, weights = held_weights.extracted(with_stored_operands(graph.get(), OWN_COMPARISONS))
        return self._holding(super().revive(parts, LazyGraph(reduced), options), graph, weights)

    def build_pipeline(
        self, graph: Graph, options: BuildOptions, axes: Mapping[str, int], specs: Mapping[str, Any]
    ) -> SourceExecutable:
        """Build one program for all stages of a pipeline."""
        if options.settings["scan_layers"]:
            options.decisions.record("ignored", "scan_layers=True: the layers of a pipeline are divided into stages")

        def build_task(task: Graph) -> tuple[str, Forward]:
            task = self.decomposed(task, options)  # gradients of stages contain composites
            text, arrays = SourceBackend.generate(self, with_stored_operands(task, OWN_COMPARISONS), options)
            return text, self.loaded(Source(text, arrays))

        source, forward = pipeline_parallel.pipelined(build_task, graph, options, axes, specs)
        run = self.finish(forward, with_stored_operands(graph, OWN_COMPARISONS), options)
        executable = SourceExecutable(graph, source, forward, run)
        executable.differentiated = True  # several generated functions cannot be cached as one
        return executable

    def _by_device(self, graph: Graph, options: BuildOptions) -> SourceExecutable | None:
        """Build a program of which each device runs its part, if that saves exchanges of gradients."""
        settings = options.settings
        # mithril-parallel owns the option, and divides graphs.
        if self.mesh is None or self.mesh.size == 1 or "parallelism" not in settings:
            return None
        if settings["parallelism"] in ("hsdp", "expert"):
            return self._by_group(graph, options, self.mesh)
        if self.mesh.size > self.mesh.shape["data"] or settings["parallelism"] not in (None, "data"):
            return None
        if not all(i.type.is_static for i in graph.arguments):
            return None
        shardings = mesh_execution.ArgumentShardings(self.mesh, graph, settings, Decisions())
        division = own_sums.partitioned(graph, self.mesh.size, shardings.padded_specs(graph))
        return None if division is None else self._divided(graph, options, *division)

    def _by_group(self, graph: Graph, options: BuildOptions, mesh: Mesh) -> SourceExecutable | None:
        """Build a program of hsdp, which each group of devices runs for its rows as a fully sharded one, or of experts.

        Left to XLA, gradients would be summed over all devices at once, and no group would exchange its parts alone;
        rows would travel to all devices instead of those of their experts.
        """
        if not all(i.type.is_static for i in graph.arguments):
            raise ExactSizesRequired("rows are divided over groups of devices for each size")
        if any(i.tags.get("bound") for i in graph.with_role("param")) or self._holds(options):
            return None
        if options.settings["parallelism"] == "hsdp":
            local = hybrid.partitioned(mesh, graph, options.settings)
        else:
            shardings = mesh_execution.ArgumentShardings(mesh, graph, options.settings, Decisions())
            local = ml.partition_graph(graph, dict(mesh.shape), shardings.padded_specs(graph), exchanges_rows=True)
        return self._divided(graph, options, local, frozenset())

    def _divided(self, graph: Graph, options: BuildOptions, local: Any, sums: frozenset[str]) -> SourceExecutable:
        part = with_stored_operands(self.decomposed(local.graph, options), OWN_COMPARISONS)
        source = Source(*SourceBackend.generate(self, self._scanned(part, options), options))
        forward = ByDevice(local, sums, self.loaded(source))
        executable = SourceExecutable(graph, source, forward, self.finish(forward, graph, options))
        executable.differentiated = True  # the generated function alone is not the program
        return executable

    def build_with_gradients(
        self, graph: Graph, of: Sequence[str], wrt: Sequence[str], options: BuildOptions | None = None
    ) -> SourceExecutable:
        if (
            options is not None
            and pipeline_parallel.pipeline_mesh(self.mesh, options, self.jax_device.platform) is not None
        ):
            raise OptionError(
                "autodiff='native' conflicts with a pipeline",
                facts=["the graph is split into stages together with its gradients"],
                hint="omit autodiff",
            )
        return super().build_with_gradients(graph, of, wrt, options)

    def differentiable(self, graph: Graph, options: BuildOptions | None = None) -> Forward:
        if self.mesh is not None:
            raise UnsupportedError(
                "a program over several devices has no pure function",
                hint="compile without device_mesh=, and shard the function by jax.jit(f, in_shardings=...)",
            )
        forward = super().differentiable(graph, options)
        return with_precision(forward, read(options or BuildOptions(), self.jax_device.platform).precision)

    def generate(self, graph: Graph, options: BuildOptions, gradients: bool = False) -> tuple[str, Mapping[str, Any]]:
        graph = with_contracted_rows(graph) if self.capabilities.family == "cpu" else graph
        return super().generate(self._scanned(self.constrained(graph, options), options), options, gradients)

    def _scanned(self, graph: Graph, options: BuildOptions) -> Graph:
        """Return the graph with equal layers as loops, if the option ``scan_layers`` requests it."""
        return with_scanned_layers(graph, options.decisions) if options.settings["scan_layers"] else graph

    def constrained(self, graph: Graph, options: BuildOptions) -> Graph:
        """Return the graph with the shardings of its activations as operations, where XLA selects others."""
        kind = options.settings.get("parallelism")
        if self.mesh is not None and kind == "sequence":
            return mesh_execution.with_sequences_in_parts(self.mesh, graph, options.settings, options.decisions)
        if self.mesh is None or kind != "fsdp":
            return graph
        return mesh_execution.constrained(self.mesh, graph, options.settings)

    def loaded(self, source: Source) -> Forward:
        """Load a source with 64-bit types enabled, so that 64-bit constants keep their dtype."""
        with jax.enable_x64(True):
            return super().loaded(source)

    def check_options(self, options: BuildOptions) -> None:
        super().check_options(options)
        read(options, self.jax_device.platform)

    def finish(self, forward: Forward, graph: Graph, options: BuildOptions) -> Forward:
        running = read(options, self.jax_device.platform)
        if self.pre_allocate is not None and self.jax_device.platform == "cpu":
            options.decisions.record(
                "ignored", f"pre_allocate={self.pre_allocate}: XLA preallocates memory on GPUs only"
            )
        if isinstance(forward, Differentiated):
            graph = with_gradient_signature(graph, forward.of, forward.wrt)
        sums = forward.sums if isinstance(forward, ByDevice) else frozenset()
        return runner(forward, graph, running, options, self._argument_shardings(graph, options, sums))

    def _argument_shardings(
        self, graph: Graph | LazyGraph, options: BuildOptions, sums: frozenset[str]
    ) -> mesh_execution.ArgumentShardings | None:
        """Return the shardings of arguments over the mesh; ``pjit=True`` without a mesh uses all devices."""
        mesh = self.mesh
        use_all = options.settings["pjit"]
        if use_all and mesh is None:
            devices = jax.devices(self.jax_device.platform)
            if len(devices) > 1:
                mesh = mesh_execution.make(self.jax_device.platform, (len(devices),))
            else:
                options.decisions.record("ignored", f"pjit=True: there is one device only, {devices[0]}")
        if mesh is None:
            kind = options.settings.get("parallelism")
            if kind is not None:
                options.decisions.record(
                    "ignored", f"parallelism='{kind}' requires the number of devices: JaxBackend(device_mesh=(4,))"
                )
            return None
        if options.jit is False:
            raise OptionError(
                "jit=False conflicts with a mesh of devices",
                facts=["XLA's compiler inserts the collectives"],
                hint="omit jit=False, or compile without device_mesh=",
            )
        complete = graph.get() if isinstance(graph, LazyGraph) else graph  # a cached program's is parsed
        return mesh_execution.ArgumentShardings(mesh, complete, options.settings, options.decisions, sums)

    def differentiated(self, forward: Forward, of: tuple[str, ...], wrt: tuple[str, ...]) -> Forward:
        return Differentiated(forward, of, wrt)

    # -- memory ------------------------------------------------------------------------------------------------------
    def embedded_weights(self, executable: Any, size: int) -> tuple[Sequence[Any], int]:
        call = getattr(executable, "call", None)
        if not isinstance(call, held_weights.HeldCall):
            # XLA copies the constants of the module.
            return Backend.embedded_weights(self, executable, size)
        return [*call.weights.values()], round(self.embedded_copies * call.embedded)

    def exact_memory(self, executable: Any, sizes: Mapping[str, int]) -> tuple[int, str] | None:
        usage = analysis(executable, sizes)
        if usage is None:
            return None
        return usage.temp_size_in_bytes + usage.output_size_in_bytes - usage.alias_size_in_bytes, "XLA"

    def measured_memory(self, run: Callable[[], Any], executable: Any = None) -> int:
        """Return the memory by XLA's analysis of the program: its allocations are invisible to Python."""
        self.synchronize(run())
        exact = None
        if executable is not None and all(i.type.is_static for i in executable.graph.inputs):
            exact = self.exact_memory(executable, {})
        return exact[0] if exact is not None else super().measured_memory(run)

    # -- arrays ------------------------------------------------------------------------------------------------------
    def array(self, data: Any, dtype: Any = None) -> jax.Array:
        if isinstance(data, jax.Array) and dtype is None:
            return mesh_execution.put(data, self.placement)
        array = as_numpy(self.shared(data) if _only_dlpack(data) else data, self.dtype)
        if dtype is not None:
            array = array.astype(as_dtype(dtype).numpy)
        return mesh_execution.put(_defensive_copy(array), self.placement)  # jnp.asarray would compile a program

    def to_main_memory(self, array: Any) -> np.ndarray[Any, Any] | None:
        if not isinstance(array, jax.Array):
            return super().to_main_memory(array)
        if any(device.platform != "cpu" for device in array.devices()):
            return None
        if array.is_fully_addressable:
            return np.asarray(array)
        # Values of other processes are not here; checks of indices look at those of this one.
        return np.concatenate([np.atleast_1d(np.asarray(shard.data)) for shard in array.addressable_shards])

    def copied(self, array: Any) -> Any:
        if isinstance(array, jax.Array):
            return jax.device_put(array, array.sharding, may_alias=False)
        return super().copied(array)

    def from_local_rows(self, rows: np.ndarray[Any, Any]) -> jax.Array:
        """Return the array of the rows of all processes, split over ``data`` if that has enough devices."""
        assert self.mesh is not None
        axes = "data" if self.mesh.shape["data"] % jax.process_count() == 0 else self.mesh.axis_names
        return jax.make_array_from_process_local_data(NamedSharding(self.mesh, PartitionSpec(axes)), rows)

    def shared(self, data: Any) -> jax.Array:
        """Share the buffer of another framework's array where possible; neither owner may modify it afterwards."""
        if isinstance(data, np.ndarray):
            return self.array(data)
        source = data.detach() if hasattr(data, "detach") else data
        is_64_bit = str(source.dtype).endswith("64")
        with jax.enable_x64(True) if is_64_bit else nullcontext():
            return jax.device_put(jax.dlpack.from_dlpack(source), self.placement)

    def to_numpy(self, array: Any) -> np.ndarray[Any, Any]:
        if not isinstance(array, jax.Array) or array.is_fully_addressable:
            return np.asarray(own_sums.complete(array))
        # Also of the program that computes the array, which may still run.
        with mesh_execution.explained(is_remote=True):
            array = own_sums.complete(array)
            if array.is_fully_replicated:  # no other process needs to take part
                return np.asarray(array.addressable_data(0))
            from jax.experimental.multihost_utils import process_allgather

            return np.asarray(process_allgather(array, tiled=True))

    def is_array(self, x: Any) -> bool:
        return isinstance(x, jax.Array)

    def build_step(self, graph: Graph) -> SourceExecutable:
        """Build a jitted step, since otherwise a measurement would include one dispatch per primitive."""
        return self.build(graph, BuildOptions(jit=True))

    def synchronize(self, value: Any = None) -> None:
        if value is not None:
            jax.block_until_ready(value)


def _defensive_copy(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Copy the array: JAX reads asynchronously and may alias host memory of this alignment."""
    raw = np.empty(array.nbytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    result: np.ndarray[Any, Any] = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    result[...] = array
    return result


def _only_dlpack(data: Any) -> bool:
    """Whether the array supports DLPack only: NumPy cannot represent all its dtypes, such as bfloat16."""
    converts_directly = isinstance(data, (jax.Array, np.ndarray, np.generic)) or hasattr(data, "detach")
    return hasattr(data, "__dlpack__") and not converts_directly


class Differentiated:
    """A generated function that also returns gradients by JAX; cotangents are additional inputs."""

    def __init__(self, forward: Forward, of: tuple[str, ...], wrt: tuple[str, ...]) -> None:
        self.forward, self.of, self.wrt = forward, of, wrt
        self.generated = (forward,)

    def __call__(self, params: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
        def outputs(variables: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
            results = self.forward(
                {name: variables.get(name, x) for name, x in params.items()},
                {name: variables.get(name, x) for name, x in inputs.items()},
            )
            return {name: results[name] for name in self.of}, results

        variables = {name: params[name] if name in params else inputs[name] for name in self.wrt}
        _, pull, results = jax.vjp(outputs, variables, has_aux=True)
        (gradients,) = pull({name: inputs[cotangent_name(name)] for name in self.of})
        return {**results, **{result_name("gradient", name): gradients[name] for name in self.wrt}}
