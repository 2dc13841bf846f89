"""Printed C has the value of its expression: parentheses are where C would group or round otherwise."""

from __future__ import annotations

import ast
import operator
from types import SimpleNamespace

import pytest
from hypothesis import given, strategies as st

from mithril_cbackend import tir as t
from mithril_cbackend.program.c_printer import Printer
from mithril_cbackend.tir.tvm_api import tirx

SIGNS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
NODES = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}
TREES = st.recursive(
    st.sampled_from("abcd"), lambda inner: st.tuples(st.sampled_from(list(SIGNS)), inner, inner), max_leaves=8
)


def printer():
    return Printer(SimpleNamespace(primfunc=SimpleNamespace(params=[]), read=0, names=set()), 8)


def expression(tree, dtype):
    if isinstance(tree, str):
        return t.Expr(tirx.Var(tree, dtype))
    sign, left, right = tree
    return SIGNS[sign](expression(left, dtype), expression(right, dtype))


def parsed(text):
    """Return the tree of C text; + - * / group in Python as in C."""

    def tree(node):
        if isinstance(node, ast.Name):
            return node.id
        return NODES[type(node.op)], tree(node.left), tree(node.right)

    return tree(ast.parse(text, mode="eval").body)


def left_sums(tree):
    """Return a tree with its sums grouped from the left, which integers may be."""
    if isinstance(tree, str):
        return tree
    sign, left, right = tree[0], left_sums(tree[1]), left_sums(tree[2])
    if sign == "+" and right[0] in ("+", "-"):
        return left_sums((right[0], ("+", left, right[1]), right[2]))
    return sign, left, right


@given(TREES)
def test_sums_and_products_of_floats_keep_their_grouping(tree):
    assert parsed(printer().expr(expression(tree, "float32").node)) == tree


@given(TREES)
def test_only_sums_of_integers_lose_theirs(tree):
    assert left_sums(parsed(printer().expr(expression(tree, "int32").node))) == left_sums(tree)


@pytest.mark.parametrize(
    ("write", "text"),
    [
        (lambda a, b, c: (a < b) & (b < c), "a < b && b < c"),
        (lambda a, b, c: (a < b) | ((b < c) & (a < c)), "a < b || (b < c && a < c)"),
        (lambda a, b, c: ~(a < b), "!(a < b)"),
        (lambda a, b, c: (a + b) >> c, "(a + b) >> c"),
        (lambda a, b, c: a & (b | c), "a & (b | c)"),
        (lambda a, b, c: ~(a + b), "~(a + b)"),
        (lambda a, b, c: a << b, "(int32_t)((uint32_t)a << b)"),
        (lambda a, b, c: t.cast(a + b, "float32"), "(float)(a + b)"),
        (lambda a, b, c: t.cast(a, "int8") + t.cast(b, "int8"), "(int8_t)((int8_t)a + (int8_t)b)"),
    ],
)
def test_other_operators_have_parentheses(write, text):
    assert printer().expr(write(*(expression(name, "int32") for name in "abc")).node) == text


def vector(tree):
    """Return the printed text of a sum or product of vectors, with plain names for their loads."""
    lane = tirx.Var("lane", "int32")
    buffers = {name: tirx.decl_buffer((8,), "float32", name) for name in "abcd"}

    def node(tree):
        if isinstance(tree, str):
            return tirx.BufferLoad(buffers[tree], [lane])
        return {"+": tirx.Add, "*": tirx.Mul}[tree[0]](node(tree[1]), node(tree[2]))

    text, differs = printer().vector(node(tree), lane)
    assert differs
    return text.replace("VECTOR(", "").replace("[0])", "")


VECTORS = st.recursive(st.sampled_from("abcd"), lambda x: st.tuples(st.sampled_from("+*"), x, x), max_leaves=8)


@given(VECTORS)
def test_vectors_keep_their_grouping(tree):
    assert parsed(vector(tree)) == tree
