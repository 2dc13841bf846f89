"""``ml.TorchBackend``: generated PyTorch source, run as it is or compiled by ``torch.compile``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
import torch

from mithril.codegen import Lowerings
from mithril.errors import BackendError
from mithril.graph import Graph, iterate
from mithril.runtime.backend import BuildOptions, as_numpy
from mithril.runtime.source_backend import Forward, SourceBackend
from mithril.types import ALL, DType, dtype as as_dtype
from mithril_torch import native  # noqa: F401  # adds its rows to the table
from mithril_torch.joining import joined
from mithril_torch.lowering import table
from mithril_torch.own import DIFFERENT, own
from mithril_torch.running import read, runner

MISSING = ("uint16", "uint64")  # PyTorch stores these but computes hardly anything with them


class TorchBackend(SourceBackend):
    """Arrays are PyTorch's tensors, on one device.

    Programs run as they are unless ``jit=True``: on a CPU ``torch.compile`` takes seconds and gains little.
    """

    name = "torch"
    devices = ("cpu", "cuda", "mps")
    dtypes: ClassVar[frozenset[DType]] = frozenset(d for d in ALL if d.name not in MISSING)
    tables: ClassVar[Mapping[str, Lowerings]] = {"portable": table, "native": own}

    def __init__(
        self,
        *,
        device: str | None = None,
        dtype: Any = None,
        precision: str | None = None,
        cudnn_benchmark: bool | None = None,
        enable_amp: bool | None = None,
    ) -> None:
        chosen = device or ("cuda" if torch.cuda.is_available() else "cpu")
        super().__init__(device={"gpu": "cuda"}.get(chosen, chosen), dtype=dtype, precision=precision)
        self.torch_device = self._find(self.device)
        self.cudnn_benchmark = cudnn_benchmark
        self.enable_amp = enable_amp

    def with_precision(self, precision: str) -> TorchBackend:
        return type(self)(
            device=self.device,
            precision=precision,
            cudnn_benchmark=self.cudnn_benchmark,
            enable_amp=self.enable_amp,
        )

    def _find(self, device: str) -> torch.device:
        try:
            torch.empty(0, device=device)
            return torch.device(device)
        except (RuntimeError, AssertionError) as error:
            raise BackendError(
                f"PyTorch has no device '{device}' here",
                facts=[str(error).splitlines()[0]],
                hint="install the PyTorch build for that hardware, or choose another device",
            ) from None

    def families(self) -> tuple[str, ...]:
        kind = self.torch_device.type
        return ("gpu", "nvidia") if kind == "cuda" else ("apple",) if kind == "mps" else (kind,)

    # -- building ----------------------------------------------------------------------------------------------------
    def finish(self, forward: Forward, graph: Graph, options: BuildOptions) -> Forward:
        if options.semantics == "native":
            for name in sorted({node.op.name for node, _ in iterate(graph)} & set(DIFFERENT)):
                options.decisions.record("choice", f"'{name}' as PyTorch has it: {DIFFERENT[name]}")
        running = read(options, self.torch_device, cudnn_benchmark=self.cudnn_benchmark, enable_amp=self.enable_amp)
        return runner(forward, graph, running, options)

    def generate(self, graph: Graph, options: BuildOptions) -> Any:
        return super().generate(joined(graph), options)

    def differentiated(self, forward: Forward, of: tuple[str, ...], wrt: tuple[str, ...]) -> Forward:
        def with_gradients(params: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
            with torch.enable_grad():
                wanted = {n: (params[n] if n in params else inputs[n]).detach().requires_grad_() for n in wrt}
                made = forward(
                    {name: wanted.get(name, x) for name, x in params.items()},
                    {name: wanted.get(name, x) for name, x in inputs.items()},
                )
                found = torch.autograd.grad(
                    [made[name] for name in of],
                    list(wanted.values()),
                    [inputs[f"grad/{name}"] for name in of],
                    allow_unused=True,
                )
            outputs = {name: x.detach() for name, x in made.items()}
            for name, x, gradient in zip(wrt, wanted.values(), found, strict=True):
                outputs[f"grad/{name}"] = torch.zeros_like(x) if gradient is None else gradient
            return outputs

        return with_gradients

    # -- arrays ------------------------------------------------------------------------------------------------------
    def native_dtype(self, dtype: DType) -> torch.dtype:
        return getattr(torch, dtype.name)

    def array(self, data: Any, dtype: Any = None) -> torch.Tensor:
        if isinstance(data, torch.Tensor):
            made = data.detach()
        elif hasattr(data, "__dlpack__") and not isinstance(data, np.ndarray):
            made = torch.from_dlpack(data).clone()
        else:
            array = as_numpy(data, self.dtype)
            if array.dtype == ml_dtypes.bfloat16:
                made = torch.from_numpy(np.ascontiguousarray(array).view(np.int16).copy()).view(torch.bfloat16)
            else:
                made = torch.tensor(array) if array.ndim == 0 else torch.from_numpy(np.array(array, order="C"))
        return made.to(self.torch_device, None if dtype is None else self.native_dtype(as_dtype(dtype)))

    def shared(self, data: Any) -> torch.Tensor:
        """Another framework's array in the same memory where that is possible: nobody may write into it any more."""
        return self.array(data) if isinstance(data, np.ndarray) else torch.from_dlpack(data).to(self.torch_device)

    def to_numpy(self, array: Any) -> np.ndarray[Any, Any]:
        here = array.detach().cpu()
        if here.dtype == torch.bfloat16:
            return here.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)  # type: ignore[no-any-return]
        return here.numpy()  # type: ignore[no-any-return]

    def is_array(self, x: Any) -> bool:
        return isinstance(x, torch.Tensor)

    def synchronize(self, value: Any = None) -> None:
        if self.torch_device.type == "cuda":
            torch.cuda.synchronize(self.torch_device)
        elif self.torch_device.type == "mps":
            torch.mps.synchronize()
