"""Exported C starts from the same loops as machine code, and computes the same as the references."""

import ctypes
import os
import shutil
import time

import in_c
import pytest

import mithril.ops  # noqa: F401
from mithril.backend.base import BuildOptions
from mithril.backend.memory_plan import smallest
from mithril.graph import evaluate
from mithril.graph.decomposition import decompose
from mithril.graph.dtypes import dtype as as_dtype
from mithril_cbackend.backend import CBackend
from mithril_cbackend.compile_target import CompileTarget
from mithril_cbackend.graph import integer_products
from mithril_cbackend.graph.call_layout import RUN
from mithril_cbackend.program import compile_graph, program as programs
from mithril_cbackend.tir import machine_code
from mithril_testing.cases import backend_cases
from mithril_testing.compare import assert_close, tolerance

OTHERS = ("add", "exp", "sum", "matmul")  # representatives of 16-bit and 64-bit loads and stores


def runs_on_host(case):
    """Whether the case contains a primitive whose NumPy reference runs: exported C cannot contain it."""
    backend = CBackend()
    graph = decompose(case.graph(), lambda node: backend.lowers(node) or backend.falls_back(node))
    return not all(backend.lowers(node) for node in graph.nodes)


CASES = [
    c
    for c in backend_cases(CBackend.dtypes)
    if (c.number == 0 and (c.dtype is None or c.op.name in OTHERS)) or c.op.name == "conv"
    if not runs_on_host(c)
]


MACHINE = compile_graph.machine(BuildOptions(), CompileTarget())


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
        printed = [programs.write(lowered(case), MACHINE, smallest) for case in CASES]
        in_c.library(folder / "k.so", printed, MACHINE.lanes())

    def run(self, case, inputs):
        """Return the results of the C."""
        executable = CBackend().build(lowered(case))
        return in_c.call(executable, self.library[f"entry_{CASES.index(case)}"], inputs)


def lowered(case):
    return integer_products.fused(decompose(case.graph(), CBackend().lowers), MACHINE)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    return Compiled(tmp_path_factory)


@pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no gcc")
@pytest.mark.parametrize("case", CASES, ids=[c.id for c in CASES])
def test_c_and_references_agree(case, compiled, monkeypatch):
    """Compare with the reference, as the conformance kit does for machine code, which is not compiled here."""
    monkeypatch.setattr(machine_code, "compiled", lambda *_: {RUN: None})
    graph, inputs = case.graph(), case.inputs()
    expected, actual = evaluate(graph, inputs), compiled.run(case, inputs)
    for name, array in actual.items():
        assert_close(array, expected[name], tolerance(as_dtype(array.dtype), case.op.tolerance), name)
