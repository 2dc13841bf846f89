"""Programs printed as C, compiled by gcc into one library, and called like machine code."""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mithril_cbackend.graph.call_layout import aligned
from mithril_cbackend.program.c_module import STRUCT, body_text, fields, prelude, struct_text
from mithril_cbackend.program.executable import Executable
from mithril_cbackend.program.program import Program

FLAGS = [
    "-std=c11", "-O1", "-fstrict-aliasing", "-Wall", "-Wextra", "-Wconversion", "-Wcast-qual", "-Werror", "-fPIC",
    "-shared", "-march=native",
]  # fmt: skip


def library(path: Path, printed: Sequence[Program], lanes: int, overflow: str = "-fwrapv") -> ctypes.CDLL:
    """Compile programs for which gcc starts once: ``entry_0``, ``entry_1`` and so on.

    ``overflow`` is the flag for the overflow of signed integers.
    """
    texts = []
    for k, program in enumerate(printed):
        struct = f"{STRUCT}_{k}"
        text = body_text(program, lanes, struct)
        names = [*program.functions, "run"]
        text = re.sub(rf"\b({'|'.join(names)})(?=\()", rf"\1_{k}", text)
        texts.append(f"{struct} {{\n{struct_text(program)}}};\n{text}")
        texts.append(
            f"void entry_{k}(const {struct} *self);\nvoid entry_{k}(const {struct} *self) {{ run_{k}(self); }}\n"
        )
    body = "\n".join(texts)
    source = path.with_suffix(".c")
    source.write_text(prelude(body, lanes) + body)
    command = ["gcc", *FLAGS, overflow, str(source), "-o", str(path), "-lm"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(path))


def call(executable: Executable, entry: Any, inputs: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, Any]:
    """Return the results of a C entry function."""
    program = executable.program
    arena = aligned(program.arena)
    arrays = [np.asarray(inputs[name], order="C") for name, _ in executable.inputs]
    results = {r.name: np.empty(r.shape, r.dtype) for r in executable.results}
    by_slot = {0: arena, **program.constants}
    by_slot |= {slot: array for (_, slot), array in zip(executable.inputs, arrays, strict=True)}
    by_slot |= {r.slot: results[r.name] for r in executable.results}
    addresses = [by_slot[slot].ctypes.data if slot in by_slot else 0 for slot in sorted(fields(program))]
    struct = np.array(addresses, np.int64)
    entry(ctypes.c_void_p(struct.ctypes.data))
    return results
