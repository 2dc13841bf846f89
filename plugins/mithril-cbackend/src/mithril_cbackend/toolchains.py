"""C toolchains: the compilers and flags of each platform and architecture."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mithril.graph import BackendError, OptionError

ALWAYS = "-std=c11 -ffp-contract=fast -fwrapv -Wall -Wextra"  # integers wrap around
FAST, SMALL = "-O3", "-Os -ffunction-sections -fdata-sections"
LIBRARIES = ("object", "static", "shared")


@dataclass(frozen=True)
class Toolchain:
    """Compilers in order of preference, their flags, and the emulator (``runner``) for foreign programs.

    ``zig`` is the target of ``python -m ziglang cc``, the compiler without a system installation, and ``zig_flags`` are
    its flags where it rejects those of the others. ``link`` has the flags of programs, such as the test.
    """

    compilers: tuple[str, ...]
    flags: str
    install: str
    runner: str = ""
    zig: str = ""
    zig_flags: str | None = None
    link: str = ""

    def compiler(self) -> str | None:
        """Return the command of the first installed compiler, or None if there is none."""
        search_path = os.pathsep.join(filter(None, [*ndk(), os.environ.get("PATH", "")]))
        installed = next((path for name in self.compilers if (path := shutil.which(name, path=search_path))), None)
        if installed is None and self.zig and importlib.util.find_spec("ziglang") is not None:
            return f"{shlex.quote(sys.executable)} -m ziglang cc -target {self.zig}"
        return installed

    def flags_of(self, compiler: str) -> str:
        """Return the flags of the architecture for a compiler."""
        return self.flags if self.zig_flags is None or not is_zig(compiler) else self.zig_flags

    @property
    def default(self) -> str:
        """The compiler that a Makefile uses by default."""
        return self.compilers[0] if self.compilers else f"python3 -m ziglang cc -target {self.zig}"

    def require(self) -> str:
        path = self.compiler()
        if path is None:
            raise BackendError(
                "no C compiler is installed for the exported code",
                facts=[f"looked for: {', '.join([*self.compilers, *(['ziglang'] if self.zig else [])])}"],
                hint=f"{self.install}; or call export(..., library=None) and compile elsewhere with the Makefile",
            )
        return path


def is_zig(compiler: str) -> bool:
    return " -m ziglang cc " in compiler


def ndk() -> list[str]:
    """Return the directories of Android's compilers if the environment sets the path of the NDK."""
    for name in ("ANDROID_NDK_HOME", "ANDROID_NDK_ROOT", "ANDROID_NDK"):
        if name in os.environ:
            return [str(p) for p in Path(os.environ[name]).glob("toolchains/llvm/prebuilt/*/bin")]
    return []


HOST = Toolchain(("cc", "gcc", "clang"), "-march=native", "install gcc or clang")
_NDK = "set ANDROID_NDK_HOME to the directory of Android's NDK"
FOREIGN = {  # (platform, Android ABI) -> toolchain
    ("android", "arm64-v8a"): Toolchain(("aarch64-linux-android24-clang",), "-march=armv8-a", _NDK),
    ("android", "armeabi-v7a"): Toolchain(("armv7a-linux-androideabi24-clang",), "-mfpu=neon-vfpv4", _NDK),
    ("android", "x86_64"): Toolchain(("x86_64-linux-android24-clang",), "-march=x86-64-v2", _NDK),
    ("linux", "arm64-v8a"): Toolchain(
        ("aarch64-linux-gnu-gcc",),
        "-mcpu=generic",
        "apt-get install gcc-aarch64-linux-gnu, or pip install ziglang",
        "qemu-aarch64 -L /usr/aarch64-linux-gnu",
        zig="aarch64-linux-musl",
    ),
    ("linux", "armeabi-v7a"): Toolchain(
        ("arm-linux-gnueabihf-gcc",),
        "-march=armv7-a -mfpu=neon-vfpv4 -mfp16-format=ieee",
        "apt-get install gcc-arm-linux-gnueabihf, or pip install ziglang",
        "qemu-arm -L /usr/arm-linux-gnueabihf",
        zig="arm-linux-musleabihf",
        zig_flags="-mcpu=cortex_a7",
    ),
    ("linux", "x86_64"): Toolchain(
        ("x86_64-linux-gnu-gcc", "gcc", "clang"), "-march=x86-64-v2", "apt-get install gcc", "qemu-x86_64"
    ),
    ("bare", "armv7e-m"): Toolchain(
        ("arm-none-eabi-gcc",),
        "-mcpu=cortex-m7 -mthumb -mfloat-abi=hard -mfpu=fpv5-sp-d16",
        "apt-get install gcc-arm-none-eabi libnewlib-arm-none-eabi",
        "qemu-system-arm -M mps2-an500 -nographic -semihosting -kernel",
        link="--specs=rdimon.specs -T board.ld startup.c",
    ),
    ("wasi", "wasm32"): Toolchain((), "-msimd128", "pip install ziglang", "node run.mjs", zig="wasm32-wasi"),
}


def build(folder: Path, name: str, kind: str, compiler: str, flags: str) -> Path:
    """Compile an exported model, without its test, to an object file, a static or a shared library."""
    if kind not in LIBRARIES:
        raise OptionError(f"unknown library={kind!r}", facts=[f"accepted: {', '.join(LIBRARIES)}, None"])
    target = {"object": f"{name}.o", "static": f"lib{name}.a", "shared": f"lib{name}.so"}[kind]
    archiver = [f"AR={compiler.partition(' cc ')[0]} ar"] if is_zig(compiler) else []
    run(["make", "-s", "-C", str(folder), target, f"CC={compiler}", f"CFLAGS={flags}", *archiver])
    return folder / target


def code_bytes(path: Path) -> int:
    """Return the size of the executable sections of an object file: ELF (32 or 64 bits, little-endian) or wasm."""
    data = path.read_bytes()
    if data[:4] == b"\0asm":
        return _wasm_code_bytes(data)
    if data[:4] != b"\x7fELF":
        raise BackendError(f"'{path.name}' is not an ELF object file")
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


def _wasm_code_bytes(data: bytes) -> int:
    """Return the size of the code section of a WebAssembly module."""
    start, code = 8, 10  # the offset of the first section, the number of the code section
    while start < len(data):
        kind, size, shift = data[start], 0, 0
        while True:  # LEB128
            start += 1
            size |= (data[start] & 127) << shift
            shift += 7
            if data[start] < 128:
                break
        if kind == code:
            return size
        start += 1 + size
    return 0


def run(command: Sequence[str]) -> str:
    """Run a tool and return its output; raise an error with its messages if it fails."""
    try:
        process = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise BackendError(f"'{command[0]}' is not installed", hint=f"install {command[0]}") from None
    if process.returncode != 0:
        messages = (process.stderr or process.stdout).strip().splitlines()
        raise BackendError(
            f"'{Path(command[0]).name}' failed with exit status {process.returncode}",
            facts=[" ".join(command), *messages[:8]],
            hint="if the messages are about generated code, this is a bug in mithril-cbackend: please report it",
        )
    return process.stdout
