"""The C files of an exported model: header, source, weights, test."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from mithril import __version__
from mithril.base import dtype as as_dtype
from mithril_cbackend.bundle.export_contents import TRUNCATED, Contents
from mithril_cbackend.program.c_module import ARGUMENTS, Field, body_text, fields, prelude, struct_text
from mithril_cbackend.program.c_text import c_quoted, c_visible


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
        f"   Functions that return int return {up}_OK, or a negative code; then they have no effect.",
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
        *constants(contents),
        "/* One instance, with its own arena, for every thread that runs the model; its fields are private. */",
        "typedef struct {",
        "  uint32_t mark;",
        "  const unsigned char *weights;",
        struct_text(contents.program)
        + "".join(f"  {result_type(contents, n)} check_{k};\n" for k, n in enumerate(contents.flags))
        + f"}} {name}_t;",
        "",
        *prototypes(contents),
        *([f"extern const uint32_t {name}_weights[]; /* the contents of {name}.weights */", ""] if embedded else []),
        "#ifdef __cplusplus",
        "}",
        "#endif",
        "",
        "#endif",
        "",
    ]
    return "\n".join(lines)


def constants(contents: Contents) -> list[str]:
    """Return the header's sizes, shapes and return codes."""
    name, up = contents.name, contents.prefix
    lines = [
        f'#define {up}_GENERATOR "mithril {__version__}"',
        f"#define {up}_ARENA_BYTES {contents.arena_bytes}",
        f"#define {up}_WEIGHT_BYTES {max(len(contents.weights), 4)}",
        "",
        "enum {",
        f"  {up}_OK = 0,",
        *([f"  {up}_TRUNCATED = {TRUNCATED},"] if contents.flags else []),
        f"  {up}_MISSING = -1, /* an argument is NULL */",
        f"  {up}_UNINITIALIZED = -2, /* {name}_init has not been called, or a weight is not set */",
        f"  {up}_MISALIGNED = -3, /* an address is no multiple of the element's size; arena and weights: of 8 */",
        f"  {up}_UNKNOWN = -4 /* no weight has that name */",
        "};",
        "",
    ]
    for c, x in arrays(contents):
        kind = f"{as_dtype(x.dtype)}{list(x.shape)}"
        lines.append(f"#define {up}_{c.upper()}_SIZE {max(x.size, 1)} /* {kind}, row by row */")
        lines.append(f"#define {up}_{c.upper()}_RANK {x.ndim}")
        lines.append(f"#define {up}_{c.upper()}_SHAPE {{{', '.join(map(str, x.shape)) or '1'}}}")
    lines += [f"extern const int32_t {array}" for array in shape_arrays(contents)]
    return [*lines, ""]


def prototypes(contents: Contents) -> list[str]:
    """Return the declarations of the header's functions."""
    name, up = contents.name, contents.prefix
    lines = [
        f"/* {up}_ARENA_BYTES bytes used only by this instance, 8-byte aligned, preferably 64-byte aligned. */",
        f"int {name}_init({name}_t *self, void *arena);",
        f"size_t {name}_arena_size(void); /* for programs that load the library dynamically */",
        f"size_t {name}_instance_size(void);",
        "",
        f"/* Set the bytes of {name}.weights, read in place with the same alignment, and reset the state. */",
        f"int {name}_set_weights({name}_t *self, const void *weights);",
        "",
        "/* Set one weight, read in place. */",
        f"int {name}_set_weight({name}_t *self, const char *name, const void *data);",
        "",
    ]
    if contents.carried:
        lines += [
            f"/* Reset the state: every run updates {listed(list(contents.carried))}. */",
            f"int {name}_reset({name}_t *self);",
            "",
            "/* Return the current address of a weight or of state; NULL if nothing has that name. */",
            f"const void *{name}_get(const {name}_t *self, const char *name);",
            "",
        ]
    return [*lines, f"int {name}_run({arguments(contents)});", ""]


def arrays(contents: Contents) -> list[tuple[str, np.ndarray[Any, Any]]]:
    """Return the inputs and outputs by C name."""
    rows = [(c, contents.inputs[n]) for n, c in contents.c_names.items()]
    return rows + [(c, contents.results[n]) for n, c in contents.outputs.items()]


def shape_arrays(contents: Contents) -> list[str]:
    """Return the declarations of the ranks and shapes of all arguments."""
    count, rank = len(arrays(contents)), max((x.ndim for _, x in arrays(contents)), default=0)
    name = contents.name
    return [
        f"{name}_ranks[{max(count, 1)}]; /* of the arguments of {name}_run */",
        f"{name}_shapes[{max(count, 1)}][{max(rank, 1)}];",
    ]


def arguments(contents: Contents) -> str:
    up = contents.prefix
    texts = [
        f"{'const ' if k < len(contents.inputs) else ''}{ctype(x)} {c}[{up}_{c.upper()}_SIZE]"
        for k, (c, x) in enumerate(arrays(contents))
    ]
    return ", ".join([f"{contents.name}_t *self", *texts])


def source(contents: Contents) -> str:
    """Return the source file: kernels, driver and interface."""
    name, lanes = contents.name, contents.executable.machine.lanes()
    body = body_text(contents.program, lanes, f"{name}_t")
    functions = interface(contents)
    parts = [
        f"/* {origin(contents)} */",
        f'#include "{name}.h"',
        "",
        "#ifdef __FAST_MATH__",
        '#error "-ffast-math changes the results of masks and of exponentials: compile without it"',
        "#endif",
        "",
        prelude(body + functions, lanes),
        body,
        functions,
    ]
    return "\n".join(parts)


def interface(contents: Contents) -> str:
    """Return the functions that the header declares."""
    name, up, used = contents.name, contents.prefix, fields(contents.program)
    stored = [n for n in contents.slots if n not in contents.carried]
    settable = {n: used[slot] for n, slot in contents.slots.items() if n not in contents.constants}
    choices = []
    for n, field in settable.items():
        choices += [
            f"  if (strcmp(name, {c_quoted(n)}) == 0) {{",
            f"    if ((uintptr_t)data % sizeof *self->{field.name} != 0) return {up}_MISALIGNED;",
            f"    self->{field.name} = data;",
            f"    return {up}_OK;",
            "  }",
        ]
    parts = [
        *shape_values(contents),
        *function(
            f"int {name}_init({name}_t *self, void *arena)",
            [
                f"  if (self == NULL || arena == NULL) return {up}_MISSING;",
                f"  if ((uintptr_t)arena % 8 != 0) return {up}_MISALIGNED;",
                "  memset(self, 0, sizeof *self);",
                "  self->arena = arena;",
                f"  self->mark = {mark(contents)};",
                f"  return {up}_OK;",
            ],
        ),
        *function(f"size_t {name}_arena_size(void)", [f"  return {up}_ARENA_BYTES;"]),
        *function(f"size_t {name}_instance_size(void)", [f"  return sizeof({name}_t);"]),
        *function(
            f"int {name}_set_weights({name}_t *self, const void *weights)",
            [
                f"  if (self == NULL || weights == NULL) return {up}_MISSING;",
                f"  if (self->mark != {mark(contents)}) return {up}_UNINITIALIZED;",
                f"  if ((uintptr_t)weights % 8 != 0) return {up}_MISALIGNED;",
                "  self->weights = weights;",
                *(weight(contents, n, used[contents.slots[n]]) for n in stored),
                f"  return {f'{name}_reset(self)' if contents.carried else f'{up}_OK'};",
            ],
        ),
        *function(
            f"int {name}_set_weight({name}_t *self, const char *name, const void *data)",
            [
                f"  if (self == NULL || name == NULL || data == NULL) return {up}_MISSING;",
                f"  if (self->mark != {mark(contents)}) return {up}_UNINITIALIZED;",
                *choices,
                f"  return {up}_UNKNOWN;",
            ],
        ),
        *(carried_functions(contents, settable) if contents.carried else []),
        *ready(contents),
        *run_function(contents),
    ]
    return "\n".join(parts)


def shape_values(contents: Contents) -> list[str]:
    """Return the definitions of the arrays of ranks and shapes."""
    ranks = ", ".join(f"{contents.prefix}_{c.upper()}_RANK" for c, _ in arrays(contents)) or "0"
    shapes = ", ".join(f"{contents.prefix}_{c.upper()}_SHAPE" for c, _ in arrays(contents)) or "{0}"
    values = (ranks, shapes)
    heads = [declaration.partition(";")[0] for declaration in shape_arrays(contents)]
    return [f"const int32_t {head} = {{{value}}};" for head, value in zip(heads, values, strict=True)] + [""]


def run_function(contents: Contents) -> list[str]:
    """Return the C function that checks its arguments and runs the model."""
    name, up, used = contents.name, contents.prefix, fields(contents.program)
    results = dict(contents.program.results)
    inputs = [(c, used[contents.program.arguments[n]]) for n, c in contents.c_names.items()]
    outputs = [(c, used[results[n]]) for n, c in contents.outputs.items()]
    missing = " || ".join(f"{c} == NULL" for c in ["self", *(c for c, _ in inputs + outputs)])
    lines = [
        f"  if ({missing}) return {up}_MISSING;",
        f"  if (!ready(self)) return {up}_UNINITIALIZED;",
        *(f"  if ((uintptr_t){c} % sizeof *{c} != 0) return {up}_MISALIGNED;" for c, _ in inputs + outputs),
        *(f"  self->{field.name} = {c};" for c, field in inputs + outputs),
    ]
    for k, n in enumerate(contents.flags):
        lines += [
            f"  self->check_{k} = 0;",
            f"  self->{used[results[n]].name} = &self->check_{k}; /* {c_visible(n)} */",
        ]
    lines.append("  run(self);")
    if contents.flags:
        raised = " || ".join(f"self->check_{k} != 0" for k in range(len(contents.flags)))
        lines.append(f"  if ({raised}) return {up}_TRUNCATED;")
    for n, carried in contents.carried.items():
        read, written = used[contents.program.arguments[n]].name, used[results[carried]].name
        first, second = contents.copies[n]
        lines += [
            f"  self->{read} = self->{written};",
            f"  self->{written} = other(self, self->{read}, {first}, {second});",
        ]
    return function(f"int {name}_run({arguments(contents)})", [*lines, f"  return {up}_OK;"])


def truncation_comment(contents: Contents) -> list[str]:
    """Return the header's comment on the return code of a truncated run, if there is one."""
    if not contents.flags:
        return []
    return [
        f"   {contents.name}_run returns {contents.prefix}_TRUNCATED if a loop reached max_trips while its condition",
        "   still held, or if an index is past the end of a buffer, such as a key/value cache. The results are then",
        "   invalid, and the state is unchanged.",
    ]


def mark(contents: Contents) -> str:
    """Return a number that distinguishes an initialized instance of this model from uninitialized memory."""
    return f"0x{int(digest(contents)[:8], 16) | 1:08x}u"


def ready(contents: Contents) -> list[str]:
    """Return a C function that checks that the instance is initialized and all weights are set."""
    used = fields(contents.program)
    needed = [used[slot].name for slot in contents.slots.values()]
    checks = "".join(f" &&\n         self->{name} != NULL" for name in needed)
    return function(
        f"static int ready(const {contents.name}_t *self)", [f"  return self->mark == {mark(contents)}{checks};"]
    )


def origin(contents: Contents) -> str:
    """Return lines with the generator, the graph, the digest of the weights, the license and the plugins used."""
    graph = c_visible(contents.graph.name)
    first = f"Generated by mithril {__version__} from the graph '{graph}'; weights sha256 {digest(contents)}"
    license_ = "SPDX-License-Identifier: MIT (the generated code; the model and its weights keep their own license)"
    return "\n   ".join([first, license_, *map(c_visible, contents.executable.plugins)])


def digest(contents: Contents) -> str:
    return hashlib.sha256(contents.weights).hexdigest()[:16]


def weight(contents: Contents, n: str, field: Field) -> str:
    return f"  self->{field.name} = ({field.element} *)(self->weights + {contents.offsets[n]}); /* {c_visible(n)} */"


def carried_functions(contents: Contents, settable: dict[str, Field]) -> list[str]:
    """Return the C functions that swap, reset and find the values carried from one run to the next."""
    name, up, used, results = contents.name, contents.prefix, fields(contents.program), dict(contents.program.results)
    rows = []
    for n in contents.carried:
        written = used[results[contents.carried[n]]]
        rows += [
            weight(contents, n, used[contents.program.arguments[n]]),
            f"  self->{written.name} = ({written.element} *)(self->arena + {contents.copies[n][0]});",
        ]
    lookups = [f"  if (strcmp(name, {c_quoted(n)}) == 0) return self->{field.name};" for n, field in settable.items()]
    return [
        "/* Return the copy that the next run writes: the one that it does not read. */",
        *function(
            f"static void *other(const {name}_t *self, const void *read, size_t first, size_t second)",
            ["  return self->arena + (read == self->arena + first ? second : first);"],
        ),
        *function(
            f"int {name}_reset({name}_t *self)",
            [
                f"  if (self == NULL) return {up}_MISSING;",
                f"  if (self->mark != {mark(contents)} || self->weights == NULL) return {up}_UNINITIALIZED;",
                *rows,
                f"  return {up}_OK;",
            ],
        ),
        *function(
            f"const void *{name}_get(const {name}_t *self, const char *name)",
            ["  if (self == NULL || name == NULL) return NULL;", *lookups, "  return NULL;"],
        ),
    ]


def function(head: str, lines: Sequence[str]) -> list[str]:
    return [f"{head} {{", *lines, "}", ""]


def weights(contents: Contents) -> str:
    size = f"({contents.prefix}_WEIGHT_BYTES + 3) / 4"
    return f'#include "{contents.name}.h"\n\n' + words(f"{contents.name}_weights", contents.weights, size)


def words(name: str, data: bytes | bytearray, size: str) -> str:
    """Return bytes as a 64-byte aligned array of 32-bit words."""
    return f"_Alignas(64) const uint32_t {name}[{size}] = {{\n{numbers(data)}\n}};\n"


def typed(name: str, x: np.ndarray[Any, Any]) -> str:
    """Return an array of the test as a union of its words and its elements."""
    count = max(-(-x.nbytes // 4), 1)
    union = f"union {{ uint32_t words[{count}]; {ctype(x)} values[{max(x.size, 1)}]; }}"
    return f"static _Alignas(64) const {union} {name} = {{{{\n{numbers(x.tobytes())}\n}}}};\n"


def numbers(data: bytes | bytearray) -> str:
    """Return bytes as lines of 32-bit numbers, at least one."""
    words_ = np.frombuffer(data + bytes(-len(data) % 4), "<u4") if data else np.zeros(1, np.uint32)
    rows = [", ".join(f"0x{w:08x}" for w in words_[k : k + 10].tolist()) for k in range(0, len(words_), 10)]
    return "  " + ",\n  ".join(rows)


def test(contents: Contents, embedded: bool) -> str:
    """Return a C program that compares its last run with the results of Python."""
    name, up = contents.name, contents.prefix
    parts = [f'#include "{name}.h"', "", "#include <math.h>", "#include <stdio.h>", "#include <stdlib.h>", ""]
    parts += [typed(f"{contents.c_names[n]}_given", x) for n, x in contents.inputs.items()]
    checked = {n: x for n, x in contents.results.items() if x.size}
    parts += [typed(f"{contents.outputs[n]}_expected", x) for n, x in checked.items()]
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
    input_names = [f"{c}_given.values" for c in contents.c_names.values()]
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
            f"    {c}_expected.values, {c}_result, {x.size}));",
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


def result_type(contents: Contents, result: str) -> str:
    """Return the C type of the elements of a result."""
    return ARGUMENTS[next(r.type.dtype.name for r in contents.graph.results if r.name == result)]


def ctype(x: np.ndarray[Any, Any]) -> str:
    """Return the C type of an argument's elements."""
    return ARGUMENTS[as_dtype(x.dtype).name]


def listed(names: list[str]) -> str:
    """Return the first names, and how many more there are."""
    text = ", ".join(map(c_visible, names[:4]))
    return text + (f" and {len(names) - 4} more" if len(names) > 4 else "")
