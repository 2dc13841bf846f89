"""The C files of an exported model: header, source, weights, test."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from mithril import __version__
from mithril.base import dtype as as_dtype
from mithril_cbackend.bundle.export_contents import TRUNCATED, Contents
from mithril_cbackend.graph.call_layout import ARENA
from mithril_cbackend.program.c_printer import TYPES, body_text, prelude, slot_names
from mithril_cbackend.program.c_text import c_quoted, c_visible

ARGUMENTS = {**TYPES, "bool": "uint8_t", "bfloat16": "uint16_t"}  # dtype -> element type of an argument


def header(contents: Contents, embedded: bool) -> str:
    """Return the header file."""
    name, up = contents.name, contents.prefix
    lines = [
        f"/* {origin(contents)}",
        "",
        f"   static {name}_t instance;",
        f"   static _Alignas(64) unsigned char arena[{up}_ARENA_BYTES];",
        f"   {name}_init(&instance, arena);",
        f"   {name}_set_weights(&instance, {f'{name}_weights' if embedded else 'bytes'});",
        f"   {name}_run(&instance, {', '.join([*contents.c_names.values(), *contents.outputs.values()])});",
        "",
        "   Functions that return int return 0, or -1 if an argument is missing; then they have no effect.",
        *truncation_comment(contents),
        "*/",
        f"#ifndef {up}_H",
        f"#define {up}_H",
        "",
        "#include <stddef.h>",
        "#include <stdint.h>",
        "",
        "#ifdef __cplusplus",
        'extern "C" {',
        "#endif",
        "",
        f"#define {up}_ARENA_BYTES {contents.arena_bytes}",
        f"#define {up}_WEIGHT_BYTES {max(len(contents.weights), 4)}",
        "",
    ]
    for names, arrays in ((contents.c_names, contents.inputs), (contents.outputs, contents.results)):
        for n, x in arrays.items():
            size = f"{up}_{names[n].upper()}_SIZE"
            lines.append(f"#define {size} {max(x.size, 1)} /* {as_dtype(x.dtype)}{list(x.shape)}, row by row */")
            lines.append(f"#define {up}_{names[n].upper()}_RANK {x.ndim}")
            lines.append(f"#define {up}_{names[n].upper()}_SHAPE {{{', '.join(map(str, x.shape)) or '1'}}}")
    lines += [
        "",
        "/* One instance, with its own arena, for every thread that runs the model. */",
        f"typedef struct {{ int64_t table[{contents.program.slots}]; const unsigned char *weights; }} {name}_t;",
        "",
        f"/* {up}_ARENA_BYTES bytes used only by this instance, 8-byte aligned, preferably 64-byte aligned. */",
        f"int {name}_init({name}_t *self, void *arena);",
        f"size_t {name}_arena_size(void); /* for programs that load the library dynamically */",
        f"size_t {name}_instance_size(void);",
        "",
        f"/* Set the bytes of {name}.weights, read in place with the same alignment, and reset the state. */",
        f"int {name}_set_weights({name}_t *self, const void *weights);",
        "",
        "/* Set one weight, read in place; return 0, or -1 if no weight has that name. */",
        f"int {name}_set_weight({name}_t *self, const char *name, const void *data);",
        "",
    ]
    if contents.carried:
        lines += [
            f"/* Reset the state: every run updates {listed(list(contents.carried))}. */",
            f"void {name}_reset({name}_t *self);",
            "",
            "/* Return the current address of a weight or of state; NULL if nothing has that name. */",
            f"const void *{name}_get({name}_t *self, const char *name);",
            "",
        ]
    lines += [f"int {name}_run({arguments(contents)});", ""]
    if embedded:
        lines += [f"extern const uint32_t {name}_weights[]; /* the contents of {name}.weights */", ""]
    lines += ["#ifdef __cplusplus", "}", "#endif", "", "#endif", ""]
    return "\n".join(lines)


def arguments(contents: Contents) -> str:
    inputs = [
        f"const {ctype(x)} {c}[{contents.prefix}_{c.upper()}_SIZE]"
        for c, x in zip(contents.c_names.values(), contents.inputs.values(), strict=True)
    ]
    outputs = [
        f"{ctype(x)} {c}[{contents.prefix}_{c.upper()}_SIZE]"
        for c, x in zip(contents.outputs.values(), contents.results.values(), strict=True)
    ]
    return ", ".join([f"{contents.name}_t *self", *inputs, *outputs])


def source(contents: Contents) -> str:
    """Return the source file: kernels, driver and interface."""
    name, program = contents.name, contents.program
    names = slot_names(program)
    body = body_text(program, contents.executable.machine.lanes())
    weights = [weight(contents, n, names[slot]) for n, slot in contents.slots.items() if n not in contents.carried]
    keys = [
        f"  if (strcmp(name, {c_quoted(n)}) == 0) {{ self->table[{names[slot]}] = (int64_t)(intptr_t)data; return 0; }}"
        for n, slot in contents.slots.items()
        if n not in contents.constants
    ]
    results = dict(program.results)
    calls = [
        f"  self->table[{names[program.arguments[n]]}] = (int64_t)(intptr_t){c};" for n, c in contents.c_names.items()
    ]
    calls += [f"  self->table[{names[results[n]]}] = (int64_t)(intptr_t){c};" for n, c in contents.outputs.items()]
    parts = [
        f"/* {origin(contents)} */",
        f'#include "{name}.h"',
        "",
        "#ifdef __FAST_MATH__",
        '#error "-ffast-math changes the results of masks and of exponentials: compile without it"',
        "#endif",
        "",
        prelude(body, contents.executable.machine.lanes()),
        body,
        *function(
            f"int {name}_init({name}_t *self, void *arena)",
            [
                "  if (self == NULL || arena == NULL || (uintptr_t)arena % 8 != 0) return -1;",
                "  memset(self, 0, sizeof *self);",
                "  self->table[ARENA] = (int64_t)(intptr_t)arena;",
                "  return 0;",
            ],
        ),
        *function(f"size_t {name}_arena_size(void)", [f"  return {contents.prefix}_ARENA_BYTES;"]),
        *function(f"size_t {name}_instance_size(void)", [f"  return sizeof({name}_t);"]),
        *function(
            f"int {name}_set_weights({name}_t *self, const void *weights)",
            [
                "  if (self == NULL || weights == NULL || (uintptr_t)weights % 8 != 0) return -1;",
                "  self->weights = weights;",
                *weights,
                *([f"  {name}_reset(self);"] if contents.carried else []),
                "  return 0;",
            ],
        ),
        *function(
            f"int {name}_set_weight({name}_t *self, const char *name, const void *data)",
            [*(keys or ["  (void)self; (void)name; (void)data;"]), "  return -1;"],
        ),
    ]
    if contents.carried:
        parts += carried_functions(contents, names)
    after = [swap_call(contents, n, names) for n in contents.carried]
    if contents.flags:
        declared = f"  int32_t flags[{len(contents.flags)}] = {{0}};"
        slots = [
            f"  self->table[{names[results[n]]}] = (int64_t)(intptr_t)&flags[{k}]; /* {c_visible(n)} */"
            for k, n in enumerate(contents.flags)
        ]
        raised = " || ".join(f"flags[{k}] != 0" for k in range(len(contents.flags)))
        calls, after = [declared, *calls, *slots], [f"  if ({raised}) return {TRUNCATED};", *after]
    calls = ["  if (self == NULL) return -1;", *calls, READY, "  run(self->table);", *after, "  return 0;"]
    return "\n".join([*parts, *ready(contents, names), *function(f"int {name}_run({arguments(contents)})", calls)])


def truncation_comment(contents: Contents) -> list[str]:
    """Return the header's comment on the return code of a truncated run, if there is one."""
    if not contents.flags:
        return []
    return [
        f"   {contents.name}_run returns {TRUNCATED} if a loop reached max_trips while its condition still held,",
        "   or if an index is past the end of a buffer, such as a key/value cache. The results are then invalid,",
        "   and the state is unchanged.",
    ]


READY = "  if (!ready(self->table)) return -1;"


def ready(contents: Contents, names: dict[int, str]) -> list[str]:
    """Return a C function that checks that the arena, weights, inputs and results are set."""
    slots = [ARENA, *contents.program.arguments.values(), *(slot for _, slot in contents.program.results)]
    slots += contents.program.constants
    return function(
        "static int ready(const int64_t *table)",
        [
            f"  static const int needed[] = {{{', '.join(names[slot] for slot in slots)}}};",
            "  for (size_t k = 0; k < sizeof needed / sizeof *needed; ++k) {",
            "    if (table[needed[k]] == 0) return 0;",
            "  }",
            "  return 1;",
        ],
    )


def origin(contents: Contents) -> str:
    """Return lines with the generator, the graph, the digest of the weights and the plugins that took part."""
    digest = hashlib.sha256(contents.weights).hexdigest()[:16]
    graph = c_visible(contents.graph.name)
    first = f"Generated by mithril {__version__} from the graph '{graph}'; weights sha256 {digest}"
    return "\n   ".join([first, *map(c_visible, contents.executable.plugins)])


def weight(contents: Contents, n: str, slot: str) -> str:
    return f"  self->table[{slot}] = (int64_t)(intptr_t)(self->weights + {contents.offsets[n]}); /* {c_visible(n)} */"


def carried_functions(contents: Contents, names: dict[int, str]) -> list[str]:
    """Return the C functions that swap, reset and find the values carried from one run to the next."""
    results = dict(contents.program.results)
    rows = []
    for n in contents.carried:
        read_slot, write_slot = contents.program.arguments[n], results[contents.carried[n]]
        rows += [
            weight(contents, n, names[read_slot]),
            f"  self->table[{names[write_slot]}] = self->table[ARENA] + {contents.copies[n][0]};",
        ]
    lookups = [
        f"  if (strcmp(name, {c_quoted(n)}) == 0) return at(self->table[{names[slot]}]);"
        for n, slot in contents.slots.items()
        if n not in contents.constants
    ]
    return [
        "/* Swap the two copies: the next run reads the one just written and writes the other. */",
        *function(
            "static void turn(int64_t *table, int at, int to, int64_t first, int64_t second)",
            [
                "  table[at] = table[to];",
                "  table[to] = table[ARENA] + (table[at] == table[ARENA] + first ? second : first);",
            ],
        ),
        *function(f"void {contents.name}_reset({contents.name}_t *self)", rows),
        *function(
            f"const void *{contents.name}_get({contents.name}_t *self, const char *name)", [*lookups, "  return NULL;"]
        ),
    ]


def swap_call(contents: Contents, n: str, names: dict[int, str]) -> str:
    read_slot, write_slot = (
        names[contents.program.arguments[n]],
        names[dict(contents.program.results)[contents.carried[n]]],
    )
    first, second = contents.copies[n]
    return f"  turn(self->table, {read_slot}, {write_slot}, {first}, {second});"


def function(head: str, lines: Sequence[str]) -> list[str]:
    return [f"{head} {{", *lines, "}", ""]


def weights(contents: Contents) -> str:
    size = f"({contents.prefix}_WEIGHT_BYTES + 3) / 4"
    return f'#include "{contents.name}.h"\n\n' + words(f"{contents.name}_weights", contents.weights, size)


def words(name: str, data: bytes, size: str = "") -> str:
    """Return bytes as a 64-byte aligned array of 32-bit words."""
    numbers = np.frombuffer(data + bytes(-len(data) % 4), "<u4") if data else np.zeros(1, np.uint32)
    rows = [", ".join(f"0x{w:08x}" for w in numbers[k : k + 10].tolist()) for k in range(0, len(numbers), 10)]
    return f"_Alignas(64) const uint32_t {name}[{size}] = {{\n  " + ",\n  ".join(rows) + "\n};\n"


def test(contents: Contents, embedded: bool) -> str:
    """Return a C program that compares its last run with the results of Python."""
    name, up = contents.name, contents.prefix
    parts = [f'#include "{name}.h"', "", "#include <math.h>", "#include <stdio.h>", "#include <stdlib.h>", ""]
    parts += ["static " + words(f"{contents.c_names[n]}_given", x.tobytes()) for n, x in contents.inputs.items()]
    checked = {n: x for n, x in contents.results.items() if x.size}
    parts += ["static " + words(f"{contents.outputs[n]}_expected", x.tobytes()) for n, x in checked.items()]
    parts += [
        f"static {name}_t instance;",
        f"static _Alignas(64) unsigned char arena[{up}_ARENA_BYTES];",
        *([] if embedded else [f"static _Alignas(64) unsigned char weights[{up}_WEIGHT_BYTES];"]),
        *(f"static {ctype(x)} {contents.outputs[n]}_result[{max(x.size, 1)}];" for n, x in contents.results.items()),
        "",
    ]
    if not embedded:
        parts += READ.replace("NAME", name).splitlines()
    for kind in sorted({as_dtype(x.dtype).name for x in checked.values()}):
        conversion = "widened" if kind == "bfloat16" else "(double)"
        parts += (WIDENED if kind == "bfloat16" else "").splitlines()
        text = COMPARE.replace("KIND", kind).replace("TYPE", ARGUMENTS[kind]).replace("WIDE", conversion)
        parts += [*text.splitlines(), ""]
    stored = f"{name}_weights" if embedded else "weights"
    input_names = [f"(const void *){c}_given" for c in contents.c_names.values()]
    output_names = [f"{c}_result" for c in contents.outputs.values()]
    call = f"{name}_run(&instance, {', '.join([*input_names, *output_names])})"
    parts += ["int main(void) {", "  double worst = 0.0;"]
    if not embedded:
        parts += ["  if (!read_weights()) return EXIT_FAILURE;"]
    parts += [
        f"  if ({name}_init(&instance, arena) != 0) return EXIT_FAILURE;",
        f"  if ({name}_set_weights(&instance, {stored}) != 0) return EXIT_FAILURE;",
        *[f"  if ({call} != {code}) return EXIT_FAILURE;" for code in contents.codes],
    ]
    for n, x in checked.items():
        c, compare = contents.outputs[n], f"compare_{as_dtype(x.dtype).name}"
        parts += [
            f"  worst = fmax(worst, {compare}({c_quoted(n)},",
            f"    (const void *){c}_expected, {c}_result, {x.size}));",
        ]
    tolerance = "1e-2" if any(as_dtype(x.dtype).bits == 16 for x in checked.values()) else "1e-5"
    parts += [f"  return worst <= {tolerance} ? EXIT_SUCCESS : EXIT_FAILURE;", "}", ""]
    return "\n".join(parts)


READ = """\
static int read_weights(void) {
  FILE *file = fopen("NAME.weights", "rb");
  if (file == NULL || fread(weights, 1, sizeof weights, file) != sizeof weights) {
    fprintf(stderr, "NAME.weights cannot be read\\n");
    return 0;
  }
  fclose(file);
  return 1;
}
"""
WIDENED = """\
static double widened(uint16_t x) {
  const union { uint32_t bits; float number; } wide = {(uint32_t)x << 16};
  return wide.number;
}

"""
COMPARE = """\
/* Largest error relative to the largest magnitude; infinite if only one of two elements is nan or infinite. */
static double compare_KIND(const char *name, const TYPE *expected, const TYPE *made, int size) {
  double largest = 1e-30, apart = 0.0;
  for (int i = 0; i < size; ++i) {
    const double e = WIDE(expected[i]), m = WIDE(made[i]);
    if (isfinite(e)) largest = fmax(largest, fabs(e));
    if (e == m || (isnan(e) && isnan(m))) continue;
    apart = isfinite(e - m) ? fmax(apart, fabs(e - m)) : INFINITY;
  }
  printf("%s: largest difference %g of %g\\n", name, apart, largest);
  return apart / largest;
}
"""


def ctype(x: np.ndarray[Any, Any]) -> str:
    """Return the C type of an argument's elements."""
    return ARGUMENTS[as_dtype(x.dtype).name]


def listed(names: list[str]) -> str:
    """Return the first names, and how many more there are."""
    text = ", ".join(map(c_visible, names[:4]))
    return text + (f" and {len(names) - 4} more" if len(names) > 4 else "")
