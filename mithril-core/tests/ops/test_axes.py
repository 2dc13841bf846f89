"""Axes: the notation, that every declaration is complete and true, and that a false one is noticed."""

from __future__ import annotations

import dataclasses

import pytest

from mithril import ops
from mithril.graph import Builder, axes_of, call_axes
from mithril.graph.axes_notation import parse_axes
from mithril.graph.core import Op
from mithril.graph.declare import op
from mithril.graph.dims import Dim
from mithril.graph.errors import OperationError
from mithril.graph.registry import operations
from mithril_testing.axes import (
    false_axes,
    is_detected,
    missing_axes,
    mutations,
    splits_of,
    too_strict,
    untried_axes,
    with_axes,
)

DECLARED = [o for o in operations().values() if not o.composite or o.declared_axes is not None]
COMPOSITES = [o for o in operations().values() if o.composite and o.declared_axes is None and not o.elementwise]
TEXTS = [(o, text) for o in DECLARED if isinstance(o.declared_axes, str) for text in mutations(o.declared_axes)]


def node(write, *shapes):
    with Builder() as b:
        y = write(*[b.input(f"x{k}", s) for k, s in enumerate(shapes)])
    return b.build({"y": y}).nodes[-1]


@pytest.mark.parametrize("declared", DECLARED, ids=lambda o: o.name)
def test_axes_are_complete_and_true(declared):
    assert not missing_axes(declared)
    assert false_axes(declared) == []
    assert untried_axes(declared) == []
    assert not too_strict(declared)


def test_the_registry_is_checked_thoroughly():
    claimed = [s for o in DECLARED for s in splits_of(o) if s.claimed]
    assert len(claimed) >= 440


@pytest.mark.parametrize(("declared", "text"), TEXTS, ids=[f"{o.name}: {text}" for o, text in TEXTS])
def test_false_axes_are_noticed(declared, text):
    assert is_detected(declared, text)


def test_there_are_as_many_mutations_as_there_were():
    assert len(TEXTS) >= 141


# -- composites -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("composite", COMPOSITES, ids=lambda o: o.name)
def test_axes_that_follow_from_a_body_are_true(composite):
    assert false_axes(composite) == []


def test_bodies_tell_most_axes():
    assert len([s for o in COMPOSITES for s in splits_of(o) if s.claimed]) >= 178


def test_axes_of_attention():
    """Examples, heads that share keys, queries and columns of the values can be split."""
    axes = axes_of(node(ops.attention, (2, 4, 6, 8), (2, 2, 5, 8), (2, 2, 5, 10)))
    split = {(k, axis) for k, fs in enumerate(axes.operands[:3]) for axis in range(4) if _split(axes, fs[axis])}
    assert split == {(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1), (2, 3)}
    heads = axes.operands[0][1][0]
    assert axes.sizes[heads] == 2
    assert axes.operands[1][1] == (heads,)


def _split(axes, factors):
    return any(f in axes.parallel for f in factors)


def test_shapes_that_fit_do_not_suffice():
    """Half of the channels with as many groups has the right shape and the wrong numbers."""
    axes = axes_of(node(lambda x: ops.group_norm(x, groups=2), (2, 8, 3)))
    assert axes.operands[0][0][0] in axes.parallel
    assert not _split(axes, axes.operands[0][1])


def test_a_bias_has_no_contracted_axis():
    axes = axes_of(node(ops.linear, (4, 6), (8, 6), (8,)))
    assert not _split(axes, axes.operands[0][1])
    assert axes.operands[1][0] == axes.operands[2][0] == axes.results[0][1]


# -- the notation -------------------------------------------------------------------------------------------------
def test_a_product_of_matrices():
    axes = axes_of(node(ops.matmul, (7, 1, 3, 4), (5, 4, 2)))
    assert axes.operands == ((("...1",), (), ("m",), ("k",)), (("...0",), ("k",), ("n",)))
    assert axes.results == ((("...1",), ("...0",), ("m",), ("n",)),)
    assert axes.sizes == {"...1": 7, "...0": 5, "m": 3, "k": 4, "n": 2}
    assert axes.reduced == ("k",)
    assert axes.is_product
    assert axes.reads_rows(1) is None


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [(((4,), (4, 5)), "n"), (((3, 4), (4,)), "m"), (((2, 3, 4), (4,)), "...0 m"), (((4,), (4,)), "")],
)
def test_products_of_vectors_lack_rows_or_columns(shapes, expected):
    axes = axes_of(node(ops.matmul, *shapes))
    assert " ".join(f[0] for f in axes.results[0]) == expected


def test_groups_are_a_factor_of_channels():
    axes = axes_of(node(lambda x, w: ops.conv(x, w, groups=2), (2, 4, 7), (6, 2, 3)))
    assert axes.operands[0] == (("n",), ("g", "c"), ("h0",))
    assert axes.cut({"g": 1}) == {"groups": 1}
    assert axes.is_product
    assert axes.role("h0").kind == "window"


def test_layouts_and_views():
    transposed = axes_of(node(lambda x: ops.transpose(x, perm=(1, 0, 2)), (2, 3, 4)))
    assert (transposed.is_layout, transposed.is_view) == (True, False)
    unmoved = axes_of(node(lambda x: ops.transpose(x, perm=(1, 0, 2)), (1, 3, 4)))
    assert (unmoved.is_layout, unmoved.is_view) == (True, True)
    for write, view in ((lambda x: ops.reshape(x, shape=(8, 3)), True), (lambda x: ops.flip(x, axis=0), False)):
        axes = axes_of(node(write, (2, 3, 4)))
        assert (axes.is_layout, axes.is_view) == (view, view)
    assert not axes_of(node(lambda x: x + 1.0, (2, 3))).is_layout


def test_a_reshape_has_the_common_factors_of_its_shapes():
    B = Dim("B", 1, 64)
    axes = axes_of(node(lambda x: ops.reshape(x, shape=(B, 3, 2, 4)), (B, 3, 8)))
    assert axes.operands[0] == (("f0",), ("f1",), ("f2", "f3"))
    assert axes.results[0] == (("f0",), ("f1",), ("f2",), ("f3",))
    merged = axes_of(node(lambda x: ops.reshape(x, shape=(3, 4)), (2, 6)))
    assert merged.parallel == ()


def test_look_ups_and_rows():
    axes = axes_of(node(lambda x, i: ops.take(x, ops.cast(i, dtype="int32"), axis=0), (5, 3), (4,)))
    assert axes.lookups == ((1, 0, 0),)
    assert axes.reads_rows(0) == "rows"
    assert axes_of(node(ops.matmul, (3, 4), (4, 5))).reads_rows(1) == "columns"
    assert node(lambda a, b: ops.einsum(a, b, equation="ik,jk->ij"), (3, 4), (5, 4)).op.name == "einsum"
    dot = axes_of(node(lambda a, b: ops.dot(a, b, contract_a=(1,), contract_b=(1,)), (3, 4), (5, 4)))
    assert (dot.reads_rows(0), dot.reads_rows(1)) == ("rows", "rows")


def test_sizes_that_a_guard_equates_are_one_factor():
    B = Dim("B", 1, 64)
    axes = axes_of(node(lambda x, y: x + y, (B, 2), (3, 2)))
    assert axes.parallel == ("...0",)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("m k, k n", "it has no '->'"),
        ("m k, k n -> m n", "factor 'k' is in no result and has no role"),
        ("m k -> m | k added", "'k added' is not a clause"),
        ("m k -> m | j sum", "no operand or result has the factor 'j'"),
        ("m (k) -> m k", "'(k)' is not a product"),
        ("m k! -> m", "'k!' is not an axis"),
        ("t, k -> k | t index", "does not name its operand"),
    ],
)
def test_mistakes_in_a_declaration_are_errors(text, reason):
    with pytest.raises(OperationError, match=reason.replace("(", r"\(").replace(")", r"\)").replace("?", r"\?")):
        parse_axes(text)


def test_a_declaration_names_attributes_and_operands_that_exist():
    declare = op(shape=lambda x: x, dtype=lambda d, _: d[0], axes="*x -> *x | x[axes] whole", name="tests.misnamed")

    def misnamed(x, *, axis: Axes):  # noqa: F821
        """Have an attribute of another name."""

    with pytest.raises(OperationError, match="name 'axes', which is not an attribute or operand"):
        declare(misnamed)


def test_wrong_axes_are_reported_with_the_sample_and_the_factor():
    lying = with_axes(operations()["matmul"], "... m? k, ... k n? -> ... m? n? | k max")
    assert "matmul[0]: factor 'k' (max): parts give something else" in false_axes(lying)


def test_a_primitive_without_axes_is_whole():
    silent = Op(**{**vars_of(operations()["tanh"]), "name": "tests.silent", "elementwise": False})
    value = node(ops.tanh, (2, 3))
    axes = call_axes(silent, [value.operands[0].type], {})
    assert axes.parallel == ()
    assert missing_axes(silent).startswith("'tests.silent' has neither axes nor a reason")


def vars_of(declared):
    return {field.name: getattr(declared, field.name) for field in dataclasses.fields(declared)}
