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
from mithril_cbackend.program.c_printer import body_text, prelude, slot_names
from mithril_cbackend.program.executable import Executable
from mithril_cbackend.program.program import Program

FLAGS = ["-std=c11", "-O1", "-Wall", "-Wextra", "-Werror", "-fwrapv", "-fPIC", "-shared", "-march=native"]


def library(path: Path, printed: Sequence[Program], lanes: int) -> ctypes.CDLL:
    """Compile programs for which gcc starts once: ``entry_0``, ``entry_1`` and so on."""
    texts = []
    for k, program in enumerate(printed):
        text = body_text(program, lanes)
        names = [*program.functions, "run"]
        text = re.sub(rf"\b({'|'.join(slot_names(program).values())})\b", rf"\1_{k}", text)
        text = re.sub(rf"\b({'|'.join(names)})(?=\()", rf"\1_{k}", text)
        texts.append(f"{text}\nvoid entry_{k}(int64_t *table);\nvoid entry_{k}(int64_t *table) {{ run_{k}(table); }}\n")
    body = "\n".join(texts)
    source = path.with_suffix(".c")
    source.write_text(prelude(body, lanes) + body)
    command = ["gcc", *FLAGS, str(source), "-o", str(path), "-lm"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(path))


def call(executable: Executable, entry: Any, inputs: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, Any]:
    """Return the results of a C entry function."""
    program = executable.program
    table = np.zeros(program.slots, np.int64)
    arena = aligned(program.arena)
    table[0] = arena.ctypes.data
    arrays = [np.asarray(inputs[name], order="C") for name, _ in executable.inputs]
    for (_, slot), array in zip(executable.inputs, arrays, strict=True):
        table[slot] = array.ctypes.data
    for slot, array in program.constants.items():
        table[slot] = array.ctypes.data
    results = {r.name: np.empty(r.shape, r.dtype) for r in executable.results}
    for r in executable.results:
        table[r.slot] = results[r.name].ctypes.data
    entry(ctypes.c_void_p(table.ctypes.data))
    return results
