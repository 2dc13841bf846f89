"""Joined, padded and gathered values have a loop for each source, which reads neighbors without a choice."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mithril import ops
from mithril.graph import Builder
from mithril_cbackend.compile_target import CompileTarget
from mithril_cbackend.lowering.element.kernel_builder import Machine
from mithril_cbackend.program import compile_graph
from mithril_cbackend.program.executable import Executable
from mithril_cbackend.tir import machine_code

RNG = np.random.default_rng(0)
Array = np.ndarray[Any, Any]


def numbers(*shape: int, dtype: str = "float32") -> Array:
    return (RNG.standard_normal(shape) * 9).astype(dtype)


def check(function: Any, *arrays: Array, constants: tuple[Array, ...] = (), **machine: Any) -> Executable:
    inputs = {f"x{k}": a for k, a in enumerate(arrays)}
    with Builder() as b:
        values = [b.input(n, a.shape, a.dtype.name) for n, a in inputs.items()]
        result = function(*values, *(b.constant(c) for c in constants))
    target = Machine(machine_code.host_cpu(), **{"threads": 1, **machine})
    program = compile_graph.compiled(b.build({"y": result}), target, CompileTarget())
    np.testing.assert_array_equal(program({}, inputs)["y"], function(*arrays, *constants))
    return program


def loops(program: Executable) -> str:
    text = program.source
    return text[text.index("struct arrays") :]


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "int8", "bool"])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_joined_values_are_copied_one_by_one(axis: int, dtype: str) -> None:
    shapes = [[3, 7, 37] for _ in range(3)]
    for k, shape in enumerate(shapes):
        shape[axis] = (5, 0, 17)[k]
    arrays = [numbers(*shape, dtype=dtype) for shape in shapes]
    for machine in ({}, {"threads": 2}, {"vector_bytes": 4}):
        text = loops(check(lambda *xs: ops.concat([*xs, xs[0]], axis=axis), *arrays, **machine))
        assert " ? " not in text.replace(" ? 1 : 0", "")  # of bools


def test_axes_after_the_joined_one_are_one_loop() -> None:
    text = loops(check(lambda x, y: ops.concat([x, y], axis=1), numbers(2, 3, 16, 16), numbers(2, 5, 16, 16)))
    assert "< 768; " in text and "< 1280; " in text and "< 16; " not in text


def test_operations_around_a_joined_value_join_its_loops() -> None:
    def function(x: Any, y: Any, bias: Any) -> Any:
        return ops.concat([ops.concat([x, y], axis=1), -y], axis=1) + bias

    text = loops(check(function, numbers(3, 7, 37), numbers(3, 7, 37), numbers(21, 1)))
    assert text.count("static void k") == 1 and " ? " not in text


def test_joining_along_another_axis_is_another_kernel() -> None:
    def function(x: Any, y: Any) -> Any:
        return ops.concat([ops.concat([x, y], axis=0)[:, :3], ops.concat([y, x], axis=0)], axis=1)

    check(function, numbers(4, 20), numbers(4, 20))
    around = lambda x: ops.concat([x[:, -2:], x, x[:, :2]], axis=1)  # noqa: E731
    text = loops(check(lambda x: around(ops.transpose(around(x), perm=(1, 0))), numbers(20, 20)))
    assert text.count("static void k") == 2 and " ? " not in text


NESTED = {
    "joined twice": lambda y: ops.concat([y, y], axis=1),
    "joined at two places": lambda y: ops.concat([y * 2.0, y, y + 1.0], axis=1),
    "padded and added": lambda y: ops.pad(y, widths=((0, 0), (5, 6))) + ops.pad(y, widths=((0, 0), (11, 0))),
    "padded": lambda y: ops.pad(y, widths=((0, 0), (5, 6))),
}


@pytest.mark.parametrize("outer", NESTED.values(), ids=list(NESTED))
def test_joined_values_within_others_are_read_at_their_places(outer: Any) -> None:
    check(lambda x, y: outer(ops.concat([x, y], axis=1)), numbers(3, 37), numbers(3, 21))
    check(
        lambda x, y: outer(ops.concat([ops.pad(x, widths=((0, 0), (3, 2))), y], axis=1)), numbers(3, 37), numbers(3, 21)
    )


@pytest.mark.parametrize("mode", ["constant", "reflect", "edge", "wrap", "symmetric"])
def test_the_inner_part_of_a_padded_row_is_copied(mode: str) -> None:
    for dtype in ("float32", "float64", "int8"):
        x = numbers(3, 7, 50, dtype=dtype)
        check(lambda x: ops.pad(x * x, widths=((0, 0), (2, 1), (3, 4)), mode=mode), x, threads=2)
    text = loops(check(lambda x: ops.pad(x, widths=((0, 0), (0, 0), (3, 4)), mode=mode), numbers(3, 7, 48)))
    assert "j < 48; " in text


RUNS = {
    "reflected": [2, 1, *range(40), 38, 37],
    "rolled": [*range(8, 40), *range(8)],
    "from the end": [*range(-32, 0), -40, -39],
    "beyond the end": [*range(40), 99, 99],
    "repeated": [*range(20, 40)] * 3,
}


@pytest.mark.parametrize("positions", RUNS.values(), ids=list(RUNS))
def test_runs_of_constant_positions_are_copied(positions: list[int]) -> None:
    def function(x: Any, positions: Any) -> Any:
        return ops.take(ops.take(x, positions, axis=1), positions, axis=2) * 2.0

    constant = np.array(positions)
    check(function, numbers(3, 40, 40, dtype="float64"), constants=(constant,), threads=2)
    text = loops(check(lambda x, positions: ops.take(x, positions, axis=1), numbers(3, 40), constants=(constant,)))
    longest = max(map(len, np.split(constant, np.flatnonzero(np.diff(constant) != 1) + 1)))
    assert f"j < {longest // 16 * 16}; " in text


def test_kernels_of_other_runs_are_other_kernels() -> None:
    a, b = np.array([*range(20), 19]), np.array([0, *range(20)])

    def function(x: Any, y: Any, a: Any, b: Any) -> Any:
        return ops.cumsum(ops.take(x, a, axis=0), axis=0) + ops.cumsum(ops.take(y, b, axis=0), axis=0)

    check(function, np.arange(20), np.arange(20), constants=(a, b))
