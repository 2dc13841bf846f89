"""What mithril-cbackend adds to mithril; importing this module imports no framework."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

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
            "num_threads, vectorize (bool), vector_bytes (16, 32 or 64), cpu (LLVM's name of a processor).",
        ),
        Option(
            "mobile_options",
            Mapping[str, Any],
            {},
            "platform (android, linux), arch (arm64-v8a, armeabi-v7a, x86_64), quantization (int8) and optimize_size:"
            " what compiled.export(folder) writes C for.",
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
        )
    ]
