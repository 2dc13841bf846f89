"""Conformance of passes and rewrite rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest

from mithril.base.dtypes import dtype as as_dtype
from mithril.base.tensor_type import TensorType
from mithril.compiler.pass_pipeline import installed
from mithril.ir import Graph, parse, same, verify
from mithril.ir.evaluate import evaluate
from mithril.passes.manager import Pass, PassManager, as_pass, random_arguments
from mithril_testing import xfail
from mithril_testing.compare import assert_close, tolerance
from mithril_testing.sample_arrays import special_array
from mithril_testing.sample_graphs import sample_graphs


class PassConformance:
    """Inherit and set ``pass_`` to a function, a pass object or the name of an installed pass.

    ``graphs`` adds graphs of your own, by name, on which the pass should do something.
    """

    pass_: ClassVar[Any] = None
    graphs: ClassVar[Mapping[str, Graph]] = {}
    xfail: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def made(cls) -> Pass:
        chosen = cls.__dict__.get("pass_", cls.pass_)
        chosen = chosen.__func__ if isinstance(chosen, staticmethod) else chosen
        return installed(chosen) if isinstance(chosen, str) else as_pass(chosen)

    def pytest_generate_tests(self, metafunc: Any) -> None:
        if "graph" in metafunc.fixturenames:
            rows = [*sample_graphs(), *metafunc.cls.graphs.items()]
            metafunc.parametrize("graph", [g for _, g in rows], ids=[n for n, _ in rows])

    def run(self, graph: Graph) -> Graph:
        """The graph after the pass; verified, its interface held."""
        return PassManager([self.made()]).run(graph)[0]

    def check(self, graph: Graph, what: Any) -> None:
        xfail.run([graph.name], self.xfail, what)

    def test_keeps_the_meaning(self, graph: Graph) -> None:
        """Same results: bit for bit where the pass says it is exact."""

        def what() -> None:
            made = self.run(graph)
            arguments = random_arguments(graph)
            expected, got = evaluate(graph, arguments), evaluate(made, arguments)
            for name, array in expected.items():
                if self.made().exact:
                    np.testing.assert_array_equal(got[name], array, err_msg=name)
                else:
                    assert_close(got[name], array, tolerance(as_dtype(array.dtype), 16.0), f"output '{name}'")

        self.check(graph, what)

    def test_does_not_touch_what_it_was_given(self, graph: Graph) -> None:
        before = str(graph)
        self.run(graph)
        assert str(graph) == before

    def test_gives_the_same_graph_twice(self, graph: Graph) -> None:
        assert str(self.run(graph)) == str(self.run(graph))

    def test_result_can_be_printed_and_read_back(self, graph: Graph) -> None:
        made = self.run(graph)
        assert same(parse(str(made)), made)

    def test_comes_to_rest(self, graph: Graph) -> None:
        """Run on its own result it changes nothing, after a few runs at most; then it gives the same object."""
        current = graph
        for _ in range(5):
            following = self.run(current)
            if following is current:
                return
            current = following
        pytest.fail("the pass still changes the graph after five runs")


class RuleConformance:
    """Inherit, set ``rule`` and ``types`` (operand types the pattern is tried with: ``[("float32", (2, 3)), ...]``)."""

    rule: ClassVar[Any] = None
    types: ClassVar[Sequence[tuple[str, tuple[int, ...]]]] = ()

    def sides(self) -> tuple[Graph, Graph]:
        chosen = type(self).__dict__.get("rule", self.rule)
        return chosen.sides([TensorType(as_dtype(d), s) for d, s in self.types])  # type: ignore[no-any-return]

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
        """Signed zeros, infinities, nan, extremes; an approximate rule may differ where the results are not finite."""
        before, after = self.sides()
        arguments = random_arguments(before)
        for seed in range(8):
            rng = np.random.default_rng(seed)
            for i in before.arguments:
                values = special_array(i.type.dtype)
                arguments[i.name] = rng.choice(values, i.type.shape).astype(i.type.dtype.numpy)
            expected, got = evaluate(before, arguments), evaluate(after, arguments)
            if self.rule.exact:
                self.compare(expected, got)

    def compare(self, expected: Mapping[str, Any], got: Mapping[str, Any]) -> None:
        for (name, array), other in zip(expected.items(), got.values(), strict=True):
            if self.rule.exact:
                raw = array.view(f"u{array.dtype.itemsize}") if array.dtype.kind == "f" else array
                raw_other = other.view(f"u{other.dtype.itemsize}") if other.dtype.kind == "f" else other
                both_nan = (array != array) & (other != other)
                assert ((raw == raw_other) | both_nan).all(), f"{name}: {array} and {other} are not equal bit for bit"
            else:
                assert_close(other, array, tolerance(as_dtype(array.dtype), 16.0), name)
