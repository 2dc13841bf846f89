"""Elements repeated along a last axis: the same bits, in machine code and in printed C."""

from pathlib import Path

import in_c
import numpy as np
import pytest

from mithril import ops
from mithril.graph import Builder
from mithril_cbackend.compile_target import CompileTarget
from mithril_cbackend.lowering.element import kernel_builder
from mithril_cbackend.lowering.element.kernel_builder import Machine
from mithril_cbackend.program import compile_graph
from mithril_cbackend.tir import machine_code

SHAPES = [(7, 9, 2), (2, 16, 2), (3, 11, 3), (5, 7, 4), (4, 5, 8)]
SHORT = [(3, 4, 2), (7, 9, 9), (3, 1, 3)]  # less than a vector, and many times


@pytest.mark.parametrize("machine", [{}, {"threads": 2}, {"vector_bytes": 16}], ids=["one", "threads", "narrow"])
def test_every_element_is_repeated(machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_builder, "PARALLEL_WORK", 1)
    target = Machine(machine_code.host_cpu(), **{"threads": 1, **machine})
    inputs, results = {}, {}
    with Builder() as b:
        for k, (*lead, times) in enumerate([*SHAPES, *SHORT]):
            data = np.random.default_rng(k).standard_normal(lead).astype(np.float32)
            data.flat[[0, -1]] = np.nan, -np.inf
            x = b.input(f"x{k}", data.shape)
            inputs[f"x{k}"] = data
            results[f"y{k}"] = ops.broadcast_to(ops.reshape(x, shape=(*lead, 1)), shape=(*lead, times))
    executable = compile_graph.compiled(b.build(results), target, CompileTarget())
    spread = sum("SHUFFLE" in text for text in executable.source.split("static void k")[1:])
    assert spread >= sum(times <= target.lanes() for *_, times in SHAPES)
    printed = in_c.library(tmp_path / "repeated.so", [executable.program], target.lanes())
    for actual in (executable({}, inputs), in_c.call(executable, printed.entry_0, inputs)):
        for k, data in enumerate(inputs.values()):
            expected = np.repeat(data[..., None], actual[f"y{k}"].shape[-1], axis=-1)
            np.testing.assert_array_equal(actual[f"y{k}"], expected)
