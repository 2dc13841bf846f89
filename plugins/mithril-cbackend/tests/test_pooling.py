"""Pooling by lines: every stride, padding and dilation, with vectors of every width, and nan as it is meant."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mithril import ops
from mithril.graph import Builder
from mithril_cbackend.compile_target import CompileTarget
from mithril_cbackend.lowering.element import kernel_builder
from mithril_cbackend.lowering.element.kernel_builder import Machine
from mithril_cbackend.program import compile_graph
from mithril_cbackend.tir import machine_code

RNG = np.random.default_rng(0)
WINDOWS: dict[str, dict[str, Any]] = {
    "halves": {"kernel": (2, 2), "stride": (2, 2), "padding": ((0, 0), (0, 0))},
    "ResNet": {"kernel": (3, 3), "stride": (2, 2), "padding": ((1, 1), (1, 1))},
    "neighbors": {"kernel": (3, 3), "stride": (1, 1), "padding": ((1, 1), (1, 1))},
    "thirds": {"kernel": (2, 3), "stride": (1, 3), "padding": ((0, 0), (1, 2))},
    "gaps": {"kernel": (2, 2), "stride": (3, 5), "padding": ((0, 0), (0, 0))},
    "large": {"kernel": (11, 12), "stride": (4, 2), "padding": ((5, 5), (6, 5))},
    "whole": {"kernel": (19, 45), "stride": (1, 1), "padding": ((0, 0), (0, 0))},
}


def run(function: Any, x: np.ndarray[Any, Any], **machine: Any) -> np.ndarray[Any, Any]:
    with Builder() as b:
        result = function(b.input("x", x.shape, x.dtype.name))
    graph = b.build({"y": result})
    program = compile_graph.compiled(
        graph, Machine(machine_code.host_cpu(), **{"threads": 1, **machine}), CompileTarget()
    )
    return np.array(program({}, {"x": x})["y"])


def check(function: Any, x: np.ndarray[Any, Any], **machine: Any) -> np.ndarray[Any, Any]:
    """Check the result of the templates, and that TVM's schedules give the same bits; return it."""
    template, scheduled = (run(function, x, scheduler=scheduler, **machine) for scheduler in ("own", "tvm"))
    np.testing.assert_array_equal(template, scheduled)
    np.testing.assert_allclose(template, function(x), rtol=1e-5, atol=1e-6)
    return template


@pytest.fixture(autouse=True)
def _threads_share_small_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_builder, "PARALLEL_WORK", 1)


@pytest.mark.parametrize("name", list(WINDOWS))
def test_windows(name: str) -> None:
    x, windows = RNG.standard_normal((2, 3, 19, 45)).astype(np.float32), WINDOWS[name]
    check(lambda x: ops.max_pool(x, **windows), x, threads=2)
    for counted in (True, False):
        check(lambda x: ops.avg_pool(x, **windows, count_include_pad=counted), x)


@pytest.mark.parametrize("vector_bytes", [32, 16, 4])
def test_widths_of_vectors(vector_bytes: int) -> None:
    x = RNG.standard_normal((1, 2, 9, 45)).astype(np.float32)
    for windows in (WINDOWS["ResNet"], WINDOWS["neighbors"]):
        check(lambda x: ops.max_pool(x, **windows), x, vector_bytes=vector_bytes)


def test_dilation() -> None:
    x = RNG.standard_normal((1, 2, 20, 50)).astype(np.float32)
    for stride, dilation in (((1, 1), (3, 2)), ((2, 2), (2, 3)), ((1, 3), (1, 4))):
        windows = {"kernel": (3, 3), "stride": stride, "padding": ((1, 0), (1, 1)), "dilation": dilation}
        check(lambda x: ops.max_pool(x, **windows), x)


def test_signals_and_volumes() -> None:
    check(lambda x: ops.max_pool(x, kernel=(5,), stride=(2,), padding=((2, 2),)), RNG.random((2, 3, 70), np.float32))
    volume = RNG.random((1, 2, 5, 6, 20), np.float32)
    check(lambda x: ops.max_pool(x, kernel=(3, 2, 3), stride=(2, 2, 2), padding=((1, 1), (0, 0), (1, 1))), volume)
    check(lambda x: ops.avg_pool(x, kernel=(2, 2, 2), stride=(2, 1, 2), padding=((0, 0),) * 3), volume)


@pytest.mark.parametrize("dtype", ["float64", "float16", "int8", "int32", "uint8"])
def test_dtypes(dtype: str) -> None:
    x = (RNG.standard_normal((1, 2, 8, 40)) * 50).astype(dtype)
    check(lambda x: ops.max_pool(x, **WINDOWS["ResNet"]), x)


def test_nan_and_infinities() -> None:
    """nan is larger than all numbers, in its own windows."""
    x = RNG.standard_normal((1, 1, 12, 40)).astype(np.float32)
    x[0, 0, 5, 17] = np.nan
    x[0, 0, 8:, :9] = -np.inf
    x[0, 0, 0, 30] = np.inf
    for name in ("halves", "ResNet", "neighbors"):
        actual = check(lambda x: ops.max_pool(x, **WINDOWS[name]), x)
        assert 1 <= np.isnan(actual).sum() <= 9
        assert np.isneginf(actual).any()
