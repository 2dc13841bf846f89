"""The test program of an exported model: it runs the model and compares the results with those of Python."""

from __future__ import annotations

from typing import Any

import numpy as np

from mithril.graph import dtype as as_dtype
from mithril_cbackend.bundle.export_contents import Case, Contents
from mithril_cbackend.bundle.export_files import ctype, numbers
from mithril_cbackend.program.c_module import ARGUMENTS
from mithril_cbackend.program.c_text import c_quoted


def typed(name: str, x: np.ndarray[Any, Any]) -> str:
    """Return an array of the test as a union of its words and its elements."""
    count = max(-(-x.nbytes // 4), 1)
    union = f"union {{ uint32_t words[{count}]; {ctype(x)} values[{max(x.size, 1)}]; }}"
    return f"static _Alignas(64) const {union} {name} = {{{{\n{numbers(x.tobytes())}\n}}}};\n"


def test(contents: Contents, embedded: bool) -> str:
    """Return a C program that compares its last run for some sizes with the results of Python."""
    name, up = contents.name, contents.prefix
    parts = [f'#include "{name}.h"', "", "#include <math.h>", "#include <stdio.h>", "#include <stdlib.h>", ""]
    ends = [f"_{k}" if k else "" for k in range(len(contents.cases))]
    for end, case in zip(ends, contents.cases, strict=True):
        parts += [typed(f"{contents.c_names[n]}_given{end}", x) for n, x in case.inputs.items()]
        parts += [typed(f"{contents.outputs[n]}_expected{end}", x) for n, x in case.results.items() if x.size]
    rooms = {n: max(1, *(case.results[n].size for case in contents.cases)) for n in contents.results}
    parts += [
        f"static {name}_t instance;",
        f"static _Alignas(64) unsigned char arena[{contents.arena_bytes if contents.open else f'{up}_ARENA_BYTES'}];",
        *([] if embedded else [f"static _Alignas(64) unsigned char weights[{up}_WEIGHT_BYTES];"]),
        *(f"static {ctype(x)} {contents.outputs[n]}_result[{rooms[n]}];" for n, x in contents.results.items()),
        "",
    ]
    if not embedded:
        parts += READ.replace("NAME", name).splitlines()
    checked = [x for case in contents.cases for x in case.results.values() if x.size]
    for kind in sorted({as_dtype(x.dtype).name for x in checked}):
        conversion = "widened" if kind == "bfloat16" else "(double)"
        parts += (WIDENED if kind == "bfloat16" else "").splitlines()
        text = COMPARE.replace("KIND", kind).replace("TYPE", ARGUMENTS[kind]).replace("WIDE", conversion)
        parts += [*text.splitlines(), ""]
    parts += ["int main(void) {", "  double worst = 0.0;"]
    if not embedded:
        parts += ["  if (!read_weights()) return EXIT_FAILURE;"]
    for end, case in zip(ends, contents.cases, strict=True):
        parts += runs(contents, case, end, f"{name}_weights" if embedded else "weights")
    tolerance = "1e-2" if any(as_dtype(x.dtype).bits == 16 for x in checked) else "1e-5"
    parts += [f"  return worst <= {tolerance} ? EXIT_SUCCESS : EXIT_FAILURE;", "}", ""]
    return "\n".join(parts)


def runs(contents: Contents, case: Case, end: str, stored: str) -> list[str]:
    """Return the statements that run the model for some sizes and compare the results."""
    name, lines = contents.name, []
    arguments = [f"{c}_given{end}.values" for c in contents.c_names.values()]
    arguments += [f"{c}_result" for c in contents.outputs.values()]
    if contents.open is not None:
        sizes = ", ".join(f".{c} = {case.sizes[n]}" for n, c in contents.open.names.items())
        lines.append(f"  const {name}_sizes_t sizes{end} = {{{sizes}}};")
        lines.append(f"  if ({name}_arena_size(&sizes{end}) > sizeof arena) return EXIT_FAILURE;")
        arguments.append(f"&sizes{end}")
    arena = "arena, sizeof arena" if contents.open is not None else "arena"
    call = f"{name}_run(&instance, {', '.join(arguments)})"
    lines += [
        f"  if ({name}_init(&instance, {arena}) != 0) return EXIT_FAILURE;",
        f"  if ({name}_set_weights(&instance, {stored}) != 0) return EXIT_FAILURE;",
        *[f"  if ({call} != {code}) return EXIT_FAILURE;" for code in case.codes],
    ]
    for n, x in case.results.items():
        if x.size:
            c, compare = contents.outputs[n], f"compare_{as_dtype(x.dtype).name}"
            lines += [
                f"  worst = fmax(worst, {compare}({c_quoted(n)},",
                f"    {c}_expected{end}.values, {c}_result, {x.size}));",
            ]
    return lines


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
