"""What mithril-cbackend adds to mithril; importing this module imports no framework."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from mithril import BackendSpec, Command, FileFormat, Option, hookimpl


@hookimpl
def mithril_backends() -> Sequence[BackendSpec]:
    """The C backend."""
    return [
        BackendSpec(
            name="c",
            class_name="CBackend",
            loads="mithril_cbackend.backend:CBackend",
            requires=("tvm", "tvm_ffi"),
            summary="machine code scheduled with TVM; exports readable C that runs without Python",
        )
    ]


@hookimpl
def mithril_options() -> Sequence[Option]:
    """What the code is made for."""
    return [
        Option(
            "cpu_options",
            Mapping[str, Any],
            {},
            "The processor that code is made for; vector_bytes may be 16, 32 or 64, cpu is LLVM's name.",
            keys={"vectorize": bool, "vector_bytes": int, "cpu": str},
        ),
        Option(
            "mobile_options",
            Mapping[str, Any],
            {},
            "The telephone that compiled.export(folder) writes C for.",
            keys={
                "platform": Literal["android", "linux"],
                "arch": Literal["arm64-v8a", "armeabi-v7a", "x86_64"],
                "quantization": Literal["int8"] | None,
                "optimize_size": bool,
            },
            backends=("c", "torch"),
        ),
    ]


@hookimpl
def mithril_commands() -> Sequence[Command]:
    """``mithril tune-c``."""
    return [Command("tune-c", "mithril_cbackend.command:tune", "Search schedules of the C backend for a model.")]


@hookimpl
def mithril_formats() -> Sequence[FileFormat]:
    """``compiled.export("folder")``."""
    return [
        FileFormat(
            "c",
            saves="mithril_cbackend.bundle.c_export:export",
            summary="a folder of C that needs no Python and no TVM",
            backends=("c", "torch"),
        )
    ]
