"""Conformance of a backend: each claim of ``Backend.capabilities``, tested by its effect."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from mithril import plugins
from mithril.backend import Backend, BuildOptions, Capabilities, Executable, LazyGraph
from mithril.compiler import memory_use
from mithril.derivatives import gradients
from mithril.graph import (
    Builder,
    Dim,
    Graph,
    MithrilError,
    Value,
    bfloat16,
    cotangent_name,
    float16,
    operation,
    to_text,
)
from mithril.ops import cond
from mithril_testing.compare import assert_close, tolerance
from mithril_testing.running import Array, Arrays

SIDE = 512  # of square matrices: 1 MB each
LINKS = 10  # of a chain of products
ACCURACY = 0.15  # of exact figures of memory
OTHERS = 0.2  # of the time of the busiest thread, which others compute
SMALL = 64  # of matrices in products of different numbers of rows
SIZES = (3, 5, 7, 9)  # numbers of rows, each new to the program
SLOW = 0.01  # seconds of the processor: a compiler takes more, and preparing tables for a size less
TIMES = 4.0  # minimal slowdown by a branch with this many products


class ClaimChecks:
    """A part of ``BackendConformance``. ``configurations`` are further backends that give programs of their own."""

    ops: ClassVar[Any]
    backend: ClassVar[Any]
    configurations: ClassVar[Sequence[Backend]] = ()
    make: Callable[[], Backend]
    check: Callable[..., None]

    def claims(self) -> tuple[Backend, Capabilities]:
        """Return the backend and its claims, which are not those of a selection of operations."""
        if self.ops is not None:
            pytest.skip("claims concern the whole backend")
        return self.make(), self.make().capabilities

    def test_claim_families(self) -> None:
        """Compare the family with the device and with those that it compiles for; claims stay the same."""
        backend, claims = self.claims()

        def action() -> None:
            assert claims.family == backend.device.partition(":")[0], f"family {claims.family} on {backend.device}"
            assert claims.family in claims.families or not claims.local, f"{claims.families} lack {claims.family}"
            assert backend.capabilities == claims, "claims differ when they are read again"

        self.check(["claim:families"], action)

    def test_claim_local(self) -> None:
        """Run a program of a backend that is local; another one's raises."""
        backend, claims = self.claims()

        def action() -> None:
            graph, arguments = _chain(1)
            run = _built(backend, graph, BuildOptions())
            if claims.local:
                _called(backend, run, graph, arguments)
            else:
                with pytest.raises(MithrilError):
                    _called(backend, run, graph, arguments)

        self.check(["claim:local"], action)

    def test_claim_donates(self) -> None:
        """Check that a result takes the memory of an input tagged ``donated``, whose old elements are gone."""
        backend, claims = self.claims()

        def action() -> None:
            graph, arguments = _donated()
            run = _built(backend, graph, BuildOptions())
            params, inputs = _split(backend, graph, arguments)
            expected = arguments["w"] + arguments["x"] * 2.0
            result = np.array(backend.to_numpy(run(params, inputs)["w"]))
            np.testing.assert_allclose(result, expected, rtol=1e-6)
            assert _is_spent(backend, params["w"], arguments["w"]), "the donated array is as it was"

        if not claims.donates:
            pytest.skip("the backend does not claim it")
        self.check(["claim:donates"], action)

    def test_claim_branches(self) -> None:
        """Time an ``if``: it takes little time where the condition picks the side without work."""
        backend, _ = self.claims()

        def action() -> None:
            graph, arguments = _branch()
            run = _built(backend, graph, options)
            seconds = {}
            for flag in (True, False):
                params, inputs = _split(backend, graph, {**arguments, "flag": np.array(flag)})
                seconds[flag] = min(_seconds(backend, partial(run, params, inputs)) for _ in range(4))
            assert seconds[True] > TIMES * seconds[False], f"both sides run: {seconds}"

        options = BuildOptions()
        if not backend.branches(options):
            pytest.skip("the backend does not claim it")
        self.check(["claim:branches"], action)

    def test_claim_checks_indices(self) -> None:
        """Compute an index outside of the bounds, which raises with ``checks=True``, and one inside, which does not."""
        backend, claims = self.claims()

        def action() -> None:
            with Builder("indices") as b:
                x, k = b.input("x", (8,)), b.input("k", (3,), "int32")
                y = operation("take")(x, operation("add")(k, k), axis=0)
            graph = b.build({"y": y})
            run = _built(backend, graph, BuildOptions(checks=True))
            x8 = np.arange(8, dtype=np.float32)
            good = _called(backend, run, graph, {"x": x8, "k": np.array([0, 1, 3], np.int32)})
            np.testing.assert_array_equal(good["y"], [0, 2, 6])
            with pytest.raises(MithrilError):
                _called(backend, run, graph, {"x": x8, "k": np.array([0, 1, 50], np.int32)})

        if not claims.checks_indices:
            pytest.skip("the backend does not claim it")
        self.check(["claim:checks_indices"], action)

    def test_claim_autodiff(self) -> None:
        """Compare gradients by the framework with those of the graph; a backend without them says so.

        They end at ``stop_gradient``, whose decomposition is its operand: the backend lowers it.
        """
        backend, claims = self.claims()

        def action() -> None:
            graph, arguments = _network(stops=True)
            options = BuildOptions()
            lowered = backend.decomposed(graph, options)
            if claims.autodiff == "none":
                with pytest.raises(MithrilError):
                    backend.build_with_gradients(lowered, ("y",), ("w", "x"), options)
                return
            run = backend.build_with_gradients(lowered, ("y",), ("w", "x"), options)
            call_arguments = {**arguments, cotangent_name("y"): np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)}
            results = _called(backend, run, graph, call_arguments)
            reference = self.expected(gradients(graph, ["y"], ["w", "x"]), call_arguments)  # type: ignore[attr-defined]
            for name, value in reference.items():
                assert_close(results[name], value, tolerance(backend.dtype, 16.0), f"'{name}'")

        self.check(["claim:autodiff"], action)

    def test_claim_keeps(self) -> None:
        """Dump and revive a program: it gives the same bits, in the form that is claimed."""
        backend, claims = self.claims()

        def action() -> None:
            graph, arguments = _network()
            options = BuildOptions()
            program = _built(backend, graph, options)
            parts = backend.dump(program)
            assert (parts is None) == (claims.keeps == "nothing"), f"keeps={claims.keeps!r}, but dump gives {parts}"
            if parts is None:
                return
            text = program.source or ""
            holds_source = bool(text) and any(text.encode() in part for part in parts.values())
            assert holds_source or claims.keeps != "source", "no part is the generated source"
            is_text = all(_is_text(part) for part in parts.values())
            assert not is_text or claims.keeps != "binary", "all parts are text"
            assert claims.keeps != "graph" or not holds_source, "a part is the generated source"
            again = backend.revive(parts, LazyGraph(to_text(program.graph)), options)
            first, second = (_called(backend, run, graph, arguments) for run in (program, again))
            for name, value in first.items():
                assert second[name].tobytes() == value.tobytes(), f"the program that was kept gives another '{name}'"

        self.check(["claim:keeps"], action)

    def test_claim_memory(self) -> None:
        """Measure a chain of products: it takes the memory of two or three values where they are freed or planned.

        Where a figure is exact, a measurement shows it; where it is an estimate, its error is said.
        """
        backend, claims = self.claims()

        def action() -> None:
            graph, arguments = _chain(LINKS)
            run = _built(backend, graph, BuildOptions())
            params, inputs = _split(backend, graph, arguments)
            # A call of a lazy engine takes less memory if its first thread is interrupted.
            measured = max(backend.measured_memory(lambda: run(params, inputs), run) for _ in range(4))
            value = 4 * SIDE * SIDE
            if not claims.is_lazy:
                assert measured < LINKS / 2 * value, f"a chain of {LINKS} values of {value} bytes took {measured}"
            exact = backend.exact_memory(run, {})
            if claims.knows_memory:
                assert exact is not None, f"memory={claims.memory!r}, but no exact figure"
            if exact is not None:
                assert abs(measured - exact[0]) <= ACCURACY * exact[0], f"exact: {exact}, but measured: {measured}"
                assert memory_use(run.graph, backend, {}, run).label  # reports print it

        self.check(["claim:memory"], action)

    def test_claim_estimate_error(self) -> None:
        """Compare an estimate of memory with the measurement: it is off by no more than the error that is claimed."""
        backend, claims = self.claims()

        def action() -> None:
            for graph, arguments in (_chain(LINKS), _donated()):
                run = _built(backend, graph, BuildOptions())
                params, inputs = _split(backend, graph, arguments)
                measured = max(backend.measured_memory(lambda: run(params, inputs), run) for _ in range(4))  # noqa: B023
                error = memory_use(run.graph, backend, {}, run).workspace / max(measured, 1) - 1
                assert low - ACCURACY <= error <= high + ACCURACY, f"the estimate of '{graph.name}' is {error:+.0%} off"

        if claims.estimate_error is None:
            pytest.skip("the backend claims no error of its estimates")
        low, high = claims.estimate_error
        self.check(["claim:estimate_error"], action)

    def test_claim_symbolic(self) -> None:
        """Run one program at several sizes; a backend that does not claim it refuses a graph of unknown sizes."""
        backend, claims = self.claims()

        def action() -> None:
            graph = _sized(Dim("rows"))
            if not claims.symbolic:
                with pytest.raises(MithrilError):
                    _built(backend, graph, BuildOptions())
                return
            run, w = _built(backend, graph, BuildOptions()), _matrix(7, SMALL)
            for rows in SIZES:
                x = np.ones((rows, SMALL), np.float32)
                expected = self.expected(_sized(rows), {"x": x, "w": w})  # type: ignore[attr-defined]
                result = _called(backend, run, graph, {"x": x, "w": w})
                assert_close(result["y"], expected["y"], tolerance(backend.dtype, 16.0), f"{rows} rows")

        self.check(["claim:symbolic"], action)

    def test_claim_recompiles(self) -> None:
        """Time the first call with a new size: it computes for long only where the backend compiles for each size.

        Processor time, of compilers in other processes too: a busy machine makes nothing late.
        """
        backend, claims = self.claims()

        def action() -> None:
            symbolic = _built(backend, _sized(Dim("rows")), BuildOptions()) if claims.symbolic else None
            first: list[float] = []
            later: list[float] = []
            for rows in SIZES:
                arguments = {"x": np.ones((rows, SMALL), np.float32), "w": _matrix(7, SMALL)}
                params, inputs = _split(backend, _sized(rows), arguments)
                start = _processor_seconds()
                run = symbolic or _built(backend, _sized(rows), BuildOptions())
                backend.synchronize(run(params, inputs))
                first.append(_processor_seconds() - start)
                later += [_seconds(backend, partial(run, params, inputs), _processor_seconds) for _ in range(3)]
            compiling = min(first[1:]) - min(later)  # the first program may import a library
            expected = "more" if claims.recompiles else "less"
            assert (compiling > SLOW) == claims.recompiles, (
                f"recompiles={claims.recompiles}: a new size takes {compiling:.4f} s of the processor, "
                f"expected {expected} than {SLOW} s"
            )

        if not claims.local:
            pytest.skip("programs run on another machine")
        self.check(["claim:recompiles"], action)

    def test_claim_threads(self) -> None:
        """Count the threads that compute: one with ``num_threads=1``, several with 2."""
        backend, claims = self.claims()

        def action() -> None:
            graph, arguments = _chain(6, 2 * SIDE)
            for count in (1, 2):
                run = _built(backend, graph, BuildOptions(num_threads=count))
                params, inputs = _split(backend, graph, arguments)
                run(params, inputs)
                before, start = _thread_times(), time.process_time_ns()
                for _ in range(3):
                    backend.synchronize(run(params, inputs))
                spent = [s - before.get(t, 0) for t, s in _thread_times().items()]
                spent.append(time.process_time_ns() - start - sum(spent))  # of threads that have ended
                working = sum(s > OTHERS * max(spent) for s in spent)
                assert (working > 1) == (count > 1), f"num_threads={count}: {working} threads computed"

        if not claims.threads:
            pytest.skip("the backend does not claim it")
        limited = os.environ.get("OMP_NUM_THREADS") == "1"
        if limited or not Path("/proc/self/task").exists() or (os.cpu_count() or 1) < 2:
            pytest.skip("threads cannot be observed here")
        self.check(["claim:threads"], action)

    def test_identity(self) -> None:
        """Backends that give other programs have other identities; use does not change one, nor does a second."""
        backend, _ = self.claims()

        def action() -> None:
            before = backend.identity()
            _built(backend, _network()[0], BuildOptions())
            backend.randn((3,))
            assert backend.identity() == before, f"use changes the identity: {before}, {backend.identity()}"
            kind = plugins.backend_class(self.backend) if isinstance(self.backend, str) else self.backend
            if isinstance(kind, type):
                first, second = kind(), kind()
                assert first.identity() == second.identity(), "equal backends have other identities"
            precisions = [d.name for d in (float16, bfloat16) if d in backend.dtypes]
            configurations = [*(backend.with_precision(p) for p in precisions), *self.configurations]
            by_identity = {before: backend}
            for other in configurations:
                existing = by_identity.setdefault(other.identity(), other)
                assert existing is other, f"{other!r} and {existing!r} have one identity: {other.identity()}"

        self.check(["identity"], action)


# -- programs ---------------------------------------------------------------------------------------------------------
def _matrix(seed: int, side: int = SIDE) -> Array:
    return np.random.default_rng(seed).normal(0.0, side**-0.5, (side, side)).astype(np.float32)


def _chain(links: int, side: int = SIDE) -> tuple[Graph, dict[str, Array]]:
    """Return a chain of products, none of which can overwrite its operand."""
    with Builder("chain") as b:
        x, w = b.input("x", (side, side)), b.param("w", (side, side))
        y = _products(x, w, links)
    return b.build({"y": y}), {"x": _matrix(0, side), "w": _matrix(1, side)}


def _products(x: Value, w: Value, count: int) -> Value:
    for _ in range(count):
        x = operation("matmul")(x, w)
    return x


def _sized(rows: int | Dim) -> Graph:
    """Return products of a number of rows, enough of them for a compiler to take its time."""
    with Builder("sized") as b:
        x, w = b.input("x", (rows, SMALL)), b.param("w", (SMALL, SMALL))
        for _ in range(LINKS):
            x = operation("tanh")(operation("matmul")(x, w))
    return b.build({"y": x})


def _donated() -> tuple[Graph, dict[str, Array]]:
    with Builder("donated") as b:
        x, w = b.input("x", (SIDE, SIDE)), b.param("w", (SIDE, SIDE))
        y = w + x * 2.0
    graph = b.build({"w": y})
    donated_inputs = tuple(replace(i, tags={**i.tags, "donated": True}) if i.name == "w" else i for i in graph.inputs)
    return graph.replaced(inputs=donated_inputs), {"x": _matrix(2), "w": _matrix(3)}


def _branch() -> tuple[Graph, dict[str, Array]]:
    with Builder("branch") as b:
        x, w, flag = b.input("x", (SIDE, SIDE)), b.param("w", (SIDE, SIDE)), b.input("flag", (), "bool")
        y = cond(flag, lambda v: _products(v, w, LINKS), lambda v: v + 1.0, x)
    return b.build({"y": y}), {"x": _matrix(4), "w": _matrix(5)}


def _network(*, stops: bool = False) -> tuple[Graph, dict[str, Array]]:
    """Return a layer and its arguments; with ``stops`` a part of the weight has no gradient."""
    rng = np.random.default_rng(6)
    with Builder("network") as b:
        x, w = b.input("x", (4, 5)), b.param("w", (5, 3))
        bias = b.constant(rng.normal(size=(4, 3)).astype(np.float32))
        weight = w * operation("stop_gradient")(w) if stops else w
        y = operation("tanh")(operation("matmul")(x, weight) + bias)
    shapes = {"x": (4, 5), "w": (5, 3)}
    return b.build({"y": y}), {n: rng.normal(size=s).astype(np.float32) for n, s in shapes.items()}


# -- running ----------------------------------------------------------------------------------------------------------
def _built(backend: Backend, graph: Graph, options: BuildOptions) -> Executable:
    return backend.build(backend.decomposed(graph, options), options)


def _split(backend: Backend, graph: Graph, arguments: Arrays) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return parameters and inputs as arrays of the backend."""
    names = {i.name for i in graph.with_role("param")}
    native = {n: backend.array(a) for n, a in arguments.items()}
    return {n: a for n, a in native.items() if n in names}, {n: a for n, a in native.items() if n not in names}


def _called(backend: Backend, run: Executable, graph: Graph, arguments: Arrays) -> dict[str, Array]:
    results = run(*_split(backend, graph, arguments))
    return {name: np.array(backend.to_numpy(x)) for name, x in results.items()}


def _is_spent(backend: Backend, array: Any, before: Array) -> bool:
    """Whether an array is unusable or holds other elements."""
    with contextlib.suppress(Exception):  # each framework has its own error for an array that is gone
        return not np.array_equal(backend.to_numpy(array), before)
    return True


def _is_text(data: bytes | bytearray) -> bool:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _seconds(backend: Backend, call: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> float:
    start = clock()
    backend.synchronize(call())
    return clock() - start


def _processor_seconds() -> float:
    """Return the processor time of this process and of the processes that it waited for."""
    children = os.times()
    return time.process_time() + children.children_user + children.children_system


def _thread_times() -> Mapping[str, int]:
    """Return the nanoseconds that each thread of this process has computed."""
    times = {}
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # a thread that has just ended
            times[task.name] = int((task / "schedstat").read_text().split()[0])
    return times
