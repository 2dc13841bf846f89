"""Conformance of a backend: every operation, forward and backward, against the one meaning."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any, ClassVar

import numpy as np
import pytest

import mithril_testing_summary as summary
from mithril import ops, plugins
from mithril.backend import Backend, BuildOptions, ExactSizesRequired
from mithril.derivatives import gradients
from mithril.graph import (
    Arr,
    Builder,
    Dim,
    Graph,
    MithrilError,
    Op,
    OperationError,
    UnsupportedError,
    bfloat16,
    decompose,
    dtype as as_dtype,
    evaluate,
    float16,
    iterate,
)
from mithril.passes import random_arguments
from mithril_testing import xfail
from mithril_testing.cases import Case, backend_cases, differentiable, gradient_graph, symbolic_graph
from mithril_testing.claims import ClaimChecks
from mithril_testing.compare import assert_close, tolerance
from mithril_testing.constants import ConstantsConformance
from mithril_testing.elementwise import signs_of_zeros, special_calls, strided_calls
from mithril_testing.grown import affordable, grown_cases, join_graphs
from mithril_testing.joined import JoinedCalls
from mithril_testing.operation import takes_regions
from mithril_testing.program_checks import ProgramChecks
from mithril_testing.random_graphs import SMALL, WIDE, random_graph
from mithril_testing.running import Array, Arrays, Program, backwards, every_other, not_lowered, run_by, with_params
from mithril_testing.sample_arrays import hostile_integers, make_array
from mithril_testing.selection import begin, core_operations, record, record_excluded, record_way, selected
from mithril_testing.time_limit import limited

ROUNDING = 4e-6  # of a value about 1 that cancels, such as a saturated sigmoid in its gradient


class BackendConformance(ProgramChecks, ClaimChecks, ConstantsConformance):
    """Inherit, set ``backend``, and every operation of the table is checked.

    Of each operation: all samples in all dtypes, forward and backward; symbolic sizes with one program; special values
    in all combinations and thousands of others in every dtype (element-wise operations); sizes beyond every tile and
    threshold; repeated calls with other values; operands intact; the same source twice. Where the backend runs the body
    of a composite, samples are checked in their own dtype, gradients, symbolic sizes and, in one form, sizes beyond
    tiles with one sample, and programs are neither called nor built again, as the operations of the body are checked
    themselves. ``--kit-bodies`` leaves nothing out.

    Of programs: random graphs with gradients, values of all ranks, casts between all pairs of dtypes, integers of all
    widths, rows of special values, 16-bit sums, control flow, parameters, results that share no memory, repeatability,
    constants in every role, arrays.

    Of the backend itself: every claim of its ``capabilities``, by its effect, and that its ``identity`` distinguishes
    configurations that give other programs: other precisions, and those listed in ``configurations``.

    Not checked: speed, options other than those of ``options``, devices other than the backend's default, denormal
    numbers (their meaning is not specified), and the sign of a zero that a sum or a tie yields.

    ``xfail`` maps the id of a case (``cumsum[int8]``, ``softmax``, ``special:floor``, ``casts``) to why it fails; a
    case listed there that passes is a failure. ``ops`` selects operations by name, for trying things out or for a
    plugin that declares operations: then random graphs are left out. By default mithril's own operations and those of
    all installed plugins are checked; primitives of plugins that the backend does not lower are named at the end.

    For partial engines: ``host = True`` accepts the references that the backend runs, and records, as fallbacks.
    ``complete = False`` selects the primitives that the backend lowers and the composites whose bodies it covers. With
    it, or with ``ops``, calls that the condition of a lowering excludes are skipped, and counted at the end.

    A case that takes more than ``case_seconds`` of the processor fails, so that every run ends.
    """

    backend: ClassVar[str | Backend | type[Backend]] = ""
    xfail: ClassVar[Mapping[str, str]] = {}
    ops: ClassVar[Collection[str | Op] | None] = None
    complete: ClassVar[bool] = True
    host: ClassVar[bool] = False
    on_host: ClassVar[frozenset[str]] = frozenset()  # primitives whose NumPy references the backend calls
    jit: ClassVar[bool | None] = False
    distribution: ClassVar[str] = ""  # of the plugin, where it is not 'mithril-<backend>'
    joins: ClassVar[bool] = False  # whether the samples of an operation are one program, which compiles in less time

    case_seconds: ClassVar[float] = 300.0

    @pytest.fixture(autouse=True)
    def _limited(self) -> Iterator[None]:
        with limited(self.case_seconds):
            yield

    # -- what the classes give the tests ------------------------------------------------------------------------------
    _backends: ClassVar[dict[type, Backend]] = {}

    @classmethod
    def make(cls) -> Backend:
        """Return the backend under test, made once per class."""
        if cls not in cls._backends:
            backend = cls.backend
            if isinstance(backend, str):
                backend = plugins.backend_class(backend)
            cls._backends[cls] = backend if isinstance(backend, Backend) else backend()
        return cls._backends[cls]

    @classmethod
    def options(cls) -> BuildOptions:
        return BuildOptions(jit=cls.jit)

    def pytest_generate_tests(self, metafunc: Any) -> None:
        cls = metafunc.cls
        cls._bodies = metafunc.config.getoption("--kit-bodies", False)
        try:
            cases = cls.cases()
        except MithrilError as error:
            raise pytest.Collector.CollectError(str(error)) from error
        begin(cls, cls.operations(), metafunc.config, cls.exempt)
        if "case" in metafunc.fixturenames:
            rows = cls._cases_of(metafunc.function)
            metafunc.parametrize("case", rows, ids=[c.id for c in rows])
        if "op" in metafunc.fixturenames:
            accepts = getattr(metafunc.function, "accepts", lambda op: True)
            of_bodies = getattr(metafunc.function, "of_bodies", True)
            ops = [o for o in dict.fromkeys(c.op for c in cases) if accepts(o) and (of_bodies or cls._is_checked(o))]
            metafunc.parametrize("op", ops, ids=[o.name for o in ops])

    @classmethod
    def operations(cls) -> dict[str, Op]:
        """Return the operations that the class is about, by name."""
        if cls not in cls._selected:
            ops = dict(sorted(selected(cls.ops).items()))
            cls._selected[cls] = ops if cls.complete else {n: o for n, o in ops.items() if cls._covers(o)}
        return cls._selected[cls]

    _selected: ClassVar[dict[type, dict[str, Op]]] = {}

    @classmethod
    def _covers(cls, op: Op) -> bool:
        """Whether the backend runs a sample of the operation, by a lowering or by its body."""
        backend, options = cls.make(), cls.options()
        cases = backend_cases(backend.dtypes, (op,))
        return any(not not_lowered(backend, options, case.graph()) for case in cases)

    @classmethod
    def exempt(cls) -> dict[str, str]:
        """Return operations that need not run here, such as a plugin's primitives without a lowering, and why."""
        ops, core = cls.operations(), core_operations()
        foreign = [] if cls.ops is not None else [o for n, o in ops.items() if n not in core]
        without = {o.name: "no lowering here" for o in foreign if not o.composite and not cls._lowered(o)}
        without |= {o.name: "no samples" for o in foreign if not o.samples}
        dtypes = cls.make().dtypes
        for name, op in ops.items():
            if takes_regions(op):
                without[name] = "control flow: in the graphs of whole programs"
            elif op.samples and cls.on_host & _primitives(Case(op, op.samples[0], 0).graph()):
                without[name] = "its NumPy reference runs on the host"
            elif op.samples and not any(Case(op, s, k).needs <= dtypes for k, s in enumerate(op.samples)):
                without[name] = "the backend lacks the dtypes of its samples"
        return without

    @classmethod
    def _lowered(cls, op: Op) -> bool:
        node = Case(op, op.samples[0], 0).graph().nodes[-1] if op.samples else None
        return node is not None and cls.make().lowers(node, cls.options())

    @classmethod
    def cases(cls) -> list[Case]:
        """Return every call that is tried, found once per class; an error where there would be none."""
        if cls in cls._cases:
            return cls._cases[cls]
        without = cls.exempt()
        cases = [c for c in backend_cases(cls.make().dtypes, cls.operations().values()) if c.op.name not in without]
        if not cases:
            names = ", ".join(cls.operations())
            raise OperationError(f"nothing to check: no sample of {names} fits backend '{cls.make().name}'")
        cls._cases[cls] = cases
        return cases

    _cases: ClassVar[dict[type, list[Case]]] = {}

    @classmethod
    def _cases_of(cls, test: Callable[..., None]) -> list[Case]:
        """Return the cases that a test is made for."""
        accepts = getattr(test, "accepts", lambda case: True)
        if getattr(test, "one_sample_of_bodies", False):
            return [c for c in cls.cases() if accepts(c) and cls._is_representative(c)]
        if getattr(test, "one_dtype_of_bodies", False):
            return [c for c in cls.cases() if accepts(c) and (c.dtype is None or cls._is_checked(c.op))]
        of_bodies = getattr(test, "of_bodies", True)
        return [c for c in cls.cases() if accepts(c) and (of_bodies or cls._is_checked(c.op))]

    @classmethod
    def _is_checked(cls, op: Op) -> bool:
        """Whether an operation has all checks: the backend has code of its own for it, or nothing is left out."""
        if cls._bodies or cls.ops is not None or not op.composite:
            return True
        if (cls, op) not in cls._own_code:
            cls._own_code[cls, op] = any(c.op is op and cls._is_lowered_in(c, op.name) for c in cls.cases())
        return cls._own_code[cls, op]

    _bodies: ClassVar[bool] = False  # pytest --kit-bodies
    _own_code: ClassVar[dict[tuple[type, Op], bool]] = {}

    @classmethod
    def _is_representative(cls, case: Case) -> bool:
        """Whether a case is checked: every one of an operation with code of its own, else the first."""
        return cls._is_checked(case.op) or case is next(c for c in cls.cases() if c.op is case.op)

    # -- running ------------------------------------------------------------------------------------------------------
    def start(self, graph: Graph) -> Program:
        """Build a graph; calling the program checks that the backend ran every operation and left operands intact.

        With ``ops``, a graph that needs rows for operations outside of them, such as those of a gradient, is skipped,
        and so is one with a call that the condition of a lowering excludes.
        """
        backend, options = self.make(), self.options()
        try:
            return Program(backend, options, graph, self.host)
        except UnsupportedError:
            missing = not_lowered(backend, options, graph)
            excluded = missing & set(self.operations())
            if not missing or (self.ops is None and self.complete) or not all(map(self._is_lowered, excluded)):
                raise
            if excluded:
                record_excluded(type(self))
                pytest.skip(f"{summary.EXCLUDED} this call of: {', '.join(sorted(excluded))}")
            pytest.skip(f"{summary.NEEDS_ROWS}: {', '.join(sorted(missing))}")

    @classmethod
    def _is_lowered(cls, name: str) -> bool:
        """Whether the backend lowers some call of an operation, so that a condition excludes the others."""
        return any(cls._is_lowered_in(case, name) for case in cls.cases())

    @classmethod
    def _is_lowered_in(cls, case: Case, name: str) -> bool:
        backend, options = cls.make(), cls.options()
        return any(backend.lowers(node, options) for node, _ in iterate(case.graph()) if node.op.name == name)

    def run(self, graph: Graph, inputs: Arrays) -> dict[str, Array]:
        """Build a graph and run it once."""
        return self.start(graph)(inputs)

    def expected(self, graph: Graph, inputs: Arrays) -> dict[str, Array]:
        """Compute the results by the references."""
        return evaluate(graph, inputs)

    def rounding_sensitivity(self, graph: Graph, inputs: Arrays, expected: Arrays) -> dict[str, float]:
        """Measure how much each output changes with the last digits of all inputs, as with the order of a sum."""
        rng = np.random.default_rng(0)
        nudged = dict(inputs)
        for n, x in inputs.items():
            if as_dtype(x.dtype).is_float:
                nudged[n] = np.asarray(x * rng.uniform(1 - 4e-6, 1 + 4e-6, x.shape), x.dtype)
        changed = self.expected(graph, nudged)
        floats = {n: x.astype(np.float64) for n, x in expected.items() if as_dtype(x.dtype).is_float}
        with np.errstate(all="ignore"):
            differences = {n: np.abs(changed[n].astype(np.float64) - x) for n, x in floats.items()}
        return {n: float(np.max(d[np.isfinite(d)], initial=ROUNDING)) for n, d in differences.items()}

    def compare(
        self,
        graph: Graph,
        inputs: Arrays,
        factor: float,
        unsure: bool = False,
        signs: Callable[[str], bool] | None = None,
        largest: float = np.inf,
    ) -> None:
        """Compare a run with the references.

        ``signs`` tells for which outputs the signs of zeros count. ``unsure`` allows differences that changes of the
        arguments' last digits cause, as in graphs that amplify rounding. ``largest`` as in ``assert_close``.
        """
        self.compare_call(self.start(graph), graph, inputs, factor, unsure, signs, largest)

    def compare_sample(
        self, kind: str, case: Case, accepts: Callable[[Case], bool], call: Callable[[Case], tuple[Graph, Arrays]]
    ) -> None:
        """Compare the call of one sample, which may be part of a program of all samples of its operation.

        The first sample of an operation with all checks is a program of its own, and so is one listed in ``xfail``.
        """

        def is_joined(c: Case) -> bool:
            is_first = kind == "forward" and c.number == 0 and c.dtype is None and self._is_checked(c.op)
            return self.joins and c.op is case.op and accepts(c) and not is_first and not self._is_listed(c)

        graph, inputs = call(case)
        factor = (4 if kind == "gradient" else 1) * case.op.tolerance
        if not is_joined(case):
            self.compare(graph, inputs, factor)
            return
        key = (type(self), kind, case.op)
        if self._programs.get(kind, (None, None))[0] != key:
            calls = {c.id: call(c) for c in self.cases() if is_joined(c)}
            self._programs[kind] = (key, JoinedCalls(case.op.name, calls, self.start))
        results = self._programs[kind][1].result(case.id)
        if results is None:
            self.compare(graph, inputs, factor)
        else:
            self.compare_call(lambda _: results, graph, inputs, factor)

    _programs: ClassVar[dict[str, tuple[Any, Any]]] = {}  # the latest program of each kind

    def _is_listed(self, case: Case) -> bool:
        return any(name.removeprefix("gradient:") in case.names() for name in self.xfail)

    def compare_call(
        self,
        program: Callable[[Arrays], dict[str, Array]],
        graph: Graph,
        inputs: Arrays,
        factor: float,
        unsure: bool = False,
        signs: Callable[[str], bool] | None = None,
        largest: float = np.inf,
    ) -> None:
        """Compare one call of a program with the references."""
        expected = self.expected(graph, inputs)
        actual = program(inputs)
        assert list(actual) == list(expected), f"outputs {list(actual)}, expected {list(expected)}"

        def compare_all(slack: Mapping[str, float]) -> None:
            for name, reference in expected.items():
                allowed = tolerance(as_dtype(reference.dtype), factor)
                counted = signs is not None and signs(name)
                margin = slack.get(name, 0.0)
                assert_close(actual[name], reference, allowed, f"output '{name}'", margin, counted, largest)

        try:
            compare_all({})
        except AssertionError:
            if not unsure:
                raise
            compare_all(self.rounding_sensitivity(graph, inputs, expected))

    def check(self, names: list[str], action: Callable[[], None], ops: Collection[str] = ()) -> None:
        """Run one check that may be listed in ``xfail`` under some names, and count the operations it was about."""
        xfail.run(names, self.xfail, action)
        record(type(self), ops)

    # -- samples ------------------------------------------------------------------------------------------------------
    def test_forward(self, case: Case) -> None:
        """Compare value, shape and dtype of every sample in every dtype."""
        if case.number == 0 and case.dtype is None:
            self._record_way(case)

        def action() -> None:
            self.compare_sample("forward", case, self._has_dtype_to_check, lambda c: (c.graph(), c.inputs()))

        self.check(case.names(), action, [case.op.name])

    def _has_dtype_to_check(self, case: Case) -> bool:
        return case.dtype is None or self._is_checked(case.op)

    test_forward.one_dtype_of_bodies = True  # type: ignore[attr-defined]

    def _record_way(self, case: Case) -> None:
        backend, options = self.make(), self.options()
        calls = [node for node, _ in iterate(case.graph()) if node.op is case.op]
        if calls:
            way = "lowered" if all(backend.lowers(node, options) for node in calls) else "by their bodies"
            record_way(type(self), case.op.name, way)

    def test_gradient(self, case: Case) -> None:
        """Compare the gradient program on the backend with the references'; ``OpConformance`` checks the gradient."""

        self.check(
            ["gradient:" + n for n in case.names()],
            lambda: self.compare_sample("gradient", case, self._has_representative_gradient, _gradient_call),
        )

    def _has_representative_gradient(self, case: Case) -> bool:
        return _has_gradient(case) and self._is_representative(case)

    test_gradient.accepts = lambda case: _has_gradient(case)  # type: ignore[attr-defined]
    test_gradient.one_sample_of_bodies = True  # type: ignore[attr-defined]

    def test_symbolic(self, case: Case) -> None:
        """Run one program with a symbolic leading size on several sizes, and on the first again."""

        def action() -> None:
            graph = symbolic_graph(case)
            assert graph is not None
            if not self.make().capabilities.symbolic:
                with pytest.raises(MithrilError):
                    self.run(graph, case.inputs())
                return
            try:
                program = self.start(graph)
            except ExactSizesRequired as reason:
                pytest.skip(f"one program for each size: {reason.what}")
            sizes = [inputs for inputs in (_resized(graph, case), _emptied(graph, case)) if inputs is not None]
            for inputs in (case.inputs(), *sizes, case.inputs()) if sizes else (case.inputs(),):
                self.compare_call(program, graph, inputs, case.op.tolerance)

        self.check(["symbolic:" + n for n in case.names()], action)

    test_symbolic.accepts = lambda case: case.dtype is None and symbolic_graph(case) is not None  # type: ignore[attr-defined]
    test_symbolic.one_sample_of_bodies = True  # type: ignore[attr-defined]

    def test_same_source_twice(self, case: Case) -> None:
        """Build twice: the source is the same, and imports nothing of mithril, except to call a plugin's lowering."""
        backend, options = self.make(), self.options()
        first = self.start(case.graph()).executable
        graph = run_by(backend, options, case.graph(), self.host)
        second = backend.build(graph, options)
        assert first.source == second.source
        foreign = any(
            backend.plugin_lowering(node, options) is not None or backend.falls_back(node, options)
            for node, _ in iterate(graph)
        )
        imports = [] if foreign else core_imports(first.source)
        assert not imports, f"generated code stands alone, yet it says: {imports[0]}"

    test_same_source_twice.accepts = lambda case: case.number == 0 and case.dtype is None  # type: ignore[attr-defined]
    test_same_source_twice.of_bodies = False  # type: ignore[attr-defined]

    # -- operations ---------------------------------------------------------------------------------------------------
    def test_special_values(self, op: Op) -> None:
        """Compare all combinations of special values and thousands of others, in every dtype, zeros with signs."""

        def action() -> None:
            graph, arguments = special_calls(op, self.make().dtypes)
            if graph.outputs:
                signed = signs_of_zeros(graph)
                # The body of a composite rounds sums that may cancel.
                largest = 1.0 if op.composite else 1e-3
                self.compare(graph, arguments, op.tolerance, signs=lambda _: signed, largest=largest)

        self.check([f"special:{op.name}"], action)

    test_special_values.accepts = lambda op: op.elementwise  # type: ignore[attr-defined]

    def test_broadcast_and_strides(self, op: Op) -> None:
        """Broadcast operands; read transposed, reversed, repeated and read-only views, and arrays without elements."""

        def action() -> None:
            graph, arguments = strided_calls(op)
            self.compare(graph, arguments, op.tolerance)

        self.check([f"broadcast:{op.name}"], action)

    test_broadcast_and_strides.accepts = lambda op: op.elementwise  # type: ignore[attr-defined]

    def test_repeated_calls(self, op: Op) -> None:
        """Call one program of all samples, half of its operands parameters, with other values in between.

        One call has integers out of bounds and out of order, which must not reach memory outside of the arrays.

        Each result is read by a further operation, which must not overwrite the operand where both are one array; the
        first call's results must not change with further calls.
        """

        def action() -> None:
            cases = [c for c in self.cases() if c.op is op and c.dtype is None]
            graph = join_graphs([(f"c{c.number}", c.graph()) for c in cases], op.name, _continued)
            graph = with_params(graph, every_other(graph))
            arguments = {f"c{c.number}/{n}": a for c in cases for n, a in c.inputs().items()}
            program = self.start(graph)
            first = program.call(program.native(arguments))
            before = program.numpy(first)
            operands = [(f"c{c.number}/x{k}", spec) for c in cases for k, spec in enumerate(c.sample.operands)]
            ordered = {name for name, spec in operands if spec is not None and spec.ordered}
            self.compare_call(program, graph, backwards(arguments, ordered), 4 * op.tolerance)
            for name, array in program.numpy(first).items():
                assert array.tobytes() == before[name].tobytes(), f"a later call changes the earlier '{name}'"
            if not op.elementwise and op is not ops.ctc_loss_grad:  # a label that is blank has another gradient
                integers = {n: hostile_integers(a) for n, a in arguments.items() if as_dtype(a.dtype).is_integer}
                self.compare_call(program, graph, {**arguments, **integers}, 16 * op.tolerance)
            self.compare_call(program, graph, arguments, 4 * op.tolerance)

        self.check([op.name, f"repeated:{op.name}"], action)

    test_repeated_calls.of_bodies = False  # type: ignore[attr-defined]

    def test_sizes_beyond_tiles(self, op: Op) -> None:
        """Compare forms of the samples with 9 to 70 rows and 5,000 columns, forward and backward."""

        def action() -> None:
            samples = [c for c in self.cases() if c.op is op and c.dtype is None and self._is_representative(c)]
            forms = None if self._is_checked(op) else 1
            cases = [g for c in samples for g in islice(grown_cases(c), forms)]
            if not cases:
                return
            graphs = []
            for case in cases:
                backward = gradient_graph(case.graph()) if case.sample.gradient and differentiable(case) else None
                graphs.append(backward if backward is not None and affordable(backward) else case.graph())
            graph = join_graphs([(f"g{k}", g) for k, g in enumerate(graphs)], op.name)
            inputs = {f"g{k}/{n}": a for k, c in enumerate(cases) for n, a in c.inputs().items()}
            arguments = with_cotangents(graph, inputs)
            self.compare(graph, arguments, 16 * op.tolerance, unsure=True)

        self.check([op.name, f"sizes:{op.name}"], action)

    test_sizes_beyond_tiles.accepts = lambda op: not op.elementwise  # type: ignore[attr-defined]

    # -- graphs -------------------------------------------------------------------------------------------------------
    @pytest.mark.parametrize("seed", range(12))  # nox -s soak-graphs runs thousands
    def test_random_graphs(self, seed: int) -> None:
        """Run operations in any order, half of the operands parameters, and the gradients through them."""
        if self.ops is not None:
            pytest.skip("some operations only")

        def action() -> None:
            graph = random_graph(seed, sizes=WIDE if seed % 3 == 0 else SMALL)
            graph = with_params(graph, every_other(graph))
            arguments = random_arguments(graph, seed)
            self.compare(graph, arguments, 64.0, unsure=True)
            backward = gradients(graph, None, [i.name for i in graph.arguments])
            arguments = with_cotangents(backward, arguments)
            self.compare(backward, arguments, 256.0, unsure=True)

        self.check([f"random:{seed}"], action)

    # -- the backend itself -------------------------------------------------------------------------------------------
    def test_unsupported_dtype_is_refused(self) -> None:
        """Raise a mithril error for a dtype the backend lacks; neither crash nor use another in silence."""
        backend = self.make()
        for kind in (float16, bfloat16, as_dtype("float64"), as_dtype("int64")):
            if kind not in backend.dtypes:
                builder = Builder()
                with builder:
                    x = builder.input("x", (2,), kind)
                    y = x + x
                with pytest.raises(MithrilError):
                    self.run(builder.build({"y": y}), {"x": np.zeros(2, kind.numpy)})

    def test_entry_module_is_light(self) -> None:
        """Import the plugin's entry module without a framework."""
        backend = self.make()
        module, heavy = _entry_module(backend.name, self.distribution)
        code = f"import sys, {module}; print([m for m in {heavy!r} if m in sys.modules])"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() == "[]", f"importing {module} imports {done.stdout.strip()}"


def _has_gradient(case: Case) -> bool:
    return case.sample.gradient and differentiable(case) and (case.dtype is None or case.dtype in (float16, bfloat16))


def _gradient_call(case: Case) -> tuple[Graph, Arrays]:
    graph = gradient_graph(case.graph())
    return graph, with_cotangents(graph, case.inputs())


def with_cotangents(graph: Graph, arguments: Arrays) -> dict[str, Array]:
    """Return the arguments of a gradient program: those of the forward program and random cotangents."""
    return {
        i.name: arguments[i.name]
        if i.name in arguments
        else make_array(Arr(i.type.shape, i.type.dtype.name, 0.5, 1.5), i.name)
        for i in graph.arguments
    }


def _primitives(graph: Graph) -> set[str]:
    """Return the names of the primitives that a graph consists of."""
    return {node.op.name for node in decompose(graph, lambda node: not node.op.composite).nodes}


def _continued(x: Any) -> Any:
    """Apply an element-wise operation that reads a result for the last time."""
    from mithril.ops import logical_not, neg

    return logical_not(x) if x.dtype.is_bool else neg(x) if x.dtype.is_float else x * 3


def core_imports(source: str | None) -> list[str]:
    """Return the lines of generated Python that import mithril itself; a plugin's own runtime is none."""
    lines = [line.strip() for line in (source or "").splitlines()]
    return [
        n for n in lines if n.startswith(("import ", "from ")) and n.split()[1].split(".")[0].rstrip(",;") == "mithril"
    ]


def _resized(graph: Graph, case: Case) -> dict[str, Array] | None:
    """Return other inputs whose symbolic size is one larger, where the sample's values are random."""
    inputs = {}
    for k, spec in enumerate(case.sample.operands):
        if spec is None:
            continue
        declared = graph.input(f"x{k}").type.shape
        if any(isinstance(d, Dim) for d in declared):
            if spec.values is not None:
                return None
            spec = replace(spec, shape=(int(spec.shape[0]) + 1, *spec.shape[1:]))
        inputs[f"x{k}"] = make_array(spec, f"{case.id}/again/{k}")
    sizes = {a.shape[0] for a, i in zip(inputs.values(), graph.inputs, strict=False) if not i.type.is_static}
    return inputs if _admits(graph, sizes.pop()) else None


def _emptied(graph: Graph, case: Case) -> dict[str, Array] | None:
    """Return inputs whose symbolic size is 0."""
    if not _admits(graph, 0):
        return None
    return {n: a if graph.input(n).type.is_static else a[:0] for n, a in case.inputs().items()}


def _admits(graph: Graph, size: int) -> bool:
    try:
        for guard in graph.guards:
            guard.check({"N": size}, {})
    except MithrilError:
        return False
    return True


def _entry_module(name: str, distribution: str) -> tuple[str, tuple[str, ...]]:
    """Return the plugin module that provides the backend, and the modules it must not import."""
    registered = plugins.backend(name)
    return registered.plugin.module, tuple(m for m in registered.spec.requires if m != "numpy")
