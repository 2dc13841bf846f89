"""Conformance of a backend: every operation, forward and backward, against the one meaning."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar

import numpy as np
import pytest

from mithril import plugins
from mithril.autodiff import gradients
from mithril.backend.base import Backend, BuildOptions
from mithril.base.dims import Dim
from mithril.base.dtypes import DType, bfloat16, dtype as as_dtype, float16, float32, int32
from mithril.base.errors import MithrilError, OperationError
from mithril.base.registry import operations
from mithril.ir import Builder, Graph, Value
from mithril.ir.decompose import decompose
from mithril.ir.evaluate import evaluate
from mithril.ir.op import Op
from mithril.passes.manager import random_arguments
from mithril_testing import xfail
from mithril_testing.cases import Case, backend_cases, symbolic_graph
from mithril_testing.compare import assert_close, tolerance
from mithril_testing.constants import ConstantsConformance
from mithril_testing.operation import takes_regions
from mithril_testing.random_graphs import SMALL, WIDE, random_graph
from mithril_testing.sample_arrays import every_pair, make_array, special_array
from mithril_testing.selection import begin, core_operations, record, selected


class BackendConformance(ConstantsConformance):
    """Inherit, set ``backend``, and every operation of the table is checked.

    ``xfail`` maps the id of a case (``cumsum[int8]``, ``softmax``, ``special:floor``) to why it fails; a case
    listed there that passes is a failure. ``ops`` narrows the operations, for trying things out.
    """

    backend: ClassVar[str | Backend | type[Backend]] = ""
    xfail: ClassVar[Mapping[str, str]] = {}
    ops: ClassVar[Collection[str] | None] = None
    jit: ClassVar[bool | None] = False
    distribution: ClassVar[str] = ""  # of the plugin, where it is not 'mithril-<backend>'

    # -- what the classes give the tests ------------------------------------------------------------------------------
    _made: ClassVar[dict[type, Backend]] = {}

    @classmethod
    def make(cls) -> Backend:
        """The backend under test, made once per class."""
        if cls not in cls._made:
            chosen = cls.backend
            if isinstance(chosen, str):
                chosen = plugins.backend_class(chosen)
            cls._made[cls] = chosen if isinstance(chosen, Backend) else chosen()
        return cls._made[cls]

    @classmethod
    def options(cls) -> BuildOptions:
        return BuildOptions(jit=cls.jit)

    def pytest_generate_tests(self, metafunc: Any) -> None:
        cls = metafunc.cls
        try:
            cases = cls.cases()
        except MithrilError as error:
            raise pytest.Collector.CollectError(str(error)) from error
        tally = begin(cls, cls.operations(), metafunc.config)
        tally.exempt = cls.exempt()
        if "case" in metafunc.fixturenames:
            wanted = getattr(metafunc.function, "wants", None)
            chosen = [c for c in cases if wanted is None or wanted(c)]
            metafunc.parametrize("case", chosen, ids=[c.id for c in chosen])
        if "elementwise" in metafunc.fixturenames:
            tried = {case.op for case in cases}
            rows = [o for o in cls.operations().values() if o.elementwise and o in tried]
            metafunc.parametrize("elementwise", rows, ids=[o.name for o in rows])

    @classmethod
    def operations(cls) -> dict[str, Op]:
        """The operations that the class is about, by name."""
        return dict(sorted(selected(cls.ops).items()))

    @classmethod
    def exempt(cls) -> dict[str, str]:
        """Operations that need not run here: a plugin's primitives without a lowering, unless ``ops`` names them."""
        chosen, own = cls.operations(), core_operations()
        foreign = [] if cls.ops is not None else [o for n, o in chosen.items() if n not in own]
        without = {o.name: "no lowering here" for o in foreign if not o.composite and not cls._lowered(o)}
        without |= {o.name: "no samples" for o in foreign if not o.samples}
        dtypes = cls.make().dtypes
        for name, op in chosen.items():
            if takes_regions(op):
                without[name] = "control flow: in the graphs of whole programs"
            elif op.samples and not any(Case(op, s, k).needs <= dtypes for k, s in enumerate(op.samples)):
                without[name] = "the backend lacks the dtypes of its samples"
        return without

    @classmethod
    def _lowered(cls, op: Op) -> bool:
        node = Case(op, op.samples[0], 0).graph().nodes[-1] if op.samples else None
        return node is not None and cls.make().lowers(node, cls.options())

    @classmethod
    def cases(cls) -> list[Case]:
        """Every call that is tried; an error where there would be none."""
        without = cls.exempt()
        found = [c for c in backend_cases(cls.make().dtypes, cls.ops) if c.op.name not in without]
        if not found:
            names = ", ".join(cls.operations())
            raise OperationError(f"nothing to check: no sample of {names} fits backend '{cls.make().name}'")
        return found

    # -- running ------------------------------------------------------------------------------------------------------
    def run(self, graph: Graph, inputs: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, np.ndarray[Any, Any]]:
        """The graph on the backend, and proof that the backend itself ran every operation of it."""
        backend, options = self.make(), self.options()
        lowered = decompose(graph, lambda node: backend.lowers(node, options))
        executable = backend.build(lowered, options)
        ran = set(executable.lowered)
        wanted = {node.op.name for node in executable.graph.nodes}
        assert wanted <= ran, f"the backend did not run {sorted(wanted - ran)} itself"
        arrays = {name: backend.array(a) for name, a in inputs.items()}
        with ForbiddenReference():
            results = executable({}, arrays)
        out = {}
        for name, value in results.items():
            assert backend.is_array(value), f"'{name}' is a {type(value).__name__}, no array of the backend"
            out[name] = backend.to_numpy(value)
        return out

    def expected(self, graph: Graph, inputs: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, np.ndarray[Any, Any]]:
        """What the references say."""
        return evaluate(graph, inputs)

    def unsure(self, graph: Graph, inputs: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, float]:
        """How much each output moves when the last digits of all inputs do: no two orders of adding agree to more."""
        rng = np.random.default_rng(0)
        near = {n: x * rng.uniform(1 - 4e-6, 1 + 4e-6, x.shape).astype(x.dtype) for n, x in inputs.items()}
        expected, moved = self.expected(graph, inputs), self.expected(graph, near)
        return {n: float(np.max(np.abs(moved[n] - x), initial=0.0)) for n, x in expected.items()}

    def compare(
        self,
        graph: Graph,
        inputs: Mapping[str, np.ndarray[Any, Any]],
        factor: float,
        unsure: Mapping[str, float] | None = None,
    ) -> None:
        expected = self.expected(graph, inputs)
        got = self.run(graph, inputs)
        assert list(got) == list(expected), f"outputs {list(got)}, expected {list(expected)}"
        for name, reference in expected.items():
            allowed = tolerance(as_dtype(reference.dtype), factor)
            assert_close(got[name], reference, allowed, f"output '{name}'", (unsure or {}).get(name, 0.0))

    def check(self, names: list[str], what: Callable[[], None], ops: Collection[str] = ()) -> None:
        """Run one check that may be listed in ``xfail`` under some names, and count the operations it was about."""
        xfail.run(names, self.xfail, what)
        record(type(self), ops)

    # -- the tests ----------------------------------------------------------------------------------------------------
    def test_forward(self, case: Case) -> None:
        """Value, shape and dtype of every sample in every dtype."""
        self.check(case.names(), lambda: self.compare(case.graph(), case.inputs(), _factor(case)), [case.op.name])

    @pytest.mark.parametrize("seed", range(24))
    def test_random_graphs(self, seed: int) -> None:
        """Operations after one another in any order, and the gradients through them."""
        if self.ops is not None:
            pytest.skip("some operations only")

        def what() -> None:
            graph = random_graph(seed, sizes=WIDE if seed % 3 == 0 else SMALL)
            arguments = random_arguments(graph, seed)
            self.compare(graph, arguments, 64.0, self.unsure(graph, arguments))
            wanted = [i.name for i in graph.arguments]
            backward = gradients(graph, None, wanted)
            cotangents = {
                i.name: _cotangent(i.name, i.type.shape, i.type.dtype)
                for i in backward.arguments
                if i.name not in arguments
            }
            given = {**arguments, **cotangents}
            self.compare(backward, given, 256.0, self.unsure(backward, given))

        self.check([f"random:{seed}"], what)

    def test_gradient(self, case: Case) -> None:
        """The gradient program gives the same on the backend as by the references."""

        def what() -> None:
            graph = case.graph()
            of = [n for n, v in zip(graph.output_names, graph.outputs, strict=True) if v.dtype.is_float]
            wrt = [i.name for i in graph.inputs if i.type.dtype.is_float]
            backward = gradients(graph, of, wrt)
            inputs = dict(case.inputs())
            for i in backward.inputs:
                if i.name not in inputs and i.role == "input":
                    inputs[i.name] = _cotangent(i.name, i.type.shape, i.type.dtype)
            self.compare(backward, inputs, 4 * _factor(case))

        self.check(["gradient:" + n for n in case.names()], what)

    test_gradient.wants = lambda case: (  # type: ignore[attr-defined]
        case.sample.gradient and _differentiable(case) and (case.dtype is None or case.dtype in (float16, bfloat16))
    )

    def test_symbolic(self, case: Case) -> None:
        """A symbolic leading size: one program for several sizes."""

        def what() -> None:
            graph = symbolic_graph(case)
            assert graph is not None
            if not self.make().symbolic:
                with pytest.raises(MithrilError):
                    self.run(graph, case.inputs())
                return
            self.compare(graph, case.inputs(), _factor(case))
            other = _resized(graph, case)
            if other is not None:
                self.compare(graph, other, _factor(case))

        self.check(["symbolic:" + n for n in case.names()], what)

    test_symbolic.wants = lambda case: case.dtype is None and symbolic_graph(case) is not None  # type: ignore[attr-defined]

    def test_special_values(self, elementwise: Op) -> None:
        """Signed zeros, infinities, nan and the extremes of every dtype, in all combinations."""

        def what() -> None:
            for kind in (float32, int32):
                if kind not in self.make().dtypes:
                    continue
                graph = _elementwise_graph(elementwise, kind)
                if graph is None:
                    continue
                grids = every_pair(special_array(kind), _count(elementwise, kind))
                inputs, k = {}, 0
                for i in graph.inputs:
                    if i.type.dtype is kind:
                        inputs[i.name] = grids[k]
                        k += 1
                    else:
                        inputs[i.name] = np.resize(special_array(i.type.dtype), grids[0].shape)
                self.compare(graph, inputs, elementwise.tolerance)

        self.check([f"special:{elementwise.name}"], what)

    def test_broadcast_and_strides(self, elementwise: Op) -> None:
        """Broadcasting operands, transposed views, and arrays without elements."""

        def what() -> None:
            kind = _accepted_kind(elementwise)
            spec = (
                elementwise.samples[0].operands[0] if elementwise.samples and elementwise.samples[0].operands else None
            )
            low, high = (spec.low, spec.high) if spec is not None else (-2.0, 2.0)
            from mithril.ir.samples import Arr

            for shapes in (((3, 1, 2), (4, 1)), ((2, 0, 3), (1, 3))):
                graph = _elementwise_graph(elementwise, kind, shapes)
                if graph is None:
                    return
                inputs = {}
                for k, i in enumerate(graph.inputs):
                    shape = tuple(int(d) for d in i.type.shape)
                    made = make_array(Arr(shape[::-1], i.type.dtype.name, low, high), f"{elementwise.name}/{k}")
                    inputs[i.name] = made.T  # a view with strides that run backwards
                self.compare(graph, inputs, elementwise.tolerance)

        self.check([f"broadcast:{elementwise.name}"], what)

    def test_same_source_twice(self, case: Case) -> None:
        """Compiling is deterministic."""
        backend, options = self.make(), self.options()
        graph = decompose(case.graph(), lambda node: backend.lowers(node, options))
        first, second = backend.build(graph, options), backend.build(graph, options)
        assert first.source == second.source
        assert not _of_mithril(first.source), "generated code stands alone"

    test_same_source_twice.wants = lambda case: case.number == 0 and case.dtype is None  # type: ignore[attr-defined]

    def test_unsupported_dtype_is_refused(self) -> None:
        """A dtype the backend lacks is a mithril error, not a crash or a silent other dtype."""
        backend = self.make()
        for kind in (float16, bfloat16, as_dtype("float64"), as_dtype("int64")):
            if kind not in backend.dtypes:
                builder = Builder()
                with builder:
                    x = builder.input("x", (2,), kind)
                    y = x + x
                with pytest.raises(MithrilError):
                    self.run(builder.build({"y": y}), {"x": np.zeros(2, kind.numpy)})

    def test_inputs_are_left_alone(self) -> None:
        """No program writes into what it was given."""
        builder = Builder()
        with builder:
            x, w = builder.input("x", (4, 4)), builder.input("w", (4, 4))
            y = operations()["exp"](x + w) * x
        kept = {"x": np.full((4, 4), 0.5, np.float32), "w": np.full((4, 4), 0.25, np.float32)}
        given = {n: a.copy() for n, a in kept.items()}
        self.run(builder.build({"y": y, "again": x}), given)
        for name, array in kept.items():
            assert (given[name] == array).all(), f"input '{name}' was written to"

    def test_nothing_is_written_over(self, case: Case) -> None:
        """What goes on with results that may be an operand itself leaves that alone: all samples of an operation."""

        def what() -> None:
            cases = [c for c in backend_cases(self.make().dtypes, [case.op.name]) if c.dtype is None]
            given = {f"c{c.number}/{n}": a.copy() for c in cases for n, a in c.inputs().items()}
            kept = {n: a.copy() for n, a in given.items()}
            self.run(_gone_on(cases), given)
            for name, array in kept.items():
                assert given[name].tobytes() == array.tobytes(), f"input '{name}' was written to"

        self.check([case.op.name, f"written:{case.op.name}"], what)

    test_nothing_is_written_over.wants = lambda case: case.number == 0 and case.dtype is None  # type: ignore[attr-defined]

    def test_array_helpers(self) -> None:
        """``array zeros ones full arange randn to_numpy is_array`` do what they say."""
        b = self.make()
        for made, expected in (
            (b.zeros((2, 3)), np.zeros((2, 3))),
            (b.ones((2,)), np.ones((2,))),
            (b.full((2, 2), 1.5), np.full((2, 2), 1.5)),
            (b.arange(4), np.arange(4)),
            (b.array([[1.0, 2.0]]), np.array([[1.0, 2.0]])),
        ):
            assert b.is_array(made)
            np.testing.assert_array_equal(b.to_numpy(made), expected)
        b.set_seed(7)
        first = b.to_numpy(b.randn((64,)))
        b.set_seed(7)
        np.testing.assert_array_equal(first, b.to_numpy(b.randn((64,))))
        assert abs(float(first.astype(np.float64).mean())) < 1

    def test_entry_module_is_light(self) -> None:
        """Importing the plugin's entry module imports no framework."""
        backend = self.make()
        module, heavy = _entry_module(backend.name, self.distribution)
        code = f"import sys, {module}; print([m for m in {heavy!r} if m in sys.modules])"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() == "[]", f"importing {module} imports {done.stdout.strip()}"


class ForbiddenReference:
    """While active, evaluating an operation by its reference raises: a backend that falls back is found out."""

    def __enter__(self) -> None:
        self.before = Op.evaluate

        def refuse(op: Op, *_: Any, **__: Any) -> Any:
            raise AssertionError(f"the backend ran the reference of '{op.name}' instead of its own lowering")

        Op.evaluate = refuse  # type: ignore[method-assign, assignment]

    def __exit__(self, *exc: object) -> None:
        Op.evaluate = self.before  # type: ignore[method-assign]


def _factor(case: Case) -> float:
    return case.op.tolerance


def _differentiable(case: Case) -> bool:
    if case.op.gradient is None and not case.op.composite:
        return False
    if not any(a is not None and as_dtype(a.dtype).is_float for a in case.arrays):
        return False
    graph = case.graph()
    return any(v.dtype.is_float for v in graph.outputs)


def _gone_on(cases: list[Case]) -> Graph:
    """All cases in one graph, with an element-wise operation that reads each result for the last time."""
    builder = Builder(cases[0].op.name.replace(".", "_"))
    with builder:
        made = {}
        for case in cases:
            graph = case.graph()
            given = [builder.input(f"c{case.number}/{i.name}", i.type.shape, i.type.dtype) for i in graph.arguments]
            results = builder.inline(graph, given)
            made.update({f"c{case.number}/y{k}": _turned(v) for k, v in enumerate(results)})
    return builder.build(made)


def _turned(x: Value) -> Any:
    ops = operations()
    return ops["logical_not"](x) if x.dtype.is_bool else ops["neg"](x) if x.dtype.is_float else x * 3


def _of_mithril(source: str | None) -> list[str]:
    """The lines of generated Python that import parts of mithril."""
    lines = (source or "").splitlines()
    return [n for n in lines if n.lstrip().startswith(("import mithril", "from mithril"))]


def _cotangent(name: str, shape: Any, dtype: DType) -> np.ndarray[Any, Any]:
    from mithril.ir.samples import Arr

    return make_array(Arr(shape, dtype.name, 0.5, 1.5), name)


def _resized(graph: Graph, case: Case) -> dict[str, np.ndarray[Any, Any]] | None:
    """Other inputs whose symbolic size is one larger, where the sample's values are random."""
    from dataclasses import replace

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
    try:
        for guard in graph.guards:
            guard.check({"N": sizes.pop()}, {})
        return inputs
    except (MithrilError, KeyError):
        return None


def _count(op: Op, kind: DType) -> int:
    graph = _elementwise_graph(op, kind)
    assert graph is not None
    return sum(i.type.dtype is kind for i in graph.inputs)


def _elementwise_graph(op: Op, kind: DType, shapes: Any = None) -> Graph | None:
    """The operation on operands of a dtype; None where it does not take that dtype."""
    builder = Builder(op.name)
    try:
        with builder:
            operands = []
            for k, name in enumerate(op.operands):
                dtype = as_dtype("bool") if name == "condition" else kind
                shape = (Dim("N"),) if shapes is None else shapes[k % len(shapes)]
                operands.append(builder.input(f"x{k}", shape, dtype))
            first = op.samples[0].attributes if op.samples else {}
            made = op(*operands, **first)
    except MithrilError:
        return None
    if any(node.op.name == "cast" and node.op is not op for node in builder.nodes):
        return None  # it takes another dtype and casts
    return builder.build({"y": made})


def _accepted_kind(op: Op) -> DType:
    for kind in (float32, int32):
        if _elementwise_graph(op, kind) is not None:
            return kind
    return as_dtype("bool")


def _entry_module(name: str, distribution: str) -> tuple[str, tuple[str, ...]]:
    """The plugin module that brings the backend, and what it must not import."""
    found = plugins.backend(name)
    module = found.plugin.module
    return module, tuple(m for m in found.spec.requires if m != "numpy")
