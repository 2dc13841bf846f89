"""``ml.TorchBackend``: generated PyTorch source, run eagerly or compiled by ``torch.compile``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
import torch

from mithril import ops
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
    nbytes,
    with_stored_operands,
)
from mithril.graph import ALL, BackendError, DType, Graph, Node, UnsupportedError, decompose, dtype as as_dtype
from mithril.ops import conv_input_grad
from mithril.system import launched_task
from mithril_torch import stored  # noqa: F401  # defines the operation of barriers in compiled programs
from mithril_torch.autograd import DifferentiableProgram, Differentiated
from mithril_torch.execution import RunOptions, read, runner
from mithril_torch.fusion import (
    native_kernels,  # noqa: F401  # add their rows to the table
    packed_kernels,
)
from mithril_torch.fusion.attention_gradients import join_attentions
from mithril_torch.fusion.batch_statistics import with_native_statistics
from mithril_torch.fusion.foreach import with_lists
from mithril_torch.fusion.image_order import with_image_order
from mithril_torch.fusion.in_place import with_overwritten_operands
from mithril_torch.fusion.norm_gradients import join_norms
from mithril_torch.fusion.paired_ops import pair_operations
from mithril_torch.fusion.subgraph_fusion import fuse_subgraphs
from mithril_torch.lowering import table
from mithril_torch.native_semantics import DIFFERENT, native_table
from mithril_torch.parallel import meshes, own_gradients, program_parts

OWN_COMPARISONS = frozenset({ops.max, ops.min})  # PyTorch's own gradients compare the operand with the result
GROUPED = frozenset({ops.expert_matmul, ops.expert_weight_grad})
MISSING = ("uint16", "uint64")  # PyTorch stores these but supports hardly any operation on them


class TorchBackend(SourceBackend):
    """Backend whose arrays are PyTorch tensors, on one device or sharded over the processes of a mesh.

    ``device_mesh=(4,)`` splits batches over four processes, ``(2, 4)`` batches over two and weights over four; a
    third number is the number of pipeline stages. Under ``torchrun`` the processes of the mesh are the launched
    ones; otherwise the backend starts them: each runs the script from its beginning.

    Programs run eagerly unless ``jit=True``: on a CPU ``torch.compile`` takes seconds and gains little.
    """

    name = "torch"
    devices = ("cpu", "cuda", "mps")
    dtypes: ClassVar[frozenset[DType]] = frozenset(d for d in ALL if d.name not in MISSING)
    tables: ClassVar[Mapping[str, Lowerings]] = {"portable": table, "native": native_table}
    differences: ClassVar[Mapping[str, str]] = DIFFERENT

    def __init__(
        self,
        *,
        device: str | None = None,
        dtype: Any = None,
        precision: str | None = None,
        device_mesh: int | Sequence[int] | None = None,
        cudnn_benchmark: bool | None = None,
        enable_amp: bool | None = None,
    ) -> None:
        requested = device or ("cuda" if torch.cuda.is_available() else "cpu")
        super().__init__(device={"gpu": "cuda"}.get(requested, requested), dtype=dtype, precision=precision)
        self.torch_device = self._find(self.device)
        self.cudnn_benchmark = cudnn_benchmark
        self.enable_amp = enable_amp
        self.passes = ("mixed-precision",) if enable_amp else ()
        self.device_mesh = None if device_mesh is None else meshes.parse_mesh(device_mesh)

    def _find(self, device: str) -> torch.device:
        try:
            if device == "cuda" and (task := launched_task()) is not None:
                # Before the first tensor, which would select GPU 0.
                torch.cuda.set_device(task.local_rank)
            torch.empty(0, device=device)
            return torch.device(device)
        except (RuntimeError, AssertionError) as error:
            raise BackendError(
                f"PyTorch has no device '{device}' here",
                facts=[str(error).splitlines()[0]],
                hint="install the PyTorch build for that hardware, or choose another device",
            ) from None

    @property
    def capabilities(self) -> Capabilities:
        families = {"cuda": ("gpu", "nvidia"), "mps": ("apple",), "cpu": ("cpu", "mobile")}  # mobile: .pte files
        base = super().capabilities
        return replace(
            base,
            families=families.get(base.family, base.families),
            symbolic=self.device_mesh is None,  # sharding a batch requires static sizes
            autodiff="native",
            threads=True,
            estimate_error=(-0.65, 0.26),
            images="either",
            prefers={conv_input_grad: (Form.POINTWISE_MATMUL,)} if base.family == "cpu" else {},
        )

    def branches(self, options: BuildOptions) -> bool:
        """Whether branches are allowed: torch.compile and torch.fx capture accept only programs without them."""
        settings = options.settings
        captured = settings["torch_fx"] or settings["torch_options"].get("graph_mode")
        return not (options.jit or settings["torch_dynamo"] or captured)

    def lowers(self, node: Node, options: BuildOptions | None = None) -> bool:
        if node.op.name == program_parts.GRADIENTS:
            return options is not None and self.differentiates(options)
        if node.op.surrogate and options is not None and self.differentiates(options):
            return True  # the gradient of its decomposition is another one
        if node.op is ops.expert_mixture and self.device_mesh is not None:
            return True  # divided as a whole over the processes
        if node.op in GROUPED and options is not None and not self.branches(options):
            return False  # the sizes of groups are known at run time only
        return super().lowers(node, options)

    # -- building ----------------------------------------------------------------------------------------------------
    def decomposed(self, graph: Graph, options: BuildOptions) -> Graph:
        return super().decomposed(with_native_statistics(graph) if options.fuses else graph, options)

    def build(self, graph: Graph, options: BuildOptions | None = None) -> SourceExecutable:
        options = options or BuildOptions()
        mesh = meshes.mesh_for(self, options)
        if mesh is not None:
            return self._build_on(mesh, graph, options)
        # inductor computes a value again where it is read, by other code than before, so that a
        # comparison of a value with itself could fail: gradients of max were wrong with jit=True
        # (commit c54b719f).
        if _compiles(options):
            graph = with_stored_operands(graph)
        return super().build(graph, options)

    def _build_on(self, mesh: tuple[int, ...], graph: Graph, options: BuildOptions) -> SourceExecutable:
        from mithril_torch.parallel import program
        from mithril_torch.parallel.tensor_parallel import WITHOUT_RULE, needs_complete

        divides_weights = mesh[1] > 1

        def load(part: Graph, differentiated: bool) -> tuple[Source, Forward]:
            table = self.table(options)

            def lowers(node: Node) -> bool:
                if node.op in GROUPED and (divides_weights or not self.branches(options)):
                    return False  # DTensor has no rules for the sizes of groups
                if divides_weights and node.op.elementwise and node.op in WITHOUT_RULE:
                    return False  # but has for the operations inside
                return table.lowers(node) or table.falls_back(node)

            def is_complete(node: Node) -> bool:
                return table.falls_back(node) or (divides_weights and needs_complete(node))

            def has_own_gradient(node: Node) -> bool:
                by_plugin = self.plugin_lowering(node, options) is not None
                return node.op.surrogate or by_plugin or is_complete(node)

            if differentiated or divides_weights:
                is_own = has_own_gradient if differentiated else is_complete
                part = own_gradients.with_own_gradients(part, is_own, is_complete, lowers)
            source = self._source(decompose(part, lowers, self.name), options, gradients=differentiated)
            return source, self.loaded(source)

        return program.build(self, graph, options, mesh, load)

    def has_whole_parameters(self, options: BuildOptions) -> bool:
        return meshes.mesh_for(self, options) is None

    def differentiates(self, options: BuildOptions) -> bool:
        """Whether PyTorch computes gradients: on several devices its engines distribute them."""
        return meshes.mesh_for(self, options) is not None

    def join_processes(self) -> None:
        """Start the processes of the mesh unless a launcher has, and join their group."""
        if self.device_mesh is not None:
            meshes.require_processes(self.device_mesh)
            meshes.join_group(self.torch_device)

    def build_with_gradients(
        self, graph: Graph, of: Sequence[str], wrt: Sequence[str], options: BuildOptions | None = None
    ) -> SourceExecutable:
        options = options or BuildOptions()
        mesh = meshes.mesh_for(self, options)
        if mesh is not None:
            import mithril as ml  # which imports this module

            return self._build_on(mesh, ml.with_framework_gradients(graph, of, wrt, cotangents=True), options)
        if _compiles(options):
            graph = with_stored_operands(graph, OWN_COMPARISONS)
        return super().build_with_gradients(graph, of, wrt, options)

    def require_one_device(self, options: BuildOptions) -> None:
        """Raise UnsupportedError for programs that PyTorch's autograd cannot differentiate."""
        if meshes.mesh_for(self, options) is not None:
            raise UnsupportedError(
                "a program over several devices has no function for PyTorch's autograd",
                hint="compile without device_mesh=, and distribute the module by torch.distributed",
            )

    def differentiable(self, graph: Graph, options: BuildOptions | None = None) -> Forward:
        self.require_one_device(options or BuildOptions())
        return DifferentiableProgram(graph, lambda part: super(TorchBackend, self).differentiable(part, options))

    def check_options(self, options: BuildOptions) -> None:
        super().check_options(options)
        self._run_options(options)
        if (mesh := meshes.mesh_for(self, options)) is not None:
            meshes.require_processes(mesh)

    def _run_options(self, options: BuildOptions) -> RunOptions:
        return read(options, self.torch_device, cudnn_benchmark=self.cudnn_benchmark, enable_amp=self.enable_amp)

    def finish(self, forward: Forward, graph: Graph, options: BuildOptions) -> Forward:
        if "mobile" in self.capabilities.families and (phone := _phone(options.settings)):
            message = f"calls in this process run in PyTorch; compiled.export(folder) writes C for {phone}"
            options.decisions.record("choice", message)
        return runner(forward, graph, self._run_options(options), options, lambda node: self.falls_back(node, options))

    def generate(self, graph: Graph, options: BuildOptions, gradients: bool = False) -> Any:
        if options.fuses:
            # The joined kernel is the one for CPUs; on other devices PyTorch selects among several.
            graph = join_attentions(graph) if self.torch_device.type == "cpu" else graph
            graph = pair_operations(join_norms(fuse_subgraphs(graph)))
            graph = packed_kernels.with_packed_kernels(graph) if options.static and self._packs(options) else graph
        is_packed = options.fuses and self._packs(options) and bool(options.static or packed_kernels.of_binding(graph))
        graph = with_image_order(graph, options, is_packed=is_packed)
        if options.fuses:
            # autograd saves values that these overwrite
            graph = graph if gradients else with_overwritten_operands(with_lists(graph))
        return super().generate(graph, options, gradients)

    def packed_weights(
        self, executable: Any, options: BuildOptions, weights: dict[str, Any], forms: MutableMapping[str, Any]
    ) -> dict[str, Any]:
        return packed_kernels.packed(executable.graph, weights) if options.fuses and self._packs(options) else weights

    def _packs(self, options: BuildOptions) -> bool:
        """Whether oneDNN runs the convolutions of the program: torch.compile and mixed precision select kernels."""
        is_eager = self.branches(options) and not self.enable_amp
        return is_eager and self.torch_device.type == "cpu"

    def differentiated(self, forward: Forward, of: tuple[str, ...], wrt: tuple[str, ...]) -> Forward:
        return Differentiated(forward, of, wrt)

    # -- memory ------------------------------------------------------------------------------------------------------
    def workspace(self, node: Node, sizes: Mapping[str, int]) -> int:
        blocked = nbytes(node.result.type, sizes) if "conv" in node.op.name else 0  # oneDNN's blocked layout
        return max(blocked, super().workspace(node, sizes))

    def measured_memory(self, run: Callable[[], Any], executable: Any = None) -> int:
        if self.torch_device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.torch_device)
            before = torch.cuda.memory_allocated(self.torch_device)
            self.synchronize(run())
            peak: int = torch.cuda.max_memory_allocated(self.torch_device) - before
            return peak
        # PyTorch counts allocations of CUDA only; on a CPU the events of the profiler are the only
        # source.
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            self.synchronize(run())
        now: int = 0
        high_water: int = 0
        for event in profile.profiler.kineto_results.events():
            if event.name() == "[memory]" and event.device_type() == torch.profiler.DeviceType.CPU:
                now += event.nbytes()
                high_water = max(high_water, now)
        return high_water

    # -- arrays ------------------------------------------------------------------------------------------------------
    def native_dtype(self, dtype: DType) -> torch.dtype:
        return getattr(torch, dtype.name)

    def array(self, data: Any, dtype: Any = None) -> torch.Tensor:
        if isinstance(data, torch.Tensor):
            tensor = data.detach()
        # A copy: the other framework may write to its memory, and the result of this function belongs
        # to the caller.
        elif hasattr(data, "__dlpack__") and not isinstance(data, np.ndarray):
            tensor = torch.from_dlpack(data).clone()
        else:
            array = as_numpy(data, self.dtype)
            if array.dtype == ml_dtypes.bfloat16:
                # NumPy has no bfloat16 that torch.from_numpy accepts; the bits pass as int16.
                tensor = torch.from_numpy(np.asarray(array, order="C").view(np.int16).copy()).view(torch.bfloat16)
            else:
                tensor = torch.tensor(array) if array.ndim == 0 else torch.from_numpy(np.array(array, order="C"))
        return tensor.to(self.torch_device, None if dtype is None else self.native_dtype(as_dtype(dtype)))

    def to_main_memory(self, array: Any) -> np.ndarray[Any, Any] | None:
        """Return an array as NumPy; of a tensor in parts, the part of this process."""
        return super().to_main_memory(array.to_local() if hasattr(array, "to_local") else array)

    def copied(self, array: Any) -> Any:
        return array.detach().clone() if isinstance(array, torch.Tensor) else self.array(array)

    def from_local_rows(self, rows: np.ndarray[Any, Any]) -> torch.Tensor:
        """Return the array of the rows of all processes, of which each keeps its own."""
        return meshes.joined_rows(self.array(rows))

    def shared(self, data: Any) -> torch.Tensor:
        """Share the buffer of another framework's array where possible; neither owner may modify it afterwards."""
        return self.array(data) if isinstance(data, np.ndarray) else torch.from_dlpack(data).to(self.torch_device)

    def to_numpy(self, array: Any) -> np.ndarray[Any, Any]:
        if isinstance(array, np.ndarray):
            return array
        full = _complete(array) if hasattr(array, "full_tensor") else array
        host = full.detach().cpu()
        if host.dtype == torch.bfloat16:
            return host.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)  # type: ignore[no-any-return]
        return host.numpy()  # type: ignore[no-any-return]

    def is_array(self, x: Any) -> bool:
        return isinstance(x, torch.Tensor)

    def synchronize(self, value: Any = None) -> None:
        if self.torch_device.type == "cuda":
            torch.cuda.synchronize(self.torch_device)
        elif self.torch_device.type == "mps":
            torch.mps.synchronize()


def _complete(array: Any) -> torch.Tensor:
    """Return all elements of a DTensor."""
    from mithril_torch.parallel.arrays import complete

    return complete(array)


def _phone(settings: Mapping[str, Any]) -> str:
    """Describe the phone to compile for, or return an empty text."""
    if mobile := settings.get("mobile_options"):
        return str(dict(mobile))
    name = settings["target_hardware"]
    return name if name is not None and name.startswith("mobile") else ""


def _compiles(options: BuildOptions) -> bool:
    """Whether ``torch.compile`` may fuse the program; eager programs compute each value once."""
    return bool(options.jit or options.settings["torch_dynamo"])
