"""Conformance of a backend: calls of programs, arrays that share no memory, arguments of every rank and dtype."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np
import pytest

from mithril.backend import Backend
from mithril.derivatives import gradients, live_nodes
from mithril.graph import Graph, UnsupportedError, Value, as_results, bool_, decompose, dtype as as_dtype, float32
from mithril_testing import programs
from mithril_testing.running import Arrays, Program, backwards

CALLS = 20
QUICK_CALLS = 300  # of a small program
MOMENTS = 8_192  # numbers drawn


class ProgramChecks:
    """A part of ``BackendConformance``: programs written for the purpose rather than samples of operations."""

    ops: ClassVar[Any]
    make: Callable[[], Backend]
    start: Callable[[Graph], Program]
    compare: Callable[..., Any]
    check: Callable[..., None]

    def lowered(self, calls: programs.Calls) -> programs.Calls:
        """Return a program; of its outputs those whose dtypes and, where ``ops`` selects some, operations are there."""
        graph, arguments = calls
        results = {n: v for n, v in zip(graph.output_names, graph.outputs, strict=True) if self._runs(graph, v)}
        if not results:
            pytest.skip("the backend has no output of the program")
        if len(results) == len(graph.outputs):
            return calls
        part = _part(graph, results)
        return part, {i.name: arguments[i.name] for i in part.arguments}

    def _runs(self, graph: Graph, value: Value) -> bool:
        backend, part = self.make(), _part(graph, {"y": value})
        values = [*(i.value for i in part.inputs), *(v for node in part.nodes for v in node.results)]
        if any(v.dtype not in backend.dtypes for v in values):
            return False
        if self.ops is None:
            return True
        try:
            decompose(part, backend.lowers)
        except UnsupportedError:
            return False
        return True

    # -- arguments ----------------------------------------------------------------------------------------------------
    @pytest.mark.parametrize("rank", programs.RANKS)
    def test_ranks(self, rank: int) -> None:
        """Move, reduce, order and combine values of every rank along every axis."""
        graph, arguments = self.lowered(programs.ranked(rank))
        self.check([f"rank:{rank}"], lambda: self.compare(graph, arguments, 16.0))

    def test_casts(self) -> None:
        """Cast between all pairs of dtypes: floats saturate, integers wrap, nan becomes 0, fractions are cut."""
        graph, arguments = self.lowered(programs.casts(self.make().dtypes))
        self.check(["casts"], lambda: self.compare(graph, arguments, 1.0, signs=lambda _: True))

    def test_integers(self) -> None:
        """Reduce, sort and move integers of every width, with values beyond 32 bits and sums that wrap around."""
        graph, arguments = self.lowered(programs.integers(self.make().dtypes))
        self.check(["integers"], lambda: self.compare(graph, arguments, 1.0))

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
    def test_special_rows(self, dtype: str) -> None:
        """Reduce and sort rows that hold nan, infinities, signed zeros and ties."""
        for kind in programs.kinds(self.make().dtypes, dtype):
            graph, arguments = self.lowered(programs.special_rows(kind))
            self.check(
                [f"rows:{dtype}"],
                lambda g=graph, a=arguments: self.compare(g, a, 16.0, signs=lambda n: n.startswith(programs.SIGNED)),
            )

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
    def test_accumulation(self, dtype: str) -> None:
        """Add up thousands of 16-bit floats, which is right to 16 bits only if sums are 32 bits wide."""
        for kind in programs.kinds(self.make().dtypes, dtype):
            graph, arguments = self.lowered(programs.accumulation(kind))
            self.check([f"accumulation:{dtype}"], lambda g=graph, a=arguments: self.compare(g, a, 4.0))

    def test_control_flow(self) -> None:
        """Run branches, loops and scans, nested and over nothing, and the gradients through them."""

        def action() -> None:
            graph, arguments = self.lowered(programs.control_flow())
            self.compare(graph, arguments, 16.0)
            self.compare(graph, {**arguments, "flag": np.array(False)}, 16.0)
            outputs = [n for n in graph.output_names if n in programs.DIFFERENTIABLE]
            backward = gradients(graph, outputs, ["x", "w", "steps"])
            cotangents = {}
            for i in backward.arguments:
                if i.name not in arguments:
                    shape = tuple(int(n) for n in i.type.shape)
                    cotangents[i.name] = np.linspace(0.5, 1.5, math.prod(shape), dtype=np.float32).reshape(shape)
            self.compare(backward, {**arguments, **cotangents}, 64.0)

        self.check(["control"], action, ["if", "while", "scan"])

    # -- calls --------------------------------------------------------------------------------------------------------
    def test_results_alias_nothing(self) -> None:
        """Overwrite each result in place: no argument, no other result, no constant and no later call may change."""
        for kind in programs.kinds(self.make().dtypes, "float32", "int32"):
            graph, arguments = self.lowered(programs.shared(kind))
            self.check([f"alias:{kind}"], lambda g=graph, a=arguments: self._overwrite_all(g, a))

    def _overwrite_all(self, graph: Graph, arguments: Arrays) -> None:
        program = self.start(graph)
        native = program.native(arguments)
        expected = program.numpy(program.call(native))
        results = program.call(native)
        for name in results:
            if not overwritten(results[name], self.make()):
                continue  # arrays of this backend cannot be written to
            current = program.numpy({n: a for n, a in results.items() if n != name})
            changed = [n for n, a in current.items() if a.tobytes() != expected[n].tobytes()]
            assert not changed, f"result '{name}' shares memory with result {changed}"
            for n, array in program.numpy(native).items():
                assert array.tobytes() == arguments[n].tobytes(), f"result '{name}' shares memory with argument '{n}'"
            again = program.call(native)
            for n, array in program.numpy(again).items():
                assert array.tobytes() == expected[n].tobytes(), (
                    f"after writing to '{name}', a call gives another '{n}'"
                )
            results = again

    def test_repeated_calls_agree(self) -> None:
        """Call one program again and again: the same arguments give the same bits."""

        def action() -> None:
            graph, arguments = self.lowered(programs.repeatable())
            self.compare(graph, arguments, 64.0)
            self._repeat(graph, arguments, CALLS)
            graph, arguments = self.lowered(programs.ranked(1))
            self._repeat(graph, arguments, QUICK_CALLS)

        self.check(["repeated"], action)

    def _repeat(self, graph: Graph, arguments: Arrays, count: int) -> None:
        program = self.start(graph)
        native = program.native(arguments)
        expected = program.numpy(program.call(native))
        results = [program.call(native) for _ in range(count - 1)]
        for k, run in enumerate(results, 2):
            for name, array in program.numpy(run).items():
                assert array.tobytes() == expected[name].tobytes(), f"call {k} gives another '{name}' than the first"

    def test_parameters_and_other_values(self) -> None:
        """Call one program with other parameters, other inputs and both; each result belongs to its own call."""

        def action() -> None:
            graph, arguments = self.lowered(programs.shared(float32))
            program = self.start(graph)
            other = backwards(arguments)
            calls = [{n: (other if (k >> j) & 1 else arguments)[n] for j, n in enumerate(arguments)} for k in range(8)]
            results = [program.call(program.native(values)) for values in calls]
            for values, native in zip(calls, results, strict=True):
                expected = self.expected(graph, values)  # type: ignore[attr-defined]
                for name, array in program.numpy(native).items():
                    np.testing.assert_array_equal(array, expected[name], err_msg=name)

        self.check(["parameters"], action)

    # -- arrays -------------------------------------------------------------------------------------------------------
    def test_array_helpers(self) -> None:
        """Make arrays with ``array zeros ones full arange``: values, dtypes, shapes."""
        b = self.make()
        for array, expected in (
            (b.zeros((2, 3)), np.zeros((2, 3), b.dtype.numpy)),
            (b.zeros(()), np.zeros((), b.dtype.numpy)),
            (b.ones((2,)), np.ones((2,), b.dtype.numpy)),
            (b.full((2, 2), 1.5), np.full((2, 2), 1.5, b.dtype.numpy)),
            (b.full((2,), 7, "int32"), np.full((2,), 7, np.int32)),
            (b.arange(4), np.arange(4, dtype=np.int32)),
            (b.arange(2, 11, 3), np.arange(2, 11, 3, dtype=np.int32)),
            (b.arange(3, dtype="float32"), np.arange(3, dtype=np.float32)),
            (b.array([[1.0, 2.0]]), np.array([[1.0, 2.0]], b.dtype.numpy)),
            (b.array([1, 2]), np.array([1, 2], np.int32)),
            (b.array([True]), np.array([True])),
            (b.array([1, 2], "int8"), np.array([1, 2], np.int8)),
        ):
            assert b.is_array(array), f"a {type(array).__name__} is no array of the backend"
            assert as_dtype(array.dtype) is as_dtype(expected.dtype), (
                f"native_dtype returns another object than {array.dtype!r}, the dtype of an array of {expected.dtype}"
            )
            actual = b.to_numpy(array)
            assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape), (
                f"{actual!r}, expected {expected!r}"
            )
            np.testing.assert_array_equal(actual, expected)

    def test_arrays_of_views(self) -> None:
        """Make arrays from views and read-only arrays of every dtype, and copy: later changes do not show."""
        b = self.make()
        for kind in b.dtypes:
            base = np.resize(np.arange(24) % 2 if kind is bool_ else np.arange(24), (4, 6)).astype(kind.numpy)
            fixed = base.copy()
            fixed.flags.writeable = False
            for view in (
                base,
                base.T,
                base[::-1, ::2],
                base[1:3, 2:5],
                fixed,
                np.broadcast_to(base[0], (3, 6)),
                base[0, 0],
            ):
                np.testing.assert_array_equal(b.to_numpy(b.array(view)), view, err_msg=str(kind))
            source = base.copy()
            array = b.array(source)
            source[...] = source[0, 1]
            np.testing.assert_array_equal(
                b.to_numpy(array), base, err_msg=f"array() of {kind} shares the caller's memory"
            )

    def test_random_helpers(self) -> None:
        """Draw numbers: normal and uniform ones by their moments, the same after the same seed, new ones each time."""
        b = self.make()
        draws: dict[str, list[np.ndarray[Any, Any]]] = {"randn": [], "rand": []}
        for seed in (7, 7, 8):
            b.set_seed(seed)
            for name, values in draws.items():
                values += [b.to_numpy(getattr(b, name)((MOMENTS,))).astype(np.float64) for _ in range(2)]
        for name, (first, second, again, _, other, _) in draws.items():
            assert (first == again).all(), f"{name} differs after the same seed"
            assert not (first == second).any(), f"{name} repeats itself" if name == "randn" else f"{name} repeats"
            assert (first != other).mean() > 0.99, f"{name} ignores the seed"
        normal, uniform = draws["randn"][0], draws["rand"][0]
        moments = [float((normal**k).mean()) for k in (1, 2, 3, 4)]
        np.testing.assert_allclose(moments, [0, 1, 0, 3], atol=0.35, err_msg="moments of randn")
        assert abs(moments[0]) < 0.06, f"randn has the mean {moments[0]:.3f}"
        assert abs(moments[1] - 1) < 0.08, f"randn has the variance {moments[1]:.3f}"
        assert np.abs(normal).max() > 3, "randn has no tails"
        assert (uniform >= 0).all(), "rand gives numbers below 0"
        assert (uniform < 1).all(), "rand gives numbers of 1 and more"
        counts = np.histogram(uniform, 16, (0, 1))[0]
        assert (np.abs(counts - MOMENTS / 16) < 120).all(), f"rand is not uniform: {counts}"
        assert as_dtype(b.to_numpy(b.randn((2,))).dtype) is b.dtype


def _part(graph: Graph, results: Mapping[str, Value]) -> Graph:
    """Return the graph of some values, without the inputs that they do not read."""
    nodes = tuple(live_nodes(graph.nodes, list(results.values())))
    read = {v for node in nodes for v in node.operands} | set(results.values())
    inputs = tuple(i for i in graph.inputs if i.value in read)
    return graph.replaced(inputs=inputs, nodes=nodes, results=as_results(results))


def overwritten(array: Any, backend: Backend) -> bool:
    """Whether an array could be written to in place; then it has been."""
    before = np.array(backend.to_numpy(array))
    try:
        array[...] = backend.array(np.full(before.shape, 77, before.dtype))
    except (TypeError, ValueError):
        return False
    after = np.asarray(backend.to_numpy(array))
    assert (after == 77).all(), "writing to a result changes it in part"
    return True
