"""Every operation, layer, option, pass, hook, error and command has a page that is computed from its declaration."""

import ast
import importlib
import inspect
import keyword
import pydoc
import re
import subprocess
import sys

import pytest
from click.testing import CliRunner

import mithril as ml
import mithril.models as models
from mithril import graph, plugins
from mithril.compiler import option_rows
from mithril.graph import operations
from mithril_tools import cli, operation_stubs
from mithril_tools.reference import KINDS, find, guides, pages
from mithril_tools.reference.layers import EXAMPLES, NO_EXAMPLE, layer_classes
from mithril_tools.reference.sources import source_of

PLUGIN_MODULES = [
    *(f"mithril.{name}" for name in "graph ops passes plugins system backend derivatives compiler models".split()),
    "mithril_testing",
]


def public(module):
    return importlib.import_module(module).__all__


def own_page(name):
    """Whether a name has a page as an operation, a layer, an error or a name of ``ml``."""
    return any(page.kind in ("operation", "layer", "class", "error") for page in find(name))


def names_of(kind):
    return {
        "operation": lambda: {*operations()},
        "layer": lambda: {*layer_classes()},
        "option": lambda: {row["name"] for row in option_rows()},
        "pass": lambda: {*plugins.passes()},
        "hook": lambda: {*plugins.HOOKS},
        "error": lambda: {n for n in graph.__all__ if n.endswith(("Error", "Warning"))},
        "command": lambda: {f"mithril {name}" for name in cli.COMMANDS},
        "guide": lambda: {path.stem for path in guides.folder().glob("*.md")},
        "name": lambda: {name for module in PLUGIN_MODULES for name in public(module) if not own_page(name)},
        "module": lambda: {*PLUGIN_MODULES},
        "class": lambda: {n for names in ml._HOME.values() for n in names if not n.endswith(("Error", "Warning"))},
    }[kind]()


@pytest.mark.parametrize("kind", KINDS)
def test_every_name_has_a_page(kind):
    listed = pages(kind)
    assert names_of(kind) <= set(listed)
    for page in listed.values():
        assert page.summary, page.name
        assert len(page.text()) > len(page.name) + 20, page.name


def test_pages_of_classes_leave_out_names_of_other_frameworks():
    ml.compile(models.Linear(3), "numpy")  # adds the answers to these names
    text = find("CompiledModel")[0].text()
    assert "`evaluate(" in text and "`predict" not in text


@pytest.mark.parametrize("name", sorted(operations()))
def test_page_of_an_operation_is_complete(name):
    text, op = find(name)[0].text(), operations()[name]
    for attribute in op.attributes.values():
        assert f"| `{attribute.name}` | attribute |" in text
    assert op.doc.partition("\n")[0].replace("``", "`") in text
    assert "## Meaning" in text and "## Types" in text and "## Gradient" in text and "## Backends" in text
    assert ("## Example" in text) == bool(op.samples)


def test_examples_of_layers_are_complete():
    wrapped = {n for n, cls in layer_classes().items() if getattr(cls, "op_name", "")}
    assert set(layer_classes()) - wrapped - set(EXAMPLES) == NO_EXAMPLE & set(layer_classes())
    assert not NO_EXAMPLE & set(EXAMPLES)


def test_every_name_for_plugins_has_an_example():
    listed = [*pages("name").values(), *pages("error").values()]
    missing = [page.name for page in listed if not re.search(r"^## Examples?\n\n```python\n", page.text(), re.M)]
    assert not missing


def test_page_of_rules_says_how_they_capture():
    (page,) = find("rule")
    assert "keyword-only parameters capture" in page.text() and "factor=2.0" in page.text()


def test_examples_of_names_for_plugins_run():
    """Run in a process of their own, because some declare operations."""
    code = "from mithril_tools.reference.author_examples import blocks\nfor k, block in enumerate(blocks()):\n"
    code += "    exec(compile(block, f'example {k}', 'exec'), {'__name__': 'example'})\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_example_shows_computed_numbers():
    text = find("softmax")[0].text()
    rows = re.search(r"## Example.*?```text\n(.*?)```", text, re.S)[1]
    numbers = [float(word) for word in rows.replace("[", " ").replace("]", " ").split()]
    assert sum(numbers) == pytest.approx(rows.count("]\n"), abs=1e-3)  # each row adds up to 1


def test_functions_of_pages_have_no_source(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("* **It's** text\n\ndef f(x):\n    return x\n")
    space = {}
    exec(compile("\n\ndef f(x):\n    return x\n", str(page), "exec"), space)
    assert source_of(space["f"]) == "f(...)"


def test_source_of_a_lambda_in_a_table():
    assert source_of(ml.ops.tanh.gradient) == "lambda g, y, x: g * (1.0 - y * y)"
    body = ast.parse(source_of(ml.ops.softmax.reference))
    assert isinstance(body.body[0], ast.FunctionDef) and ast.get_docstring(body.body[0]) is None


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("softmax", ["operation"]),
        ("ml.ops.softmax", ["operation"]),
        ("Softmax", ["layer"]),
        ("ml.models.Linear", ["layer"]),
        ("optimize_for", ["option"]),
        ("ShapeError", ["error"]),
        ("ml.compile", ["class"]),
        ("mithril_passes", ["hook"]),
        ("compiling.md", ["guide"]),
        ("BackendConformance", ["name"]),
        ("mithril.backend.SourceBackend", ["name"]),
        ("maximum", ["operation", "name"]),  # of arrays, and of sizes
        ("mithril.graph", ["module"]),
        ("fusion", ["pass"] * 4),  # a group
        ("doctor", ["command"]),
    ],
)
def test_names_as_in_code(name, kinds):
    assert [page.kind for page in find(name)] == kinds


def run(*arguments):
    return CliRunner().invoke(cli.main, ["docs", *arguments])


def test_command_prints_a_page():
    printed = run("softmax")
    assert printed.exit_code == 0 and "exp(x) / sum(exp(x))" in printed.output
    assert "](" not in printed.output  # links are for the browser


def test_command_suggests_names():
    printed = run("sofmax")
    assert printed.exit_code == 1 and "'log_softmax'" in printed.output


def test_folder_of_html_pages_has_no_dead_link_and_needs_no_network(tmp_path):
    assert run("--output", str(tmp_path)).exit_code == 0
    files = sorted(tmp_path.rglob("*.html"))
    assert len(files) == 1 + sum(len(pages(kind)) for kind in KINDS)
    for path in files:
        text = path.read_text()
        assert not re.search(r'(src|href)="(https?:)?//[^"]*\.(js|css|woff2?)', text)
        for target in re.findall(r'<a href="(?!https?:|#|mailto:)([^"#]+)', text):
            assert (path.parent / target).exists(), f"{path}: {target}"


def test_signatures_are_those_of_the_declarations():
    assert list(inspect.signature(ml.ops.tanh).parameters) == ["x"]
    assert inspect.signature(ml.ops.softmax).parameters["axis"].default == -1
    assert list(inspect.signature(models.Softmax).parameters) == ["axis", "in_place", "name"]
    assert "dimension" in inspect.signature(models.Linear).parameters
    for name, op in operations().items():
        names = list(inspect.signature(op).parameters)
        assert names == [*op.operands, *op.attributes], name
    for name, cls in layer_classes().items():
        assert "name" in inspect.signature(cls).parameters, name


def stub_classes(text):
    """Return the parameters of the method of each class, the same in all overloads, without self; and its docstring."""
    classes = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef):
            calls = [n.args for n in node.body if isinstance(n, ast.FunctionDef)]
            names, *overloads = [
                [p.arg for p in (*a.args[1:], *([a.vararg] if a.vararg else []), *a.kwonlyargs)] for a in calls
            ]
            assert all(set(overload) == set(names) for overload in overloads)
            classes[node.name] = (names, ast.get_docstring(node))
    return classes


def test_stub_of_operations_has_every_signature_and_text():
    classes = stub_classes(operation_stubs.operations_stub())
    core = {n: op for n, op in operations().items() if "mithril/ops/" in op.declared_at and not keyword.iskeyword(n)}
    core = {n: op for n, op in core.items() if n not in ml.ops.__all__}
    assert {f"_{name}" for name in core} == set(classes)
    for name, op in core.items():
        assert classes[f"_{name}"] == ([*op.operands, *op.attributes], inspect.cleandoc(op.doc))


def test_stub_of_layers_has_every_signature_and_text():
    text = operation_stubs.layers_stub().replace(operation_stubs.ONE_OUTPUT, "")  # no layer of its own
    classes = stub_classes(text)
    home = inspect.getmodule(models.Relu.__mro__[1]).__name__
    wrapped = {n: cls for n, cls in layer_classes().items() if cls.__module__ == home}
    assert set(classes) - {"OperationLayer"} == set(wrapped)
    for name, cls in wrapped.items():
        assert classes[name][0] == list(inspect.signature(cls).parameters)


def test_help_shows_signature_and_text():
    assert {"softmax", "matmul", "conv"} <= set(dir(ml.ops))
    assert not {"Any", "annotations", "elementwise"} & set(dir(ml.ops))  # names of use only
    assert "axis: 'Axis' = -1" in pydoc.plain(pydoc.render_doc(ml.ops.softmax))
    page = pydoc.plain(pydoc.render_doc(models.Linear))
    assert "dimension: 'int | None' = None" in page and "x @ weight.T + bias" in page
