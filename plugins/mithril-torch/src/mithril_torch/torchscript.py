"""TorchScript: programs traced by ``torch.jit``, and ``compiled.export("model.pt")``, which LibTorch reads.

PyTorch has deprecated TorchScript in favor of ``torch.compile`` and ``torch.export``; it still runs.
"""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from mithril.backend import Forward
from mithril.graph import UnsupportedError
from mithril.system import files
from mithril_torch.inference_module import ExportedModule, examples, inference_module, require_static

LEVELS = (
    "traced",
    "traced and frozen: constants folded",
    "traced, frozen, with kernels for inference",
    "traced, frozen, with kernels for inference (PyTorch has no further level)",
)


class Scripted:
    """A program as TorchScript, traced at the first call with each set of shapes."""

    def __init__(self, forward: Forward, level: int) -> None:
        self.forward, self.level = forward, level
        self.programs: dict[Any, tuple[Any, tuple[str, ...]]] = {}

    def __call__(self, params: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
        if torch.is_grad_enabled():  # a frozen program has no gradients
            return self.forward(params, inputs)
        arguments = (*params.values(), *inputs.values())
        # A trace records the kernels of the shapes it saw, so that each set of shapes needs a trace.
        key = (*params, *inputs, *((x.shape, x.dtype) for x in arguments))
        if key not in self.programs:
            self.programs[key] = self._traced(tuple(params), tuple(inputs), arguments)
        program, names = self.programs[key]
        return dict(zip(names, program(*arguments), strict=True))

    def _traced(
        self, params: tuple[str, ...], inputs: tuple[str, ...], arguments: tuple[Any, ...]
    ) -> tuple[Any, tuple[str, ...]]:
        names: list[str] = []

        def flat(*values: Any) -> tuple[Any, ...]:
            results = self.forward(
                dict(zip(params, values, strict=False)), dict(zip(inputs, values[len(params) :], strict=True))
            )
            names[:] = results
            return tuple(results.values())

        return script(_Function(flat), arguments, self.level), tuple(names)


class _Function(torch.nn.Module):  # type: ignore[misc]
    """A function as a module: only modules can be frozen."""

    def __init__(self, function: Callable[..., tuple[Any, ...]]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *arguments: Any) -> tuple[Any, ...]:
        return self.function(*arguments)


def script(module: torch.nn.Module, arguments: tuple[Any, ...], level: int) -> Any:
    """Return the module as TorchScript, optimized to a level of ``LEVELS``."""
    # The trace must not donate or overwrite the arguments of the call that triggers it.
    copies = tuple(x.clone() for x in arguments)
    with torch.no_grad(), _without_deprecations():
        program = torch.jit.trace(module.eval(), copies, check_trace=False)
        if level > 0:
            program = torch.jit.freeze(program)
        if level > 1:
            program = torch.jit.optimize_for_inference(program)
    return program


@contextmanager
def _without_deprecations() -> Iterator[None]:
    """Silence the deprecation of torch.jit (since torch 2.10), which the decisions of a compilation state."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"`torch\.jit\.", category=DeprecationWarning)
        # A size that becomes a Python number is constant for the traced shapes.
        warnings.filterwarnings("ignore", category=torch.jit.TracerWarning)
        yield


def export(
    compiled: Any,
    path: str | os.PathLike[str],
    params: Mapping[str, Any] | None = None,
    *,
    state: Mapping[str, Any] | None = None,
) -> ExportedModule:
    """Write the latest inference program of a model compiled for PyTorch, which ``torch.jit.load`` reads.

    ``params`` defaults to the bound parameters.
    """
    module, graph = inference_module(compiled, params, state)
    require_static(graph, "TorchScript")
    buffer = io.BytesIO()
    try:
        program = script(module, examples(compiled, graph, {}), level=1)
        with _without_deprecations():
            torch.jit.save(program, buffer)
    except RuntimeError as error:
        raise UnsupportedError(
            f"TorchScript cannot hold this program: {str(error).strip().splitlines()[0]}",
            hint='compiled.export("model.pt2") writes it by torch.export',
        ) from error
    file = files.write(path, buffer.getvalue())
    return ExportedModule(file, module.inputs, module.outputs)
