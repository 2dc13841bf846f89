"""Compilers of C: which one makes code for which kind of processor, and what it is told."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mithril.base import BackendError, OptionError

# Integers wrap around, and one arena holds values of several types in turn.
ALWAYS = "-std=c11 -ffp-contract=fast -fwrapv -fno-strict-aliasing -Wall -Wextra"
FAST, SMALL = "-O3", "-Os -ffunction-sections -fdata-sections"
LIBRARIES = ("object", "static", "shared")


@dataclass(frozen=True)
class Toolchain:
    """``compilers`` are tried in order; ``runner`` starts programs that this computer cannot run itself."""

    compilers: tuple[str, ...]
    flags: str
    install: str
    runner: str = ""

    def compiler(self) -> str | None:
        """The first compiler that is installed."""
        search_path = os.pathsep.join(filter(None, [*ndk(), os.environ.get("PATH", "")]))
        return next((path for name in self.compilers if (path := shutil.which(name, path=search_path))), None)

    def require(self) -> str:
        path = self.compiler()
        if path is None:
            raise BackendError(
                "there is no C compiler for what is exported",
                facts=[f"looked for: {', '.join(self.compilers)}"],
                hint=f"{self.install}; or export(..., library=None) and compile it elsewhere with its Makefile",
            )
        return path


def ndk() -> list[str]:
    """Where Android's compilers lie, if the environment says where its NDK is."""
    for name in ("ANDROID_NDK_HOME", "ANDROID_NDK_ROOT", "ANDROID_NDK"):
        if name in os.environ:
            return [str(p) for p in Path(os.environ[name]).glob("toolchains/llvm/prebuilt/*/bin")]
    return []


HOST = Toolchain(("cc", "gcc", "clang"), "-march=native", "install gcc or clang")
_NDK = "set ANDROID_NDK_HOME to the folder of Android's NDK"
FOREIGN = {  # by platform and Android's name of the instruction set
    ("android", "arm64-v8a"): Toolchain(("aarch64-linux-android24-clang",), "-march=armv8-a", _NDK),
    ("android", "armeabi-v7a"): Toolchain(("armv7a-linux-androideabi24-clang",), "-mfpu=neon-vfpv4", _NDK),
    ("android", "x86_64"): Toolchain(("x86_64-linux-android24-clang",), "-march=x86-64-v2", _NDK),
    ("linux", "arm64-v8a"): Toolchain(
        ("aarch64-linux-gnu-gcc",),
        "-march=armv8-a",
        "apt-get install gcc-aarch64-linux-gnu",
        "qemu-aarch64 -L /usr/aarch64-linux-gnu",
    ),
    ("linux", "armeabi-v7a"): Toolchain(
        ("arm-linux-gnueabihf-gcc",),
        "-march=armv7-a -mfpu=neon-vfpv4 -mfp16-format=ieee",
        "apt-get install gcc-arm-linux-gnueabihf",
        "qemu-arm -L /usr/arm-linux-gnueabihf",
    ),
    ("linux", "x86_64"): Toolchain(
        ("x86_64-linux-gnu-gcc", "gcc", "clang"), "-march=x86-64-v2", "apt-get install gcc", "qemu-x86_64"
    ),
}


def build(folder: Path, name: str, kind: str, compiler: str, flags: str) -> Path:
    """Compile an exported model, without its test, into an object, a static or a shared library."""
    if kind not in LIBRARIES:
        raise OptionError(f"library={kind!r} is not known", facts=[f"accepted: {', '.join(LIBRARIES)}, None"])
    target = {"object": f"{name}.o", "static": f"lib{name}.a", "shared": f"lib{name}.so"}[kind]
    run(["make", "-s", "-C", str(folder), target, f"CC={compiler}", f"CFLAGS={flags}"])
    return folder / target


def code_bytes(path: Path) -> int:
    """The machine code in an object file, by the section headers of ELF (32 or 64 bits, little-endian)."""
    data = path.read_bytes()
    if data[:4] != b"\x7fELF":
        raise BackendError(f"'{path.name}' is no object file of ELF")
    is_64_bit = data[4] == 2

    def number(offset: int, size: int) -> int:
        return int.from_bytes(data[offset : offset + size], "little")

    start, width = (number(40, 8), number(58, 2)) if is_64_bit else (number(32, 4), number(46, 2))
    count = number(60, 2) if is_64_bit else number(48, 2)
    total = 0
    for k in range(count):
        section = start + k * width
        flags = number(section + 8, 8 if is_64_bit else 4)
        executable = 4
        if flags & executable:
            total += number(section + (32 if is_64_bit else 20), 8 if is_64_bit else 4)
    return total


def run(command: Sequence[str]) -> str:
    """Run a tool; what it says is in the error if it fails."""
    try:
        process = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise BackendError(f"'{command[0]}' is not installed", hint=f"install {command[0]}") from None
    if process.returncode != 0:
        messages = (process.stderr or process.stdout).strip().splitlines()
        raise BackendError(
            f"'{Path(command[0]).name}' failed with exit status {process.returncode}",
            facts=[" ".join(command), *messages[:8]],
            hint="if it complains of the generated code, that is a fault of mithril-cbackend: please report it",
        )
    return process.stdout
