"""``ml.MlxBackend``: generated MLX source, run lazily and evaluated at the end of a call, or compiled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import ml_dtypes
import numpy as np

from mithril import ops
from mithril.backend import (
    BuildOptions,
    Capabilities,
    Form,
    Forward,
    Lowerings,
    SourceBackend,
    SourceExecutable,
    as_numpy,
    check_readable,
    columns,
    memory_plan,
)
from mithril.derivatives import gradients
from mithril.graph import (
    ALL,
    BackendError,
    DType,
    Graph,
    Node,
    UnsupportedError,
    cotangent_name,
    dtype as as_dtype,
    iterate,
    result_name,
)
from mithril.ops import conv, conv_input_grad, conv_weight_grad, linear
from mithril_mlx import memory, native_kernels  # noqa: F401  # adds its rows to the table
from mithril_mlx.execution import reject_jit_options, runner
from mithril_mlx.lowering import table
from mithril_mlx.mlx_loader import BLAS, mx
from mithril_mlx.native_semantics import DIFFERENT, own


class MlxBackend(SourceBackend):
    """Backend whose arrays are MLX arrays, on the GPU of Apple silicon and on the CPU elsewhere."""

    name = "mlx"
    devices = ("cpu", "gpu")
    unforkable = "MLX"
    # MLX stores float64 but computes exp, sin, convolutions and more of it in float32's precision only.
    dtypes: ClassVar[frozenset[DType]] = frozenset(d for d in ALL if d.name != "float64")
    tables: ClassVar[Mapping[str, Lowerings]] = {"portable": table, "native": own}

    def __init__(
        self, *, device: str | None = None, dtype: Any = None, precision: str | None = None, device_mesh: Any = None
    ) -> None:
        if device_mesh not in (None, 1, (1,), [1]):
            raise BackendError(
                f"device_mesh={device_mesh}: MLX programs compute on one device",
                hint="ml.JaxBackend(device_mesh=...) spreads a model over many",
            )
        super().__init__(device=device or mx.default_device().type.name, dtype=dtype, precision=precision)
        if self.device == "gpu" and not mx.is_available(mx.gpu):
            raise BackendError(
                "MLX has no device 'gpu' here",
                facts=[f"there is: {mx.default_device()}"],
                hint="MLX computes on GPUs of Apple silicon, and of NVIDIA with its CUDA build",
            )

    @property
    def capabilities(self) -> Capabilities:
        common = super().capabilities
        shifted = (Form.POINTWISE_MATMUL, Form.DEPTHWISE_SHIFTS)
        on_cpu = {linear: (Form.MATVEC,)} | dict.fromkeys((conv, conv_input_grad, conv_weight_grad), shifted)
        return replace(
            common,
            families=("gpu", "apple") if common.family == "gpu" else common.families,
            autodiff="native",
            threads=common.family == "cpu" and BLAS.threads() is not None,
            # MLX starts operations before others have finished; the order is known on the CPU.
            memory="replayed" if common.family == "cpu" else "holds",
            # Within 15 % if operations take longer than to be queued; more for short ones, which end at once.
            estimate_error=(-0.15, 0.30) if common.family == "cpu" else None,
            channels_last=frozenset({conv}),
            images="channels",
            prefers=on_cpu if common.family == "cpu" else {},
        )

    def branches(self, options: BuildOptions) -> bool:
        """Whether ``if`` executes only one branch; under mx.compile, programs have no branches."""
        return self.device == "cpu" and not options.jit

    @classmethod
    def diagnose(cls) -> dict[str, str]:
        """Return facts for ``mithril doctor``."""
        facts = {"device": str(mx.default_device()), "products on the CPU": str(BLAS)}
        if not BLAS.fast:
            facts["advice"] = "a C compiler, or OpenBLAS (apt install libopenblas0), makes products 15 times faster"
        return facts

    # -- building ----------------------------------------------------------------------------------------------------
    def lowers(self, node: Node, options: BuildOptions | None = None) -> bool:
        """Decompose attention for training on the CPU: MLX has no kernel there, and the gradient reuses the weights."""
        training = options is not None and not options.inference
        if node.op is ops.attention and self.device == "cpu" and training:
            return self.plugin_lowering(node, options) is not None
        return super().lowers(node, options)

    def check_options(self, options: BuildOptions) -> None:
        super().check_options(options)
        reject_jit_options(options)

    def finish(self, forward: Forward, graph: Graph, options: BuildOptions) -> Forward:
        if options.semantics == "native":
            for name in sorted({node.op.name for node, _ in iterate(graph)} & set(DIFFERENT)):
                options.decisions.record("choice", f"'{name}' as MLX has it: {DIFFERENT[name]}")
        return runner(forward, graph, options, self.device, lambda node: self.falls_back(node, options))

    def differentiable(self, graph: Graph, options: BuildOptions | None = None) -> Forward:
        forward = super().differentiable(graph, options)

        def with_empty_derivatives(params: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
            if all(x.size for x in inputs.values()):
                return forward(params, inputs)
            function = mx.custom_function(lambda params, inputs: forward(params, inputs))
            function.vjp(partial(self._empty_derivatives, graph))
            results: dict[str, Any] = function(dict(params), dict(inputs))
            return results

        return with_empty_derivatives

    def _empty_derivatives(
        self, graph: Graph, primals: Any, cotangents: Mapping[str, Any], _: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the cotangents of parameters and inputs by mithril's own differentiation.

        MLX 0.32 would sum transposed arrays without elements to memory of other arrays.
        """
        params, inputs = primals
        floats = [i.name for i in graph.arguments if i.type.dtype.is_float]
        backward = self.decomposed(gradients(graph, list(cotangents), floats), BuildOptions())
        slopes = {cotangent_name(name): g for name, g in cotangents.items()}
        results = self.build(backward, BuildOptions(jit=False))(params, {**inputs, **slopes})

        def of(arrays: Mapping[str, Any]) -> dict[str, Any]:
            return {n: results.get(result_name("gradient", n), mx.zeros_like(x)) for n, x in arrays.items()}

        return of(params), of(inputs)

    def differentiated(self, forward: Forward, output_names: tuple[str, ...], wrt: tuple[str, ...]) -> Forward:
        def with_gradients(params: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
            built: dict[str, Any] = {}
            empty = next((name for name, x in inputs.items() if not x.size), None)
            if empty is not None:  # mx.vjp may end the process, or never return, with MLX 0.32
                raise UnsupportedError(
                    "the automatic differentiation of MLX does not support empty arrays",
                    facts=[f"input '{empty}' has shape {list(inputs[empty].shape)}"],
                    hint="omit autodiff='native': mithril's own differentiation supports them",
                )

            def outputs(*given: Any) -> list[Any]:
                arguments_by_name = dict(zip(wrt, given, strict=True))
                built.update(
                    forward(
                        {name: arguments_by_name.get(name, x) for name, x in params.items()},
                        {name: arguments_by_name.get(name, x) for name, x in inputs.items()},
                    )
                )
                return [built[name] for name in output_names]

            arguments = [params[n] if n in params else inputs[n] for n in wrt]
            values, gradients = mx.vjp(outputs, arguments, [inputs[cotangent_name(n)] for n in output_names])
            built.update(zip(output_names, values, strict=True))
            return {**built, **{result_name("gradient", n): g for n, g in zip(wrt, gradients, strict=True)}}

        return with_gradients

    # -- memory ------------------------------------------------------------------------------------------------------
    def overwrites(self, node: Node) -> bool:
        return memory_plan.overwrites(node)  # MLX donates unshared buffers to element-wise results

    def workspace(self, node: Node, sizes: Mapping[str, int]) -> int:
        return max(columns(node, sizes), super().workspace(node, sizes))

    def measured_memory(self, run: Callable[[], Any], executable: Any = None) -> int:
        mx.synchronize()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        self.synchronize(run())
        peak: int = mx.get_peak_memory() - before
        return peak

    def exact_memory(self, executable: Any, sizes: Mapping[str, int]) -> tuple[int, str] | None:
        if self.device != "cpu" or not isinstance(executable, SourceExecutable) or executable.fallbacks:
            return None
        if getattr(executable.call, "is_compiled", False):  # fused by MLX
            return None
        peak = memory.workspace(executable.graph, executable.forward, sizes, self.native_dtype)
        return None if peak is None else (peak, "replay")

    # -- arrays ------------------------------------------------------------------------------------------------------
    def native_dtype(self, dtype: DType) -> Any:
        return getattr(mx, "bool_" if dtype.is_bool else dtype.name)

    def array(self, data: Any, dtype: Any = None) -> mx.array:
        if isinstance(data, mx.array):
            return data if dtype is None else data.astype(self.native_dtype(as_dtype(dtype)))
        if hasattr(data, "__dlpack__") and not isinstance(data, np.ndarray):
            check_readable(data)
            array = mx.from_dlpack(data.detach() if hasattr(data, "detach") else data)
            return array if dtype is None else array.astype(self.native_dtype(as_dtype(dtype)))
        converted = as_numpy(data, self.dtype)
        kind = self.native_dtype(as_dtype(converted.dtype))
        if converted.dtype == ml_dtypes.bfloat16:
            array = mx.array(np.asarray(converted, order="C").view(np.uint16)).view(mx.bfloat16)
        else:
            with mx.stream(mx.cpu):
                array = mx.array(np.asarray(converted, order="C"), kind)
        return array if dtype is None else array.astype(self.native_dtype(as_dtype(dtype)))

    def shared(self, data: Any) -> mx.array:
        """Import an array of another framework; on the CPU MLX always copies."""
        return self.array(data)

    def to_numpy(self, array: Any) -> np.ndarray[Any, Any]:
        """Return a read-only NumPy array, without a copy if NumPy has the dtype."""
        if isinstance(array, np.ndarray):
            return array  # the caller's, which stays writable
        half = array.dtype == mx.bfloat16
        converted = np.asarray(array.view(mx.uint16) if half else array)
        converted.flags.writeable = False
        return converted.view(ml_dtypes.bfloat16) if half else converted

    def to_main_memory(self, array: Any) -> np.ndarray[Any, Any] | None:
        """Return the NumPy array: arrays of MLX are in memory that the CPU shares."""
        return self.to_numpy(array) if self.is_array(array) else super().to_main_memory(array)

    def is_array(self, x: Any) -> bool:
        return isinstance(x, mx.array)

    def synchronize(self, value: Any = None) -> None:
        if value is None:
            mx.synchronize()
        else:
            mx.eval(value)
