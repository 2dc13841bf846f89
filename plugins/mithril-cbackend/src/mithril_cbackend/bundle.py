"""Leaving Python: a compiled model as a folder of C11 that needs a compiler and the C library, and nothing else.

``model.c`` and ``model.h`` (kernels, driver, a small typed interface), the weights as a file and as a C array, a
Makefile, a CMakeLists.txt, and a test program that compares a run with what the model gave in Python.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mithril.errors import InputError, UnsupportedError
from mithril.runtime.compiled import CompiledModel
from mithril.types import dtype as as_dtype
from mithril_cbackend.executable import Executable
from mithril_cbackend.program import ARENA, TABLE
from mithril_cbackend.source import TYPES, module_text

ALIGNMENT = 64
FLAGS = "-std=c11 -O3 -march=native -ffp-contract=fast -Wall -Werror"


def export(
    compiled: CompiledModel,
    directory: str | os.PathLike[str],
    params: Mapping[str, Any] | None = None,
    inputs: Mapping[str, Any] | None = None,
    *,
    name: str = "model",
) -> Path:
    """Write the newest program of a model as C; returns the folder.

    ``params`` are the bound ones unless given. ``inputs`` are those of the test program; random numbers unless given.
    """
    if not compiled.programs:
        raise InputError("there is no program to export yet", hint="compile with shapes=, or call the model once")
    executable = compiled.programs[-1].executable
    if not isinstance(executable, Executable):
        raise UnsupportedError(
            f"backend '{compiled.backend.name}' does not export C", hint="compile the model for backend 'c'"
        )
    weights = params if params is not None else compiled.params or {}
    missing = [n for n, _ in executable.params if n not in weights]
    if missing:
        raise InputError(
            "the weights to export are not known",
            facts=[f"missing: {', '.join(missing[:8])}"],
            hint="export(compiled, directory, params), or compiled.bind(params) before",
        )
    if not re.fullmatch(r"[A-Za-z_]\w*", name):
        raise InputError(f"'{name}' is no name in C")
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    Bundle(executable, weights, inputs, name).write(folder)
    return folder


class Bundle:
    """The files of one exported program."""

    def __init__(
        self, executable: Executable, params: Mapping[str, Any], inputs: Mapping[str, Any] | None, name: str
    ) -> None:
        self.executable, self.program, self.name = executable, executable.program, name
        self.graph = executable.graph
        self.params = {n: np.ascontiguousarray(params[n]) for n, _ in executable.params}
        self.weights, self.offsets = self._weights()
        self.types = {i.name: i.type for i in self.graph.arguments}
        self.inputs = {n: self._input(n, inputs) for n, _ in executable.inputs}
        self.results = {n: np.array(x) for n, x in executable(self.params, self.inputs).items()}
        taken: set[str] = set()
        self.c_names = {n: _identifier(n, taken) for n in [*self.inputs, *self.results]}
        self.outputs = {n: f"{'out_' if n in self.inputs else ''}{self.c_names[n]}" for n in self.results}

    def _input(self, name: str, given: Mapping[str, Any] | None) -> np.ndarray[Any, Any]:
        t = self.types[name]
        if given is not None and name in given:
            return np.ascontiguousarray(given[name], t.dtype.numpy)
        rng = np.random.default_rng(0)
        shape = tuple(int(d) for d in t.shape)  # type: ignore[arg-type]
        if t.dtype.is_float:
            return rng.standard_normal(shape).astype(t.dtype.numpy)
        return rng.integers(0, 2, shape).astype(t.dtype.numpy)

    def _weights(self) -> tuple[bytes, dict[str, int]]:
        """Parameters and constants one after the other, each at a multiple of 64 bytes."""
        whole, offsets = bytearray(), {}
        arrays = {**self.params, **{f"constant {s}": a for s, a in self.program.constants.items()}}
        for name, array in arrays.items():
            whole += bytes(-len(whole) % ALIGNMENT)
            offsets[name] = len(whole)
            whole += array.tobytes()
        return bytes(whole), offsets

    def write(self, folder: Path) -> None:
        name = self.name
        (folder / f"{name}.h").write_text(self.header())
        (folder / f"{name}.c").write_text(self.source())
        (folder / f"{name}.weights").write_bytes(self.weights)
        (folder / f"{name}_weights.c").write_text(
            f'#include "{name}.h"\n\n' + _words(f"{name}_weights", self.weights, f"{name.upper()}_WEIGHT_BYTES")
        )
        (folder / f"{name}_test.c").write_text(self.test())
        (folder / "Makefile").write_text(MAKEFILE.replace("NAME", name).replace("FLAGS", FLAGS))
        (folder / "CMakeLists.txt").write_text(CMAKE.replace("NAME", name))

    # -- interface ------------------------------------------------------------------------------------------------
    def _arguments(self) -> list[str]:
        given = [f"const {_ctype(self.types[n].dtype)} *{self.c_names[n]}" for n in self.inputs]
        made = [f"{_ctype(as_dtype(x.dtype))} *{self.outputs[n]}" for n, x in self.results.items()]
        return [*given, *made]

    def header(self) -> str:
        name, up = self.name, self.name.upper()
        lines = [
            f"/* {name}: call {name}_init once, {name}_set_weights once, {name}_run as often as you like. */",
            f"#ifndef {up}_H",
            f"#define {up}_H",
            "",
            "#include <stdbool.h>",
            "#include <stddef.h>",
            "#include <stdint.h>",
            "",
            f"#define {up}_ARENA_BYTES {max(self.program.arena, 1)}",
            f"#define {up}_WEIGHT_BYTES {max(len(self.weights), 4)}",
        ]
        for names, rows in ((self.c_names, self.inputs), (self.outputs, self.results)):
            lines += [
                f"#define {up}_{names[n].upper()}_SIZE {x.size} /* {list(x.shape)} {x.dtype} */"
                for n, x in rows.items()
            ]
        lines += [
            "",
            "/* No two calls may use one of these at the same time. */",
            f"typedef struct {{ int64_t table[{self.program.slots}]; }} {name}_t;",
            "",
            f"/* The arena: {up}_ARENA_BYTES bytes that stay yours; best at a multiple of 64. */",
            f"void {name}_init({name}_t *{name}, void *arena);",
            "",
            f"/* All weights, as in {name}.weights and {name}_weights.c; they are read in place. */",
            f"void {name}_set_weights({name}_t *{name}, const void *weights);",
            "",
            "/* One parameter on its own, read in place; 0, or -1 if there is none of that name. */",
            f"int {name}_set_weight({name}_t *{name}, const char *key, const void *data);",
            "",
            f"void {name}_run({name}_t *{name}, {', '.join(self._arguments())});",
            "",
            f"extern const uint32_t {name}_weights[];",
            "",
            "#endif",
            "",
        ]
        return "\n".join(lines)

    def source(self) -> str:
        name, program = self.name, self.program
        slots = dict(self.executable.params)
        constants = {f"constant {s}": s for s in program.constants}
        rows = [
            f"  {name}->table[{slot}] = (int64_t)(intptr_t)(bytes + {self.offsets[n]}); /* {n} */"
            for n, slot in {**slots, **constants}.items()
        ]
        keys = [
            f'  if (strcmp(key, "{n}") == 0) {{ {name}->table[{slot}] = address; return 0; }}'
            for n, slot in slots.items()
        ]
        arguments = {n: program.arguments[n] for n in self.inputs}
        calls = [f"  {name}->table[{slot}] = (int64_t)(intptr_t){self.c_names[n]};" for n, slot in arguments.items()]
        calls += [f"  {name}->table[{slot}] = (int64_t)(intptr_t){self.outputs[n]};" for n, slot in program.results]
        text = module_text(program, self.executable.lanes)
        return "\n".join(
            [
                f"/* Generated by mithril from the graph '{self.graph.name}'. */",
                f'#include "{name}.h"',
                "",
                text,
                f"void {name}_init({name}_t *{name}, void *arena) {{",
                f"  memset({name}, 0, sizeof *{name});",
                f"  {name}->table[{ARENA}] = (int64_t)(intptr_t)arena;",
                f"  {name}->table[{TABLE}] = (int64_t)(intptr_t){name}->table;",
                "}",
                "",
                f"void {name}_set_weights({name}_t *{name}, const void *weights) {{",
                "  const unsigned char *bytes = weights;",
                *(rows or ["  (void)bytes;", f"  (void){name};"]),
                "}",
                "",
                f"int {name}_set_weight({name}_t *{name}, const char *key, const void *data) {{",
                "  const int64_t address = (int64_t)(intptr_t)data;",
                *(keys or [f"  (void){name}; (void)key; (void)address;"]),
                "  return -1;",
                "}",
                "",
                f"void {name}_run({name}_t *{name}, {', '.join(self._arguments())}) {{",
                *calls,
                f"  run({name}->table);",
                "}",
                "",
            ]
        )

    def test(self) -> str:
        name, up = self.name, self.name.upper()
        parts = [f'#include "{name}.h"', "", "#include <math.h>", "#include <stdio.h>", "#include <stdlib.h>", ""]
        for n, x in self.inputs.items():
            parts.append(_words(f"in_{self.c_names[n]}", x.tobytes()))
        for n, x in self.results.items():
            parts.append(_words(f"expected_{self.outputs[n]}", x.tobytes()))
        parts += [
            f"static {name}_t {name};",
            f"static _Alignas(64) unsigned char arena[{up}_ARENA_BYTES];",
            *(
                f"static {_ctype(as_dtype(x.dtype))} got_{self.outputs[n]}[{max(x.size, 1)}];"
                for n, x in self.results.items()
            ),
            "",
            "int main(void) {",
            "  double worst = 0.0;",
            f"  {name}_init(&{name}, arena);",
            f"  {name}_set_weights(&{name}, {name}_weights);",
        ]
        given = [f"(const void *)in_{self.c_names[n]}" for n in self.inputs]
        made = [f"got_{self.outputs[n]}" for n in self.results]
        parts.append(f"  {name}_run(&{name}, {', '.join([*given, *made])});")
        for n, x in self.results.items():
            kind = as_dtype(x.dtype)
            if kind.name == "bfloat16" or x.size == 0:
                continue
            parts += [
                "  {",
                f"    const {_ctype(kind)} *expected = (const void *)expected_{self.outputs[n]};",
                "    double largest = 1e-30, apart = 0.0;",
                f"    for (size_t i = 0; i < {x.size}; ++i) {{",
                f"      const double e = (double)expected[i], g = (double)got_{self.outputs[n]}[i];",
                "      if (e != e && g != g) continue;",
                "      if (e == g) { largest = fmax(largest, isfinite(e) ? fabs(e) : 0.0); continue; }",
                "      largest = fmax(largest, fabs(e));",
                "      apart = fmax(apart, fabs(e - g) == fabs(e - g) ? fabs(e - g) : INFINITY);",
                "    }",
                f'    printf("{n}: largest difference %g of %g\\n", apart, largest);',
                "    worst = fmax(worst, apart / largest);",
                "  }",
            ]
        tolerance = "1e-2" if any(as_dtype(x.dtype).bits == 16 for x in self.results.values()) else "1e-5"
        parts += [f"  return worst <= {tolerance} ? EXIT_SUCCESS : EXIT_FAILURE;", "}", ""]
        return "\n".join(parts)


def _ctype(dtype: Any) -> str:
    return {"bool": "uint8_t", "bfloat16": "uint16_t"}.get(dtype.name, TYPES[dtype.name])


def _identifier(name: str, taken: set[str]) -> str:
    made = re.sub(r"\W", "_", name, flags=re.ASCII)
    made = f"_{made}" if made[:1].isdigit() else made
    while made in taken:
        made += "_"
    taken.add(made)
    return made


def _words(name: str, data: bytes, size: str | None = None) -> str:
    """Bytes as an array of 32-bit words, aligned for vectors."""
    words = np.frombuffer(data + bytes(-len(data) % 4), "<u4") if data else np.zeros(1, np.uint32)
    rows = [", ".join(f"0x{w:08x}" for w in words[k : k + 10]) for k in range(0, len(words), 10)]
    static = "" if size else "static "
    count = f"({size} + 3) / 4" if size else ""
    return f"{static}_Alignas(64) const uint32_t {name}[{count}] = {{\n  " + ",\n  ".join(rows) + "\n};\n"


MAKEFILE = """\
CC ?= cc
CFLAGS ?= FLAGS
# threads: make CFLAGS="FLAGS -fopenmp" LDLIBS="-lm -lgomp"
LDLIBS ?= -lm

all: NAME_test

NAME_test: NAME_test.o NAME.o NAME_weights.o
\t$(CC) $(CFLAGS) -o $@ $^ $(LDLIBS)

%.o: %.c NAME.h
\t$(CC) $(CFLAGS) -c -o $@ $<

libNAME.so: NAME.c NAME_weights.c NAME.h
\t$(CC) $(CFLAGS) -fPIC -shared -o $@ NAME.c NAME_weights.c $(LDLIBS)

check: NAME_test
\t./NAME_test

clean:
\trm -f *.o NAME_test libNAME.so

.PHONY: all check clean
"""

CMAKE = """\
cmake_minimum_required(VERSION 3.10)
project(NAME C)
set(CMAKE_C_STANDARD 11)
add_library(NAME NAME.c NAME_weights.c)
target_compile_options(NAME PRIVATE -O3 -ffp-contract=fast)
target_include_directories(NAME PUBLIC ${CMAKE_CURRENT_SOURCE_DIR})
target_link_libraries(NAME PUBLIC m)
add_executable(NAME_test NAME_test.c)
target_link_libraries(NAME_test NAME)
enable_testing()
add_test(NAME same_as_python COMMAND NAME_test)
"""
