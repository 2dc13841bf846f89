"""The exported C of a model as a WebAssembly module without imports."""

from __future__ import annotations

import shlex
import tempfile
from pathlib import Path

from mithril.graph import BackendError, UnsupportedError, float16, iterate
from mithril_cbackend import toolchains
from mithril_cbackend.bundle import export_files
from mithril_cbackend.bundle.export_contents import Contents

ZIG = toolchains.Toolchain((), "-msimd128", "pip install ziglang", zig="wasm32-freestanding")
FLAGS = (
    "-std=c11",
    "-O3",
    "-fwrapv",
    "-fno-builtin",
    "-nostdlib",
    "-Wl,--no-entry",
    "-Wl,--strip-all",
)
FUNCTIONS = ("instance_size", "arena_size", "init", "set_weights", "run")
ROUNDED = ("ceil", "fabs", "floor", "nearbyint", "sqrt", "trunc")  # instructions of WebAssembly
LIBRARY = """\
#include <stddef.h>
void *memcpy(void *restrict to, const void *restrict from, size_t n) {
  for (size_t i = 0; i < n; ++i) ((char *)to)[i] = ((const char *)from)[i];
  return to;
}
void *memmove(void *to, const void *from, size_t n) {
  if ((char *)to < (const char *)from) return memcpy(to, from, n);
  while (n-- > 0) ((char *)to)[n] = ((const char *)from)[n];
  return to;
}
void *memset(void *to, int x, size_t n) {
  for (size_t i = 0; i < n; ++i) ((unsigned char *)to)[i] = (unsigned char)x;
  return to;
}
int strcmp(const char *a, const char *b) {
  while (*a != 0 && *a == *b) ++a, ++b;
  return *a - *b;
}
""" + "".join(
    f"float {f}f(float x) {{ return __builtin_{f}f(x); }}\ndouble {f}(double x) {{ return __builtin_{f}(x); }}\n"
    for f in ROUNDED
)


def check(contents: Contents) -> None:
    graph = contents.graph
    places = [(i.value, f"'{i.name}'", "") for i in graph.inputs]
    places += [(v, f"%{v.name} = {node.op.name}", str(node.origin)) for node, _ in iterate(graph) for v in node.results]
    for value, place, origin in places:
        if value.dtype is float16:
            raise UnsupportedError(
                f"WebAssembly has no float16, the dtype of {place}",
                facts=[origin] if origin else [],
                hint="compile in float32 or bfloat16; or pass webassembly=False, for browsers with WebGPU only",
            )


def module(contents: Contents) -> bytes:
    """Compile the C of a model by zig."""
    compiler = ZIG.compiler()
    if compiler is None:
        raise BackendError(
            "no compiler for WebAssembly is installed, which browsers without WebGPU run",
            facts=["looked for: ziglang"],
            hint="pip install ziglang; or pass webassembly=False, for browsers with WebGPU only",
        )
    check(contents)
    name = contents.name
    functions = [*FUNCTIONS, *(["reset"] if contents.carried else [])]
    exports = [*(f"-Wl,--export={name}_{f}" for f in functions), "-Wl,--export=__heap_base"]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / f"{name}.h").write_text(export_files.header(contents, embedded=False))
        (folder / f"{name}.c").write_text(export_files.source(contents))
        (folder / "library.c").write_text(LIBRARY)
        sources = [str(folder / f"{name}.c"), str(folder / "library.c")]
        result = folder / "model.wasm"
        command = shlex.split(compiler)
        toolchains.run([*command, ZIG.flags, *FLAGS, *exports, *sources, "-o", str(result)])
        return result.read_bytes()
