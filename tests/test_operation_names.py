"""Names of operations in the source: few tables, few comparisons, and never more than there are.

Facts about an operation belong to its declaration, and passes ask axes and traits. Lowering tables are keyed by
operations or go through ``Registry``, ``operation_names`` or ``Lowerings``, which check each name; anchors compare by
identity.
``operation_names.json`` lists the rest, for each file: tables of three or more names, comparisons of ``op.name`` with a
string, and why. Counts may only go down: then lower them in the file.
"""

from __future__ import annotations

import ast
import json
from functools import cache
from pathlib import Path

import pytest

from mithril.graph.errors import OperationError
from mithril.graph.registry import Registry, operation, operation_names, operations

PROJECT = Path(__file__).parents[1]
COUNTS = Path(__file__).with_name("operation_names.json")
FILES = [*PROJECT.glob("mithril-core/src/**/*.py"), *PROJECT.glob("plugins/*/src/**/*.py")]
LEAST = 3  # names that make a table
CHECKED = {"Registry", "operation_names", "rows", "function", "functions", "row"}  # calls that check the names they get


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


def checked(tree):
    """Return the nodes below arguments of calls that check names, and below ``__all__``."""
    accepted = set()
    for node in ast.walk(tree):
        is_call = isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1].split("[")[0] in CHECKED
        is_export = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        if is_call or is_export:
            accepted.update(map(id, ast.walk(node)))
    return accepted


def compares_a_name(node):
    if not isinstance(node, ast.Compare):
        return False
    sides = [node.left, *node.comparators]
    return any(isinstance(s, ast.Attribute) and ast.unparse(s).endswith("op.name") for s in sides) and any(
        isinstance(s, ast.Constant | ast.Tuple | ast.Set) or (isinstance(s, ast.Name) and s.id.isupper()) for s in sides
    )


def counted(text, names):
    """Return the tables and the comparisons of a file."""
    tree = ast.parse(text)
    nodes, safe = list(ast.walk(tree)), checked(tree)
    tables = sum(is_table(n, names) for n in nodes if id(n) not in safe)
    return [tables, sum(compares_a_name(n) for n in nodes)]


def recorded_counts():
    return {file: [tables, compared] for file, (tables, compared, _) in json.loads(COUNTS.read_text()).items()}


@cache
def everywhere():
    names = {name for name in operations() if "." not in name}
    counts = {str(f.relative_to(PROJECT)): counted(f.read_text(), names) for f in FILES}
    return {file: count for file, count in sorted(counts.items()) if any(count)}


def test_no_new_tables_and_comparisons():
    recorded, today = recorded_counts(), everywhere()
    more = {
        f: (c, recorded.get(f, [0, 0]))
        for f, c in today.items()
        if any(a > b for a, b in zip(c, recorded.get(f, [0, 0]), strict=True))
    }
    assert not more, f"ask axes or traits instead of names (now, before: tables and comparisons): {more}"


def test_the_counts_are_those_of_today():
    recorded, today = recorded_counts(), everywhere()
    fewer = {f: today.get(f, [0, 0]) for f, c in recorded.items() if today.get(f, [0, 0]) != c}
    assert not fewer, f"lower these counts in {COUNTS.name}: {fewer}"


def test_each_file_says_why():
    unexplained = [file for file, (_, _, reason) in json.loads(COUNTS.read_text()).items() if len(reason.split()) < 3]
    assert not unexplained


def test_the_count_counts():
    names = {"add", "mul", "exp", "conv"}
    assert counted('A = {"add", "mul", "exp"}\nB = {"add": 1, "mul": 2, "conv": 3}\n', names) == [2, 0]
    assert counted('if node.op.name == "conv" or node.op.name in A: pass', names) == [0, 2]
    assert counted('A = Registry("signs", {"add": "+", "mul": "*", "exp": "e"})', names) == [0, 0]
    assert counted('__all__ = ["add", "mul", "exp"]', names) == [0, 0]
    assert counted('A = ("add", "mul")\nname == "conv"\nB = ["red", "green", "add"]', names) == [0, 0]


def test_a_registry_takes_operations_and_names_that_exist():
    from mithril import ops

    operation("mesh.all_reduce")
    rules = Registry("testing")
    rules(ops.exp, "add", "acme.later")(1)
    assert dict(rules) == {"exp": 1, "add": 1, "acme.later": 1}
    rules.none(ops.fold_in, reason="keys are whole")
    assert "fold_in" not in rules.missing()
    assert "matmul" in rules.missing()
    assert dict(Registry("testing", {ops.exp: 1})) == {"exp": 1}
    assert operation_names(ops.exp, "add") == ("exp", "add")
    with pytest.raises(OperationError, match="unknown operation 'contract'"):
        rules("contract")(2)
    with pytest.raises(OperationError, match="unknown operation 'mesh.all_reduced'") as caught:
        rules("mesh.all_reduced")(3)  # of a distribution that is known here
    assert "mesh.all_reduce" in str(caught.value)


def test_every_lowering_is_of_an_operation():
    """Reject a name that does not exist when the table is imported."""
    from mithril_jax.lowering import table

    with pytest.raises(OperationError, match="unknown operation 'matmull'"):
        table.row("matmull", "{a} @ {b}")
