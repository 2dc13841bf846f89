"""The C files of an exported model: header, source, weights, test."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from mithril import __version__
from mithril.graph import dtype as as_dtype, is_static
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
        *arena_example(contents),
        f"   {name}_set_weights(&instance, {f'{name}_weights' if embedded else 'bytes'});",
        f"   {name}_run(&instance, {', '.join(argument_names(contents))});",
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
        *(contents.open.struct() if contents.open is not None else []),
        "/* One instance, with its own arena, for every thread that runs the model; its fields are private. */",
        "typedef struct {",
        "  uint32_t mark;",
        "  const unsigned char *weights;",
        *(["  size_t arena_bytes;"] if contents.open is not None else []),
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
        *arena_bytes(contents),
        f"#define {up}_WEIGHT_BYTES {max(len(contents.weights), 4)}",
        "",
        "enum {",
        f"  {up}_OK = 0,",
        *([f"  {up}_TRUNCATED = {TRUNCATED},"] if contents.flags else []),
        f"  {up}_MISSING = -1, /* an argument is NULL */",
        f"  {up}_UNINITIALIZED = -2, /* {name}_init has not been called, or a weight is not set */",
        f"  {up}_MISALIGNED = -3, /* an address is no multiple of the element's size; arena and weights: of 8 */",
        f"  {up}_UNKNOWN = -4{',' if contents.open is not None else ''} /* no weight has that name */",
        *(
            [
                f"  {up}_SIZES = -5, /* a size is out of its bounds, or a value has 2**31 elements or more */",
                f"  {up}_SMALL = -6 /* the arena is too small for the sizes */",
            ]
            if contents.open is not None
            else []
        ),
        "};",
        "",
    ]
    for c, x in arrays(contents):
        shape = contents.shapes[c]
        kind = f"{as_dtype(x.dtype)}[{', '.join(map(str, shape))}]"
        if is_static(shape):
            lines.append(f"#define {up}_{c.upper()}_SIZE {max(x.size, 1)} /* {kind}, row by row */")
        else:
            assert contents.open is not None
            size = contents.open.count(shape, "sizes")
            lines.append(f"#define {up}_{c.upper()}_SIZE(sizes) {size} /* {kind}, row by row */")
        lines.append(f"#define {up}_{c.upper()}_RANK {x.ndim}")
        sizes = [str(n) if isinstance(n, int) else "-1" for n in shape]  # -1: an open size
        lines.append(f"#define {up}_{c.upper()}_SHAPE {{{', '.join(sizes) or '1'}}}")
    lines += [f"extern const int32_t {array}" for array in shape_arrays(contents)]
    return [*lines, ""]


def prototypes(contents: Contents) -> list[str]:
    """Return the declarations of the header's functions."""
    name = contents.name
    lines = [
        *arena_prototypes(contents),
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
    """Return the parameters of the function that runs the model."""
    up, texts = contents.prefix, []
    for k, (c, x) in enumerate(arrays(contents)):
        element = f"{'const ' if k < len(contents.inputs) else ''}{ctype(x)} "
        texts.append(f"{element}{c}[{up}_{c.upper()}_SIZE]" if is_static(contents.shapes[c]) else f"{element}*{c}")
    if contents.open is not None:
        texts.append(f"const {contents.name}_sizes_t *sizes")
    return ", ".join([f"{contents.name}_t *self", *texts])


def argument_names(contents: Contents) -> list[str]:
    """Return the arguments of the header's example."""
    names = [*contents.c_names.values(), *contents.outputs.values()]
    return [*names, "&sizes"] if contents.open is not None else names


def arena_example(contents: Contents) -> list[str]:
    """Return the lines of the header's example that allocate the arena."""
    name, up = contents.name, contents.prefix
    if contents.open is None:
        return [
            f"   static _Alignas(64) unsigned char arena[{up}_ARENA_BYTES];",
            f"   {name}_init(&instance, arena);",
        ]
    sizes = ", ".join(f".{c} = {contents.cases[0].sizes[n]}" for n, c in contents.open.names.items())
    return [
        f"   const {name}_sizes_t sizes = {{{sizes}}};",
        f"   const size_t bytes = {name}_arena_size(&sizes); the largest sizes of all runs",
        "   void *arena = malloc(bytes);",
        f"   {name}_init(&instance, arena, bytes);",
    ]


def arena_bytes(contents: Contents) -> list[str]:
    """Return the macro of the arena's size, if the sizes have upper bounds."""
    if contents.open is None:
        return [f"#define {contents.prefix}_ARENA_BYTES {contents.arena_bytes}"]
    highest = contents.open.highest
    if highest is None:
        return []
    size = contents.open.arena(highest)
    return [f"#define {contents.prefix}_ARENA_BYTES {size} /* enough for the upper bounds of all sizes */"]


def arena_prototypes(contents: Contents) -> list[str]:
    name, up = contents.name, contents.prefix
    if contents.open is None:
        return [
            f"/* {up}_ARENA_BYTES bytes used only by this instance, 8-byte aligned, preferably 64-byte aligned. */",
            f"int {name}_init({name}_t *self, void *arena);",
            f"size_t {name}_arena_size(void); /* for programs that load the library dynamically */",
        ]
    return [
        "/* The arena is used only by this instance, 8-byte aligned, preferably 64-byte aligned. */",
        f"int {name}_init({name}_t *self, void *arena, size_t bytes);",
        "",
        "/* Return the bytes of the arena that a run of these sizes needs; 0 if the sizes are invalid. */",
        f"size_t {name}_arena_size(const {name}_sizes_t *sizes);",
        "",
    ]


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
            f"int {name}_init({name}_t *self, void *arena{', size_t bytes' if contents.open is not None else ''})",
            [
                f"  if (self == NULL || arena == NULL) return {up}_MISSING;",
                f"  if ((uintptr_t)arena % 8 != 0) return {up}_MISALIGNED;",
                "  memset(self, 0, sizeof *self);",
                "  self->arena = arena;",
                *(["  self->arena_bytes = bytes;"] if contents.open is not None else []),
                f"  self->mark = {mark(contents)};",
                f"  return {up}_OK;",
            ],
        ),
        *(
            function(f"size_t {name}_arena_size(void)", [f"  return {up}_ARENA_BYTES;"])
            if contents.open is None
            else contents.open.functions()
        ),
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
    open_ = ["sizes"] if contents.open is not None else []
    missing = " || ".join(f"{c} == NULL" for c in ["self", *(c for c, _ in inputs + outputs), *open_])
    lines = [
        f"  if ({missing}) return {up}_MISSING;",
        f"  if (!ready(self)) return {up}_UNINITIALIZED;",
        *(f"  if ((uintptr_t){c} % sizeof *{c} != 0) return {up}_MISALIGNED;" for c, _ in inputs + outputs),
        *(contents.open.run_lines(up) if contents.open is not None else []),
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


def numbers(data: bytes | bytearray) -> str:
    """Return bytes as lines of 32-bit numbers, at least one."""
    words_ = np.frombuffer(data + bytes(-len(data) % 4), "<u4") if data else np.zeros(1, np.uint32)
    rows = [", ".join(f"0x{w:08x}" for w in words_[k : k + 10].tolist()) for k in range(0, len(words_), 10)]
    return "  " + ",\n  ".join(rows)


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
