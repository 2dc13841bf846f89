"""Hook implementations of mithril-torch; importing this module imports no framework."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mithril import BackendSpec, Export, FileFormat, Option, hookimpl


@hookimpl
def mithril_backends() -> Sequence[BackendSpec]:
    """Return the torch backend."""
    return [
        BackendSpec(
            name="torch",
            class_name="TorchBackend",
            loads="mithril_torch.backend:TorchBackend",
            requires=("torch",),
            summary="generated PyTorch source, eager or torch.compile",
        )
    ]


@hookimpl
def mithril_exports() -> Sequence[Export]:
    """``ml.from_torch`` and ``compiled.to_module()``."""
    return [
        Export("from_torch", "mithril_torch.importing.entry:from_torch"),
        Export("to_module", "mithril_torch.module:to_module", on="CompiledModel"),
    ]


@hookimpl
def mithril_options() -> Sequence[Option]:
    """Return the options that control how the generated function runs."""
    return [
        Option(
            "torch_dynamo",
            bool,
            False,
            "Compile with torch.compile(fullgraph=True); the same as jit=True.",
            backends=("torch",),
        ),
        Option(
            "torch_fx",
            bool,
            False,
            "Capture the program as a torch.fx.GraphModule; run it, or compile it with torch_dynamo.",
            backends=("torch",),
        ),
        Option(
            "torch_options",
            Mapping[str, Any],
            {},
            "Settings of PyTorch for this program. graph_mode runs it as TorchScript; script_optimization, 0 to 3, is "
            "its level or, with jit=True, a mode of torch.compile.",
            keys={"enable_cudnn": bool, "benchmark_mode": bool, "graph_mode": bool, "script_optimization": int | None},
            backends=("torch",),
            example='{"graph_mode": True}',
        ),
    ]


@hookimpl
def mithril_formats() -> Sequence[FileFormat]:
    """Return the formats of ``compiled.export``: .pte, .pt and .pt2."""
    return [
        FileFormat(
            "torchscript",
            suffixes=(".pt",),
            saves="mithril_torch.torchscript:export",
            summary="a TorchScript module, which torch.jit.load and LibTorch read",
            backends=("torch",),
        ),
        FileFormat(
            "torch_export",
            suffixes=(".pt2",),
            saves="mithril_torch.exported_program:export",
            summary="a program that torch.export.load reads; with aot=True compiled by AOTInductor",
            backends=("torch",),
        ),
        FileFormat(
            "executorch",
            suffixes=(".pte",),
            saves="mithril_torch.executorch:export",
            summary="a program for ExecuTorch on mobile devices; requires executorch",
            backends=("torch",),
        ),
    ]
