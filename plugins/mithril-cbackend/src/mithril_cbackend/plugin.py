"""Hook implementations of mithril-cbackend; importing this module imports no framework."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from mithril import BackendSpec, Command, FileFormat, Option, hookimpl


@hookimpl
def mithril_backends() -> Sequence[BackendSpec]:
    """Return the C backend."""
    return [
        BackendSpec(
            name="c",
            class_name="CBackend",
            loads="mithril_cbackend.backend:CBackend",
            requires=("tvm", "tvm_ffi"),
            summary="machine code by TVM, also schedules of elements, reductions, rows, pools; exports readable C",
        )
    ]


@hookimpl
def mithril_options() -> Sequence[Option]:
    """Return the options that select the CPU or the device to compile for."""
    return [
        Option(
            "cpu_options",
            Mapping[str, Any],
            {},
            "CPU to compile for: vector_bytes is 16, 32 or 64, cpu is a CPU name of LLVM.",
            keys={"vectorize": bool, "vector_bytes": int, "cpu": str},
            example='{"vector_bytes": 32, "cpu": "haswell"}',
        ),
        Option(
            "mobile_options",
            Mapping[str, Any],
            {},
            "Device for which compiled.export(folder) writes C: a phone, a microcontroller, WebAssembly.",
            keys={
                "platform": Literal["android", "linux", "bare", "wasi"],
                "arch": Literal["arm64-v8a", "armeabi-v7a", "x86_64", "armv7e-m", "wasm32"],
                "quantization": Literal["int8"] | None,
                "optimize_size": bool,
            },
            backends=("c", "torch"),
            example='{"platform": "android", "arch": "arm64-v8a"}',
        ),
    ]


@hookimpl
def mithril_commands() -> Sequence[Command]:
    """Return the command ``mithril tune-c``."""
    return [Command("tune-c", "mithril_cbackend.command:tune", "Search schedules of the C backend for a model.")]


@hookimpl
def mithril_formats() -> Sequence[FileFormat]:
    """Return the format of ``compiled.export("folder")``."""
    return [
        FileFormat(
            "c",
            saves="mithril_cbackend.bundle.c_export:export",
            summary="a directory of C source that needs neither Python nor TVM",
            backends=("c", "torch"),
        )
    ]
