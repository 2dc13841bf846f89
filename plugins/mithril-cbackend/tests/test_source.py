"""Both emitters start from the same loops: the C that is shown and exported gives what the machine code gives."""

import ctypes
import os
import re
import shutil
import subprocess
import time

import numpy as np
import pytest

import mithril.ops  # noqa: F401
from mithril.backend.base import BuildOptions
from mithril.base.dtypes import dtype as as_dtype
from mithril.ir.decompose import decompose
from mithril.testing.cases import backend_cases
from mithril.testing.compare import assert_close, tolerance
from mithril_cbackend.backend import CBackend
from mithril_cbackend.bundle.c_printer import body_text, prelude, slot_names
from mithril_cbackend.compile_target import Purpose
from mithril_cbackend.graph.arena import smallest
from mithril_cbackend.graph.call_layout import aligned
from mithril_cbackend.program import compile_graph, program as programs

FLAGS = ["-std=c11", "-O1", "-Wall", "-Wextra", "-Werror", "-fwrapv", "-fPIC", "-shared", "-march=native"]
OTHERS = ("add", "exp", "sum", "matmul")  # what stands for the ways 16 and 64 bits are read and written
CASES = [
    c
    for c in backend_cases(CBackend.dtypes)
    if (c.number == 0 and (c.dtype is None or c.op.name in OTHERS)) or c.op.name == "conv"
]


class Compiled:
    """All cases in one C file, for which gcc starts once, in one of the processes that share the tests."""

    def __init__(self, factory) -> None:
        folder = factory.getbasetemp()
        folder = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "all"
        try:
            folder.mkdir()
        except FileExistsError:
            while not (folder / "done").exists():
                time.sleep(0.1)
        else:
            try:
                self.build(folder)
            finally:
                (folder / "done").touch()
        self.library = ctypes.CDLL(str(folder / "k.so"))

    def build(self, folder):
        texts = []
        machine = compile_graph.machine(BuildOptions(), Purpose())
        for k, case in enumerate(CASES):
            program = programs.write(lowered(case), machine, smallest)
            text = body_text(program, machine.lanes())
            names = [*program.functions, "run"]
            text = re.sub(rf"\b({'|'.join(slot_names(program).values())})\b", rf"\1_{k}", text)
            text = re.sub(rf"\b({'|'.join(names)})(?=\()", rf"\1_{k}", text)
            texts.append(
                f"{text}\nvoid entry_{k}(int64_t *table);\nvoid entry_{k}(int64_t *table) {{ run_{k}(table); }}\n"
            )
        body = "\n".join(texts)
        (folder / "k.c").write_text(prelude(body, machine.lanes()) + body)
        command = ["gcc", *FLAGS, str(folder / "k.c"), "-o", str(folder / "k.so"), "-lm"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    def run(self, case, inputs):
        """What the machine code gives, and what the C gives."""
        executable = CBackend().build(lowered(case))
        return executable({}, inputs), called(executable, self.library[f"entry_{CASES.index(case)}"], inputs)


def lowered(case):
    return decompose(case.graph(), CBackend().lowers)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    return Compiled(tmp_path_factory)


def called(executable, entry, inputs):
    """What a C entry function gives for these inputs."""
    program = executable.program
    table = np.zeros(program.slots, np.int64)
    arena = aligned(program.arena)
    table[0] = arena.ctypes.data
    kept = [np.asarray(inputs[name], order="C") for name, _ in executable.inputs]
    for (_, slot), array in zip(executable.inputs, kept, strict=True):
        table[slot] = array.ctypes.data
    for slot, array in program.constants.items():
        table[slot] = array.ctypes.data
    made = {r.name: np.empty(r.shape, r.dtype) for r in executable.results}
    for r in executable.results:
        table[r.slot] = made[r.name].ctypes.data
    entry(ctypes.c_void_p(table.ctypes.data))
    return made


@pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no gcc")
@pytest.mark.parametrize("case", CASES, ids=[c.id for c in CASES])
def test_c_and_machine_code_agree(case, compiled):
    expected, got = compiled.run(case, case.inputs())
    for name, array in got.items():
        assert_close(array, expected[name], tolerance(as_dtype(array.dtype), case.op.tolerance), name)
