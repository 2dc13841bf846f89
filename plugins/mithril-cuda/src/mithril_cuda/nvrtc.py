"""NVRTC, NVIDIA's compiler of CUDA text, by ctypes: it needs neither a GPU nor a toolkit."""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Iterable, Sequence
from ctypes import byref, c_char_p, c_int, c_size_t, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

from mithril.graph import BackendError
from mithril_cbackend.devices.languages import CUDA

INSTALL = "pip install 'mithril-cuda[nvrtc]'"
PACKAGED = (
    "*/lib/libnvrtc.so.[0-9]*",
    "*/bin/nvrtc64_*_0.dll",
    "*/bin/x86_64/nvrtc64_*_0.dll",
)  # in packages of NVIDIA
INSTALLED = ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so", "nvrtc64_130_0.dll", "nvrtc64_120_0.dll")  # by toolkits


def places() -> Iterable[str]:
    """Return paths and names by which the library may be found."""
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or [] if spec else [])]
    packaged = [str(path) for folder in folders for pattern in PACKAGED for path in sorted(folder.glob(pattern))]
    return [*packaged, *INSTALLED]


@cache
def library() -> Any:
    for place in places():
        try:
            return ctypes.CDLL(place)
        except OSError:
            continue
    raise BackendError("compiling for CUDA needs NVRTC, which is not installed", hint=INSTALL)


@cache
def supported() -> tuple[int, ...]:
    """Return the compute capabilities that this version compiles for, 80 for 8.0."""
    count = c_int()
    library().nvrtcGetNumSupportedArchs(byref(count))
    numbers = (c_int * count.value)()
    library().nvrtcGetSupportedArchs(numbers)
    return tuple(numbers)


@cache
def version() -> tuple[int, int]:
    major, minor = c_int(), c_int()
    library().nvrtcVersion(byref(major), byref(minor))
    return major.value, minor.value


def compiled(texts: Sequence[str], capability: int, assembly: bool = False) -> bytes:
    """Return kernels as machine code of a compute capability.

    As assembly (PTX) if that is asked, or if the GPU is newer than NVRTC: the driver translates it.
    """
    usable = [n for n in supported() if n <= capability]
    if not usable:
        numbers = ", ".join(f"{n / 10:.1f}" for n in supported())
        raise BackendError(
            f"NVRTC {version()[0]}.{version()[1]} cannot compile for compute capability {capability / 10:.1f}",
            facts=[f"it compiles for: {numbers}"],
            hint="an older GPU needs an older NVRTC: pip install 'nvidia-cuda-nvrtc-cu12<12.9'",
        )
    assembly = assembly or usable[-1] < capability
    architecture = f"{'compute' if assembly else 'sm'}_{usable[-1]}"
    options = [f"--gpu-architecture={architecture}", "-std=c++17", "--disable-warnings"]
    text = CUDA.prelude + "\n".join(texts)
    program = c_void_p()
    checked(
        library().nvrtcCreateProgram(byref(program), text.encode(), b"kernels.cu", 0, None, None), "create a program"
    )
    try:
        code = library().nvrtcCompileProgram(
            program, len(options), (c_char_p * len(options))(*map(str.encode, options))
        )
        if code:
            raise BackendError(
                f"NVRTC {version()[0]}.{version()[1]} cannot compile {len(texts)} kernels for {architecture}",
                facts=[line for line in output(program, "ProgramLog").decode().splitlines() if line.strip()][:6],
                hint="this is a bug in mithril-cuda: please report it with str(compiled.graph)",
            )
        return output(program, "PTX" if assembly else "CUBIN")
    finally:
        library().nvrtcDestroyProgram(byref(program))


def output(program: c_void_p, kind: str) -> bytes:
    size = c_size_t()
    checked(getattr(library(), f"nvrtcGet{kind}Size")(program, byref(size)), f"return its {kind}")
    text = ctypes.create_string_buffer(size.value)
    checked(getattr(library(), f"nvrtcGet{kind}")(program, text), f"return its {kind}")
    return text.raw if kind == "CUBIN" else text.value


def checked(code: int, action: str) -> None:
    if code:
        library().nvrtcGetErrorString.restype = c_char_p
        raise BackendError(f"NVRTC cannot {action}: {library().nvrtcGetErrorString(code).decode()}", hint=INSTALL)
