"""Conformance of passes and rewrite rules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest

from mithril.compiler import installed
from mithril.graph import (
    Graph,
    MithrilError,
    PassError,
    RewriteError,
    TensorType,
    dtype as as_dtype,
    evaluate,
    parse,
    structurally_equal,
    verify,
)
from mithril.passes import Pass, PassContext, PassManager, as_pass, random_arguments
from mithril_testing import xfail
from mithril_testing.compare import assert_close, tolerance
from mithril_testing.rewritten_gradients import are_equal, assert_equal_gradients, largest_value, zero_elsewhere
from mithril_testing.sample_arrays import special_array
from mithril_testing.sample_graphs import operation_graphs, sample_graphs


class PassConformance:
    """Inherit and set ``pass_`` to a function, a pass object or the name of an installed pass.

    ``graphs`` adds graphs by name, on which the pass should do something. Checked on these and on the kit's own, which
    hold every operation with its gradient, control flow, symbolic sizes, constants and randomness: that results stay
    the same (bit for bit if the pass says that it is exact) for random arguments and for special values, that gradients
    stay the same (``context.gradients_follow`` is True where they are derived later), that the graph given is not
    touched, that the pass is deterministic, its result can be printed and parsed, and repeated runs end.
    A pass that changes none of the graphs has not been checked, and fails. Not checked: that the result is faster or
    smaller, and options of the pass other than those it has.

    ``context`` is that of the pass, such as ``PassContext(backend=...)`` for one that asks what a backend prefers.
    ``xfail`` maps the name of a graph to why a check of it fails.
    """

    pass_: ClassVar[Any] = None
    graphs: ClassVar[Mapping[str, Graph]] = {}
    context: ClassVar[PassContext | None] = None
    xfail: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def instance(cls) -> Pass:
        value = cls.__dict__.get("pass_", cls.pass_)
        value = value.__func__ if isinstance(value, staticmethod) else value
        if value is None:
            raise PassError(f"{cls.__name__} sets no pass", hint="pass_ = a function, a pass object or a pass's name")
        return installed(value) if isinstance(value, str) else as_pass(value)

    @classmethod
    def all_graphs(cls) -> dict[str, Graph]:
        """Return the kit's graphs and those of the class, by name."""
        if cls not in cls._graphs:
            cls._graphs[cls] = {**dict(sample_graphs()), **operation_graphs(), **cls.graphs}
        return cls._graphs[cls]

    _graphs: ClassVar[dict[type, dict[str, Graph]]] = {}

    def pytest_generate_tests(self, metafunc: Any) -> None:
        if "graph" in metafunc.fixturenames:
            try:
                self.instance()
            except MithrilError as error:
                raise pytest.Collector.CollectError(str(error)) from error
            cls = metafunc.cls
            every = metafunc.function.__name__ in ("test_keeps_the_meaning", "test_keeps_gradients")
            rows = cls.all_graphs() if every else {**dict(sample_graphs()), **cls.graphs}
            metafunc.parametrize("graph", list(rows.values()), ids=list(rows))

    def run(self, graph: Graph) -> Graph:
        """Return the graph after the pass; verified, its interface held."""
        return PassManager([self.instance()]).run(graph, self.context)[0]

    def after(self, graph: Graph) -> Graph:
        """Return the graph after the pass, which is run once for each class."""
        key = (type(self), id(graph))
        if key not in self._after:
            self._after[key] = (graph, self.run(graph))
        return self._after[key][1]

    _after: ClassVar[dict[tuple[type, int], tuple[Graph, Graph]]] = {}

    def check(self, graph: Graph, action: Any) -> None:
        xfail.run([graph.name], self.xfail, action)

    def test_changes_something(self) -> None:
        """Require that the pass changes one of the graphs: else all other tests checked nothing."""
        graphs = self.all_graphs()
        if all(self.after(graph) is graph for graph in graphs.values()):
            pytest.fail(f"the pass changed none of {len(graphs)} graphs: add one that it changes (graphs = {{...}})")

    def test_keeps_the_meaning(self, graph: Graph) -> None:
        """Same results: bit for bit where the pass says it is exact."""

        def action() -> None:
            after = self.after(graph)
            if after is graph:
                return
            exact, arguments = self.instance().exact, random_arguments(graph)
            trials = [arguments, {n: _special(a) for n, a in arguments.items()}] if exact else [arguments]
            for values in trials:
                expected, actual = evaluate(graph, values), evaluate(after, values)
                for name, array in expected.items():
                    if exact:
                        assert same_bits(actual[name], array), f"output '{name}' is not equal bit for bit"
                    else:
                        assert_close(actual[name], array, tolerance(as_dtype(array.dtype), 16.0), f"output '{name}'")

        self.check(graph, action)

    def test_keeps_gradients(self, graph: Graph) -> None:
        """Same gradients where they are derived after the pass, at kinks and ties as well."""

        def action() -> None:
            context = replace(self.context or PassContext(), gradients_follow=True)
            after = PassManager([self.instance()]).run(graph, context)[0]
            if after is not graph:
                assert_equal_gradients(graph, after, pairs_of_kinks=1)

        self.check(graph, action)

    def test_does_not_modify_its_input(self, graph: Graph) -> None:
        before = str(graph)
        self.run(graph)
        assert str(graph) == before

    def test_gives_the_same_graph_twice(self, graph: Graph) -> None:
        assert str(self.run(graph)) == str(self.run(graph))

    def test_result_can_be_printed_and_read_back(self, graph: Graph) -> None:
        result = self.run(graph)
        assert structurally_equal(parse(str(result)), result)

    def test_reaches_a_fixed_point(self, graph: Graph) -> None:
        """Repeated runs reach a fixed point after a few runs, and then return the same object."""
        current = graph
        for _ in range(5):
            following = self.run(current)
            if following is current:
                return
            current = following
        pytest.fail("the pass still changes the graph after five runs")


class RuleConformance:
    """Inherit, set ``rule`` and ``types`` (operand types the pattern is tried with: ``[("float32", (2, 3)), ...]``).

    Both sides are evaluated on random values, and on all combinations of special values: signed zeros, infinities, nan,
    extremes, denormal numbers. An exact rule must agree bit for bit; an approximate one within the tolerance wherever
    both sides are finite. Gradients of both sides must agree at kinks and ties as well; ``gradients = False`` is for a
    rule that a pass applies only if ``context.gradients_follow`` is False. Not checked: where the rule matches, and its
    condition.
    """

    rule: ClassVar[Any] = None
    gradients: ClassVar[bool] = True
    types: ClassVar[Sequence[tuple[str, tuple[int, ...]]]] = ()

    @classmethod
    def instance(cls) -> Any:
        """Return the rule."""
        rule = cls.__dict__.get("rule", cls.rule)
        if rule is None:
            raise RewriteError(f"{cls.__name__} sets no rule", hint="rule = rule(before, after, exact=True)")
        return rule

    def sides(self) -> tuple[Graph, Graph]:
        operands, types = self.instance().pattern.variables, self.types
        if len(types) != len(operands):
            raise RewriteError(
                f"{type(self).__name__} gives {len(types)} types for {len(operands)} operands: {', '.join(operands)}",
                hint='types = [("float32", (2, 3)), ...], one for each operand',
            )
        return self.instance().both_graphs([TensorType(as_dtype(d), s) for d, s in types])  # type: ignore[no-any-return]

    def test_both_sides_fit(self) -> None:
        before, after = self.sides()
        verify(before)
        verify(after)
        assert [v.type for v in before.outputs] == [v.type for v in after.outputs]

    def test_both_sides_agree_on_random_values(self) -> None:
        before, after = self.sides()
        arguments = random_arguments(before)
        self.compare(evaluate(before, arguments), evaluate(after, arguments))

    def test_both_sides_agree_on_special_values(self) -> None:
        """Try all combinations of special values; an approximate rule may differ where results are not finite."""
        before, after = self.sides()
        for arguments in combinations(before):
            expected, actual = evaluate(before, arguments), evaluate(after, arguments)
            if self.instance().exact:
                self.compare(expected, actual)
            else:
                for (name, array), other in zip(expected.items(), actual.values(), strict=True):
                    if are_equal(array, other):
                        continue
                    ordinary = np.isfinite(array) & np.isfinite(other) & (np.abs(array) < 1e30)
                    allowed = tolerance(as_dtype(array.dtype), 64.0)
                    rounding = tolerance(as_dtype(array.dtype)).relative * largest_value(before, arguments)
                    operands = zero_elsewhere(ordinary, other), zero_elsewhere(ordinary, array)
                    assert_close(*operands, allowed, name, unsure=rounding)

    def test_both_sides_have_equal_gradients(self) -> None:
        if self.gradients:
            assert_equal_gradients(*self.sides())

    def compare(self, expected: Mapping[str, Any], actual: Mapping[str, Any]) -> None:
        for (name, array), other in zip(expected.items(), actual.values(), strict=True):
            if self.instance().exact:
                assert same_bits(other, array), f"{name}: {array} and {other} are not equal bit for bit"
            else:
                assert_close(other, array, tolerance(as_dtype(array.dtype), 16.0), name)


def same_bits(a: Any, b: Any) -> bool:
    """Whether two arrays are equal bit for bit; any nan equals any other."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if not as_dtype(a.dtype).is_float:
        return bool((a == b).all())
    raw = [np.array(x).view(f"u{x.dtype.itemsize}") for x in (a, b)]
    return bool(((raw[0] == raw[1]) | (np.isnan(a) & np.isnan(b))).all())


def _special(array: Any) -> Any:
    """Return an array of the shape, filled with special values of the dtype; integers stay, they may be positions."""
    kind = as_dtype(array.dtype)
    return np.resize(special_array(kind, denormals=True), array.shape) if kind.is_float else array


def combinations(graph: Graph) -> Iterator[dict[str, Any]]:
    """Yield arguments until every element-wise combination of two operands' special values has occurred.

    The first operands run through their values the fastest; the arrays are as large as the graph says, and where they
    reduce or multiply, elements of one array are combined in rolled orders.
    """
    values = {i.name: special_array(i.type.dtype, denormals=True) for i in graph.arguments}
    shapes = {i.name: tuple(int(n) for n in i.type.shape) for i in graph.arguments}
    largest = max(map(len, values.values()), default=1)
    for shift in range(largest):
        arguments = {}
        for k, (name, array) in enumerate(values.items()):
            start = shift * k  # against the first operand, the second is rolled by 0, 1, 2, ...
            count = int(np.prod(shapes[name]))
            arguments[name] = (np.roll(array, -start), count)
        for block in range(0, largest, max(1, min((c for _, c in arguments.values()), default=1))):
            yield {
                name: np.take(array, np.arange(block, block + count), mode="wrap").reshape(shapes[name])
                for name, (array, count) in arguments.items()
            }
