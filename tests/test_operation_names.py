"""Names of operations in the source: few tables, few comparisons, and never more than there are.

Facts about an operation belong to its declaration, and passes ask axes and traits. Tables of names remain where a
backend lowers or a printer prints; ``operation_names.json`` counts, for each file, tables of three or more names and
comparisons of ``op.name`` with a string. Counts may only go down: then lower them in the file.
"""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from mithril.base.errors import OperationError
from mithril.base.registry import Registry, operations

PROJECT = Path(__file__).parents[1]
COUNTS = Path(__file__).with_name("operation_names.json")
FILES = [*PROJECT.glob("mithril-core/src/**/*.py"), *PROJECT.glob("plugins/*/src/**/*.py")]
LEAST = 3  # names that make a table


def words(items):
    return [i.value for i in items if isinstance(i, ast.Constant) and isinstance(i.value, str)]


def is_table(node, names):
    if isinstance(node, ast.Dict):
        texts = words(k for k in node.keys if k is not None)
    elif isinstance(node, ast.Set | ast.List | ast.Tuple):
        texts = words(node.elts)
    else:
        return False
    matches = sum(word in names for word in texts)
    return matches >= LEAST and 2 * matches > len(texts)


def compares_a_name(node):
    if not isinstance(node, ast.Compare):
        return False
    sides = [node.left, *node.comparators]
    return any(isinstance(s, ast.Attribute) and ast.unparse(s).endswith("op.name") for s in sides) and any(
        isinstance(s, ast.Constant | ast.Tuple | ast.Set) or (isinstance(s, ast.Name) and s.id.isupper()) for s in sides
    )


def counted(text, names):
    """Return the tables and the comparisons of a file."""
    nodes = list(ast.walk(ast.parse(text)))
    return [sum(is_table(n, names) for n in nodes), sum(compares_a_name(n) for n in nodes)]


def everywhere():
    names = {name for name in operations() if "." not in name}
    counts = {str(f.relative_to(PROJECT)): counted(f.read_text(), names) for f in FILES}
    return {file: count for file, count in sorted(counts.items()) if any(count)}


def test_no_new_tables_and_comparisons():
    recorded, today = json.loads(COUNTS.read_text()), everywhere()
    more = {
        f: (c, recorded.get(f, [0, 0]))
        for f, c in today.items()
        if any(a > b for a, b in zip(c, recorded.get(f, [0, 0]), strict=True))
    }
    assert not more, f"ask axes or traits instead of names (now, before: tables and comparisons): {more}"


def test_the_counts_are_those_of_today():
    recorded, today = json.loads(COUNTS.read_text()), everywhere()
    fewer = {f: today.get(f, [0, 0]) for f, c in recorded.items() if today.get(f, [0, 0]) != c}
    assert not fewer, f"lower these counts in {COUNTS.name}: {fewer}"


def test_the_count_counts():
    names = {"add", "mul", "exp", "conv"}
    assert counted('A = {"add", "mul", "exp"}\nB = {"add": 1, "mul": 2, "conv": 3}\n', names) == [2, 0]
    assert counted('if node.op.name == "conv" or node.op.name in A: pass', names) == [0, 2]
    assert counted('A = ("add", "mul")\nname == "conv"\nB = ["red", "green", "add"]', names) == [0, 0]


def test_a_registry_takes_operations_and_names_that_exist():
    from mithril import ops

    rules = Registry("testing")
    rules(ops.exp, "add", "acme.later")(1)
    assert dict(rules) == {"exp": 1, "add": 1, "acme.later": 1}
    rules.none(ops.fold_in, why="keys are whole")
    assert "fold_in" not in rules.missing()
    assert "matmul" in rules.missing()
    with pytest.raises(OperationError, match="unknown operation 'contract'"):
        rules("contract")(2)


def test_every_lowering_is_of_an_operation():
    """Reject a name that does not exist when the table is imported."""
    from mithril_jax.lowering import table

    with pytest.raises(OperationError, match="unknown operation 'matmull'"):
        table.row("matmull", "{a} @ {b}")
