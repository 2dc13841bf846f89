"""Mistakes in declarations: each is reported with the operation and its author's file and line."""

import numpy as np
import pytest

import mithril as ml
from mithril.graph import Builder, registry
from mithril.graph.attribute_types import Axes, Axis, Ints  # without the __future__ import, as a plugin might
from mithril.graph.errors import OperationError


@pytest.fixture(autouse=True)
def forget():
    registered = dict(registry._operations)
    yield
    registry._operations.clear()
    registry._operations.update(registered)


def same(x, **attributes):
    return x


def kind(kinds, attributes):
    return kinds[0]


def declared(shape=same, dtype=kind, results=("result",), canonical=None):
    @ml.op(shape=shape, dtype=dtype, results=results, canonical=canonical)
    def declaring_test(x):
        """Call the reference, for tests."""
        return x

    return declaring_test


def build(op, shape=(2, 3)):
    with Builder("g") as b:
        op(b.input("x", shape, "float32"))


def test_axis_is_checked_without_the_future_import():
    seen = []

    @ml.op(shape=same, dtype=kind)
    def with_axis(x, *, axis: Axis):
        """Records its axis."""
        seen.append(axis)
        return x

    with_axis(np.ones((2, 3)), axis=-1)
    assert seen == [1]
    with pytest.raises(OperationError, match="axis 7 is out of range for rank 2"):
        with_axis(np.ones((2, 3)), axis=7)


def test_optional_axis_is_checked_without_the_future_import():
    @ml.op(shape=same, dtype=kind)
    def with_optional_axis(x, *, axis: Axis | None = None):
        """Does nothing."""
        return x

    assert with_optional_axis.attributes["axis"].annotation == "Axis | None"
    with pytest.raises(OperationError, match="axis 7 is out of range"):
        with_optional_axis(np.ones((2, 3)), axis=7)


@pytest.mark.parametrize("annotation", [Axes, Ints])
def test_anonymous_annotations_are_rejected(annotation):
    def wrong(x, *, axes: annotation):
        """Does nothing."""

    with pytest.raises(OperationError, match="attribute 'axes' is annotated") as caught:
        ml.op(shape=same, dtype=kind)(wrong)
    assert "from __future__ import annotations" in str(caught.value)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"shape": lambda x: "oops"}, "the shape rule of operation 'declaring_test' returned"),
        ({"shape": lambda x: 1 // 0}, "the shape rule of operation 'declaring_test' failed: ZeroDivisionError"),
        ({"shape": lambda x: None}, "the shape rule of operation 'declaring_test' returned"),
        ({"shape": lambda x: (1.5,)}, "the shape rule of operation 'declaring_test' returned"),
        ({"shape": lambda x: (x, x)}, "the shape rule of operation 'declaring_test' returned"),
        ({"shape": lambda x: (x,), "results": ("a", "b")}, "returned 1 shapes and 1 dtypes, expected 2 results"),
        ({"dtype": lambda kinds, attributes: "f32"}, "the dtype rule of operation 'declaring_test' returned 'f32'"),
        ({"dtype": lambda kinds: kinds[0]}, "the dtype rule of operation 'declaring_test' failed: TypeError"),
        ({"canonical": lambda types, attributes: 1 // 0}, "the canonical rule of operation 'declaring_test' failed"),
    ],
)
def test_invalid_rules_name_their_declaration(rules, message):
    with pytest.raises(OperationError) as caught:
        build(declared(**rules))
    assert message in str(caught.value)
    assert f"declared at {__file__}" in str(caught.value)


def test_failing_body_and_gradient_name_their_declaration():
    @ml.composite(name="declaring_body")
    def body(x):
        """Fails."""
        raise KeyError("own")

    with pytest.raises(
        OperationError, match="the body of operation 'declaring_body' failed: KeyError: 'own'"
    ) as caught:
        build(body)
    assert f"declared at {__file__}" in str(caught.value)
    operation = declared()
    operation.vjp(lambda g, y, x: 1 // 0)
    with Builder("g") as b:
        y = operation(b.param("x", (2, 3)))
    with pytest.raises(ml.GradientError, match="the gradient of 'declaring_test' failed: ZeroDivisionError") as caught:
        ml.gradients(b.build({"y": y}), ["y"], ["x"])
    assert f"declared at {__file__}" in str(caught.value)


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        (lambda x: x[:1], "it returns shape [1, 3], expected [2, 3] by its shape rule"),
        (lambda x: 1 // 0, "ZeroDivisionError"),
    ],
)
def test_reference_is_compared_with_the_shape_rule(reference, message):
    def checked_reference(x):
        """Call the reference, for tests."""
        return reference(x)

    op = ml.op(shape=same, dtype=kind)(checked_reference)
    with pytest.raises(OperationError, match="the reference of operation 'checked_reference'") as caught:
        op(np.ones((2, 3)))
    assert message in str(caught.value)
    assert f"declared at {__file__}" in str(caught.value)


def test_a_misspelled_required_attribute_is_named():
    with Builder() as b, pytest.raises(OperationError, match="unknown attribute 'pads' of 'pad'"):
        ml.ops.pad(b.input("x", (2, 3)), pads=[(0, 0), (1, 1)])


def test_an_operation_needs_neither_docstring_nor_annotations_of_numbers():
    @ml.composite(name="tests.swish")
    def swish(x, *, beta=1.0):
        return x * ml.ops.sigmoid(beta * x)

    assert swish.attributes["beta"].annotation == "float"
    assert swish(np.ones(1), beta=0) == 0.5
    assert swish.doc == "Operation 'tests.swish', without a docstring."


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (
            lambda x, beta=2.0: x,
            "operand 'beta' has the default 2.0; it may only be None\nhint: write *, beta=2.0 for an attribute",
        ),
        (lambda x, *, beta: x, "attribute 'beta' needs an annotation\n  known: int, bool,"),
        (lambda x, *, axes=(0, 1): x, "attribute 'axes' needs an annotation\n  known: int, bool,"),
    ],
)
def test_parameters_that_declare_nothing_are_errors(body, words):
    with pytest.raises(OperationError) as caught:
        ml.composite(name="tests.wrong")(body)
    assert f"operation 'tests.wrong': {words}" in str(caught.value)
