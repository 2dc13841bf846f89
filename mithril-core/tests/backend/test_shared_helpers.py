"""Shared helpers are written in the words of one array library, and every word of them is defined."""

from __future__ import annotations

import ast
import inspect

import pytest

from mithril.backend import HELPERS, Dialect, Lowerings, emit, needs, xp
from mithril.backend.codegen.emit import render
from mithril.graph import Builder
from mithril.ops import sign


def widened(x, dtype):
    """Return x in several ways."""
    # a comment stays
    return xp.astype(x + 1, dtype), xp.astype(xp.stack([x, xp.astype(x, dtype)], 1), xp.int64), xp.half(x - 1)


def half(x):
    """Return half of x."""
    return x / 2


def test_words_are_names_templates_or_functions_of_the_module():
    dialect = Dialect("lib", {"astype": "{0}.to({1})", "stack": "lib.cat"}, [half])
    text, primitives = dialect.source(widened)
    assert text.splitlines()[-1] == (
        "    return (x + 1).to(dtype), lib.cat([x, x.to(dtype)], 1).to(lib.int64), half(x - 1)"
    )
    assert "# a comment stays" in text
    assert primitives == [half]


@pytest.mark.parametrize(
    ("template", "text"),
    [("{0}", "y = x + 1"), ("({0}) & 255", "y = (x + 1) & 255"), ("f({0}, {1})", "y = f(x + 1, 2)")],
)
def test_arguments_are_parenthesized_where_they_need_it(template, text):
    def helper(x):
        y = xp.word(x + 1, 2)
        return [y]

    assert text in Dialect("lib", {"word": template}).source(helper)[0]


def test_an_operand_of_an_operator_keeps_its_parentheses():
    def helper(x):
        return xp.word(x + 1) * 2

    assert "(x + 1) * 2" in Dialect("lib", {"word": "{0}"}).source(helper)[0]


def plain(x):
    """Return x."""
    return x


@needs(half)
def outer(x):
    """Return half of x by two functions."""
    return half(xp.plain(x))


def test_a_program_holds_the_primitives_of_its_helpers_and_the_backends_versions():
    def version(x):
        return x * 0.5

    version.__name__ = "half"
    version.__code__ = half.__code__
    table = Lowerings("lib", ["import numpy as np"], dialect=Dialect("np", functions=[plain, version]))
    table.helper(outer, op="sign")
    with Builder("g") as b:
        y = sign(b.input("x", (2,)))
    text = render(emit(b.build({"y": y}), table))
    assert text.index("def plain(") < text.index("def outer(")
    assert text.count("def half(") == 1
    names: dict[str, object] = {}
    exec(compile(text, "program", "exec"), names)
    assert names["forward"]({}, {"x": 4.0}) == {"y": 2.0}


@pytest.mark.parametrize("name", sorted(HELPERS))
def test_shared_helpers_declare_their_callees(name):
    """Check that ``needs`` names every helper that one calls: generated files hold those only."""
    tree = ast.parse(inspect.getsource(HELPERS[name]))
    called = {n.func.id for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
    called -= {"needs", name}
    assert called & HELPERS.keys() == {f.__name__ for f in getattr(HELPERS[name], "needs", ())}
