"""Conformance of operations: declarations against their own references, gradients against differences."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import pytest

from mithril.derivatives import gradients
from mithril.graph import (
    Dim,
    DType,
    Graph,
    MithrilError,
    Op,
    Output,
    Sample,
    TensorType,
    computing,
    decompose,
    dtype as as_dtype,
    evaluate,
    float64,
    substitute,
)
from mithril_testing import xfail
from mithril_testing.axes import false_axes, missing_axes, too_strict, untried_axes
from mithril_testing.cases import Case, symbolic_graph
from mithril_testing.differences import (
    check_gradients,
    check_no_slope,
    check_second_gradients,
    cotangents,
    float_inputs,
    float_outputs,
)
from mithril_testing.rows import check_rows
from mithril_testing.selection import begin, record, selected
from mithril_testing.traits import false_traits


class OpConformance:
    """Inherit and set ``ops`` to names or to the operations themselves: mithril's own or a third party's.

    Checked on every sample: the shape and dtype rules against the arrays that the reference returns, with symbolic
    sizes as well; that the reference leaves its operands alone; the axes, by splitting each factor in two; the
    operation and its gradient on all rows of a batch at once, against each row alone; the gradient against central
    differences in float64, and the gradient of the gradient; a composite's own ``vjp`` against the gradient derived
    from its body (except a ``surrogate_vjp``, which is meant to differ); and that results do not move where ``no_vjp``
    says that there is no
    gradient. Every operation must have a sample, and one on which its gradient is checked if it has one. The
    operations' values are their references, which nothing here can check: test those yourself. How a backend runs them,
    ``BackendConformance`` checks.

    ``xfail`` maps the id of a case (``softmax[1]``, ``gradient:softmax``, ``types:softmax``) to why it fails.
    """

    ops: ClassVar[Collection[str | Op] | None] = None
    xfail: ClassVar[Mapping[str, str]] = {}

    def pytest_generate_tests(self, metafunc: Any) -> None:
        cls = metafunc.cls
        try:
            ops = {n: o for n, o in selected(cls.ops).items() if not takes_regions(o)}
        except MithrilError as error:
            raise pytest.Collector.CollectError(str(error)) from error
        begin(cls, ops, metafunc.config)
        if "sample" in metafunc.fixturenames:
            cases = [Case(o, s, k) for o in ops.values() for k, s in enumerate(o.samples)]
            metafunc.parametrize("sample", cases, ids=[c.id for c in cases])
        if "op" in metafunc.fixturenames:
            metafunc.parametrize("op", list(ops.values()), ids=list(ops))

    def check(self, kind: str, case: Case, action: Callable[[], None]) -> None:
        names = case.names()
        xfail.run([*names, *(f"{kind}:{n}" for n in names)], self.xfail, action)
        record(type(self), [case.op.name])

    def test_declaration(self, op: Op) -> None:
        """Require samples, and a gradient that some sample checks or the reason why there is none."""
        assert op.samples, f"operation '{op.name}' has no samples: nothing of it is ever checked"
        cases = [in_float64(Case(op, s, k)) for k, s in enumerate(op.samples)]
        floats = [case for case in cases if case is not None]
        if not floats:
            return
        stated = op.gradient is not None or op.gradient_reason or op.composite
        assert stated, f"operation '{op.name}' has floats on both sides: declare a vjp, or say why not with no_vjp(...)"
        if not op.gradient_reason:
            covered = any(case.sample.gradient for case in floats)
            assert covered, f"no sample of '{op.name}' checks its gradient: give one without gradient=False"

    def test_types(self, sample: Case) -> None:
        """Compare the arrays that the reference returns with the shape and dtype rules."""

        def action() -> None:
            op, (operands, attributes) = sample.op, called(sample)
            before = [a if a is None else a.tobytes() for a in operands]
            types = [None if a is None else TensorType(as_dtype(a.dtype), a.shape) for a in operands]
            expected = op.infer(types, attributes)
            with np.errstate(all="ignore"), computing():
                returned = op.reference(*operands, **attributes)
            results = (returned,) if len(op.results) == 1 else tuple(returned)
            for k, (result, rule) in enumerate(zip(map(np.asarray, results), expected, strict=True)):
                actual = f"{as_dtype(result.dtype).short}{list(result.shape)}"
                assert (result.shape, result.dtype) == (rule.shape, rule.dtype.numpy), (
                    f"the reference of '{op.name}' returns {actual} as result {k}, the rules say {rule}"
                )
            for original, array in zip(before, operands, strict=True):
                assert array is None or array.tobytes() == original, "the reference writes into its operands"
            again = op.canonical(types, op.complete(attributes))
            assert again == attributes, f"attributes have two canonical forms: {attributes} and {again}"

        self.check("types", sample, action)

    def test_symbolic_types(self, sample: Case) -> None:
        """Compare the types for a symbolic leading size, once the size is known, with those for the size itself."""

        def action() -> None:
            graph = symbolic_graph(sample)
            if graph is None:
                return
            sizes = {"N": next(a.shape[0] for a in sample.arrays if a is not None and a.ndim)}
            for open_, fixed in zip(graph.outputs, sample.graph().outputs, strict=True):
                shape = tuple(substitute(d, sizes) if isinstance(d, Dim) else d for d in open_.shape)
                assert (open_.dtype, shape) == (fixed.dtype, fixed.shape), (
                    f"{open_.type} at {sizes} is not {fixed.type}"
                )

        self.check("symbolic", sample, action)

    def test_axes(self, op: Op) -> None:
        """Split every factor of the axes: parts of the operands give parts of the results, joined as the roles say."""
        assert not (reason := missing_axes(op)), reason
        wrong = [*false_axes(op), *untried_axes(op)]
        assert not wrong, "\n".join(wrong)
        if factors := too_strict(op):
            message = f"axes of '{op.name}': all samples split along {', '.join(factors)}, which is declared whole"
            warnings.warn(message, pytest.PytestWarning, stacklevel=1)

    def test_traits(self, op: Op) -> None:
        """Try the traits: linear operands, elements that only move, operands that can be exchanged."""
        wrong = false_traits(op)
        assert not wrong, "\n".join(wrong)

    def test_rows(self, sample: Case) -> None:
        """Compare the operation and its gradient on all rows of a batch at once with one row after the other."""
        self.check("rows", sample, lambda: check_rows(sample))

    def test_gradient(self, sample: Case) -> None:
        """Compare the gradient with differences in float64; where there is none, the results must not move."""

        def action() -> None:
            case = in_float64(sample)
            if case is None:
                return
            if sample.op.gradient_reason:
                check_no_slope(case.graph(), case.inputs(), sample.op.gradient_reason)
            elif sample.sample.gradient and not sample.op.surrogate:
                check_gradients(case.graph(), case.inputs())

        self.check("gradient", sample, action)

    def test_second_gradient(self, sample: Case) -> None:
        """Compare the gradient of the gradient with differences of the gradient."""

        def action() -> None:
            case, op = in_float64(sample), sample.op
            if case is not None and sample.sample.gradient and not op.gradient_reason and not op.surrogate:
                check_second_gradients(case.graph(), case.inputs())

        self.check("second", sample, action)

    def test_gradient_of_the_body(self, sample: Case) -> None:
        """Compare a composite's own gradient with the one derived from its body."""

        def action() -> None:
            case, op = in_float64(sample), sample.op
            if case is None or not op.composite or op.gradient is None or op.surrogate or not sample.sample.gradient:
                return
            graph = case.graph()
            body = decompose(graph, lambda node: node.op is not op)
            arguments = {**case.inputs(), **cotangents(graph, float_outputs(graph))}
            declared, derived = (
                evaluate(gradients(g, float_outputs(graph), float_inputs(graph)), arguments) for g in (graph, body)
            )
            for name, expected in derived.items():
                scale = float(np.max(np.abs(expected), initial=1.0))
                np.testing.assert_allclose(
                    declared[name], expected, 1e-6, 1e-9 * scale, err_msg=f"declared, derived {name}"
                )

        self.check("body", sample, action)


class Float64(Case):
    """A case with each float operand, and each float dtype among the attributes, in float64."""

    @cached_property
    def arrays(self) -> list[np.ndarray[Any, Any] | None]:
        arrays = super().arrays
        return [a.astype(np.float64) if a is not None and as_dtype(a.dtype).is_float else a for a in arrays]


def in_float64(case: Case) -> Case | None:
    """Return the case in float64, or None if no float goes in, none comes out, or the operation takes no float64."""
    complete = case.op.complete(case.sample.attributes)
    dtypes = {n: float64 for n, v in complete.items() if isinstance(v, DType) and v.is_float}
    sample: Sample = replace(case.sample, attributes={**case.sample.attributes, **dtypes})
    widened = Float64(case.op, sample, case.number)
    try:
        graph = widened.graph()
    except MithrilError:
        return None
    return widened if float_inputs(graph) and float_outputs(graph) else None


def called(case: Case) -> tuple[list[Any], dict[str, Any]]:
    """Return operands and attributes as the reference gets them: promoted, completed, in canonical form."""
    graph: Graph = case.graph()
    node = next((n for n in reversed(graph.nodes) if n.op is case.op), None)
    assert node is not None, f"calling '{case.op.name}' does not make a node of it"
    operands = list(dict.fromkeys(v for v in node.operands if v is not None))
    needed = graph.replaced(
        nodes=graph.nodes[: graph.nodes.index(node)],
        results=tuple(Output(v, f"o{k}") for k, v in enumerate(operands)),
    )
    values = dict(zip(needed.outputs, evaluate(needed, case.inputs()).values(), strict=True))
    return [None if v is None else values[v] for v in node.operands], dict(node.attributes)


def takes_regions(op: Op) -> bool:
    """Control flow: operations on graphs, which no sample of arrays can call."""
    return op.infer_rule is not None and not op.samples
