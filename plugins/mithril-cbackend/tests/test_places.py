"""Elements at computed places: NumPy, the machine code and the printed C agree for every kind of kernel with an index.

The places are themselves computed where they are read (``where(mask, labels, 0)`` is the usual case), so that masks,
labels and data are combined in one kernel, across reshapes, in scalar code that LLVM packs into vectors of its own.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import in_c
import numpy as np
import pytest

from mithril import ops
from mithril.backend.memory_plan import smallest
from mithril.graph import Builder, Graph
from mithril.graph.decomposition import decompose
from mithril.graph.dtypes import dtype as as_dtype
from mithril_cbackend.backend import CBackend
from mithril_cbackend.compile_target import CompileTarget
from mithril_cbackend.lowering.element.kernel_builder import Machine
from mithril_cbackend.program import compile_graph, program as programs
from mithril_cbackend.tir import machine_code
from mithril_testing.compare import assert_close, tolerance

Arrays = dict[str, np.ndarray[Any, Any]]
SHAPES = [(3, 4, 5), (2, 3, 4, 6), (7, 9), (3, 4, 33), (5, 17, 8), (2, 2, 2, 2, 3), (70, 3), (1, 6, 1, 4)]


def places(labels: Any, limit: int) -> Iterator[Any]:
    """Places computed from integers: masked, negative, beyond both ends."""
    yield ops.where(ops.not_equal(labels, 1), labels, 0)
    yield ops.where(ops.logical_not(ops.equal(labels, 1)), ops.sub(labels, limit), ops.mul(labels, 2))
    yield ops.maximum(ops.sub(labels, 2), -1)


def _ends(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Iterator[Any]]:
    """Yield the elements at the places alone, with the mask the places were computed from, and summed."""

    def every(x: Any, labels: Any) -> Iterator[Any]:
        mask = ops.logical_not(ops.equal(labels, 1))
        for place in places(labels, int(x.shape[-1])):
            read = function(x, place)
            yield read
            if tuple(read.shape) == tuple(labels.shape):
                masked = ops.where(mask, ops.log(ops.add(ops.exp(read), 1.0)), 0.0)
                yield masked
                yield ops.sum(masked)
                yield ops.sum(ops.where(mask, ops.square(read), 0.0), axis=-1)

    return every


def _along(x: Any, place: Any) -> Any:
    return ops.squeeze(ops.take_along_axis(ops.tanh(x), ops.unsqueeze(place, axis=-1), axis=-1), axis=-1)


def _starts(x: Any, place: Any) -> Any:
    first = ops.reshape(place, shape=(-1,))[:1]
    return ops.concat(*[first] * len(x.shape), axis=0)


FAMILIES: dict[str, Callable[[Any, Any], Iterator[Any]]] = {
    "take_along_axis": _ends(_along),
    "take": _ends(lambda x, place: ops.take(ops.mul(x, 2.0), place, axis=-1)),
    "embedding": _ends(lambda x, place: ops.take(ops.reshape(x, shape=(-1, int(x.shape[-1]))), place, axis=0)),
    "gather_nd": _ends(lambda x, place: ops.gather_nd(x, ops.stack(place, ops.add(place, 1), axis=-1))),
    "one_hot": _ends(lambda x, place: ops.sum(ops.mul(ops.one_hot(place, depth=int(x.shape[-1])), x), axis=-1)),
    "pad": _ends(lambda x, place: ops.pad(ops.take(x, place, axis=-1), widths=((1, 2),) * (2 * len(x.shape) - 2))),
    "scatter": _ends(lambda x, place: ops.scatter(x, ops.reshape(place, shape=(-1,))[:1], ops.mul(x[:1], 2.0))),
    "scatter_add_along_axis": _ends(
        lambda x, place: ops.scatter_add_along_axis(x, ops.unsqueeze(place, axis=-1), ops.exp(x[..., :1]), axis=-1)
    ),
    "dynamic_slice": _ends(
        lambda x, place: ops.dynamic_slice(x, _starts(x, place), sizes=tuple(max(1, int(n) // 2) for n in x.shape))
    ),
    "dynamic_update_slice": _ends(
        lambda x, place: ops.dynamic_update_slice(
            x, ops.neg(x[tuple(slice(0, max(1, n // 2)) for n in x.shape)]), _starts(x, place)
        )
    ),
    "cross_entropy": lambda x, labels: (
        ops.cross_entropy(x, labels, ignore_index=1, reduction=r) for r in ("none", "sum", "mean")
    ),
}


class Programs:
    """Every family on every shape as one graph each, of all its results."""

    def __init__(self, shapes: Sequence[tuple[int, ...]]) -> None:
        self.cases: dict[str, tuple[Graph, Arrays, Arrays]] = {}
        for family, function in FAMILIES.items():
            for k, shape in enumerate(shapes):
                self.cases[f"{family}{list(shape)}"] = self.case(function, shape, k)

    def case(self, function: Any, shape: tuple[int, ...], seed: int) -> tuple[Graph, Arrays, Arrays]:
        rng = np.random.default_rng(seed)
        labels = rng.integers(0, shape[-1], shape[:-1]).astype(np.int32)
        labels[rng.random(labels.shape) < 0.4] = min(1, shape[-1] - 1)
        arrays = {"x": rng.standard_normal(shape).astype(np.float32), "labels": labels}
        with Builder() as b:
            values = [b.input(name, array.shape, array.dtype.name) for name, array in arrays.items()]
            outputs = {f"y{k}": v for k, v in enumerate(function(*values))}
        expected = {f"y{k}": np.asarray(v) for k, v in enumerate(function(*arrays.values()))}
        return decompose(b.build(outputs), CBackend().lowers), arrays, expected


@pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no gcc")
@pytest.mark.parametrize(
    ("vector_bytes", "shapes"),
    [(64, SHAPES[:4]), pytest.param(64, SHAPES[4:], marks=pytest.mark.soak), (16, SHAPES[1:3]), (4, SHAPES[1:3])],
)
def test_every_family_on_every_shape(vector_bytes: int, shapes: Sequence[tuple[int, ...]], tmp_path: Any) -> None:
    cases = Programs(shapes).cases
    machine = Machine(machine_code.host_cpu(), 1, vector_bytes)
    printed = [programs.write(graph, machine, smallest) for graph, _, _ in cases.values()]
    library = in_c.library(tmp_path / "places.so", printed, machine.lanes())
    for k, (name, (graph, arrays, expected)) in enumerate(cases.items()):
        executable = compile_graph.compiled(graph, machine, CompileTarget())
        for how, results in (
            ("machine code", executable({}, arrays)),
            ("printed C", in_c.call(executable, library[f"entry_{k}"], arrays)),
        ):
            for output, array in results.items():
                assert_close(array, expected[output], tolerance(as_dtype(array.dtype), 4.0), f"{name} {output}, {how}")
