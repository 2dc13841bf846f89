"""Rules of the architecture that ``lint-imports`` cannot check; its contracts are in ``pyproject.toml``."""

from __future__ import annotations

import ast
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import get_type_hints

import pytest

import mithril
from mithril.graph import Node, Op, operations

CORE = Path(mithril.__file__).parent
PROJECT = Path(__file__).parents[2]
PACKAGES = sorted(path.parent.name for path in CORE.glob("*/__init__.py"))
PLUGINS = sorted(path for path in (PROJECT / "plugins").glob("*/src/mithril*") if path.is_dir())
PLUGIN_FILES = [file for plugin in PLUGINS for file in plugin.rglob("*.py")]
CORE_FILES = sorted(CORE.rglob("*.py"))
KNOWN = json.loads((PROJECT / "registry.json").read_text())
BACKENDS = {name for entry in KNOWN.values() for name in entry.get("backends", ())}
FRAMEWORKS = {"numpy", "jax", "jaxlib", "torch", "mlx", "tvm", "ggml", "ml_dtypes"}
KERNEL_PACKAGES = ("graph", "passes", "plugins")
# Attributes by which a lower layer calls a higher one, or a file calls its importer; the module assigns them at import.
LATE_BINDINGS = {
    "mithril": {"registry.host"},
    "mithril.graph.apply": {"Op._apply", "Op._evaluate"},
    "mithril.graph.builder": {"Op._trace"},
    "mithril.graph.editor": {"Graph._editor"},
    "mithril.graph.text": {"Graph._printer"},
    "mithril.derivatives.regions": {"BodyGradient.differentiate"},
}


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(CORE.parent).with_suffix("").parts).removesuffix(".__init__")


def package_of(path: Path) -> str:
    """Return the package of the core that a file belongs to, empty for other files."""
    parts = path.relative_to(CORE).parts if path.is_relative_to(CORE) else ()
    return parts[0] if len(parts) > 1 else ""


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def calls(tree: ast.AST, *names: str) -> Iterator[ast.Call]:
    """Yield calls of functions of these names, ``name(...)`` or ``x.name(...)``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in names:
            yield node


# Rules: each returns the code of one tree that breaks it.


def internal_imports(tree: ast.AST, own_package: str = "") -> list[str]:
    """Return imports from other packages of the core that name a file, or a name that is not in ``__all__``."""
    violations = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mithril."):
            if node.module == "mithril.graph.lazy_exports" or node.module.split(".")[1] == own_package:
                continue  # every ``__init__`` is made by lazy_exports
            violations += [f"{node.module}.{a.name}" for a in node.names if not is_exported(node.module, a.name)]
        elif isinstance(node, ast.Import):
            violations += [a.name for a in node.names if a.name.startswith("mithril.") and a.name.count(".") > 1]
    violations += [
        call.args[0].value
        for call in calls(tree, "import_module")
        if call.args and isinstance(call.args[0], ast.Constant) and re.match(r"mithril(\.\w+){2}", call.args[0].value)
    ]
    return [name for name in violations if name.split(".")[1] != own_package]


def is_exported(module: str, name: str) -> bool:
    if module.count(".") != 1:
        return False
    return name in import_module(module).__all__ or (module == "mithril.ops" and name in operations())


def late_bindings(tree: ast.Module) -> set[str]:
    """Return the attributes of imported classes and modules that a file assigns when it is imported."""
    imported = {
        a.asname or a.name for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom)) for a in node.names
    }
    targets = [t for node in tree.body if isinstance(node, ast.Assign) for t in node.targets]
    attributes = [t.value if isinstance(t, ast.Subscript) else t for t in targets]
    return {ast.unparse(a) for a in attributes if isinstance(a, ast.Attribute) and ast.unparse(a.value) in imported}


def first_party_names(tree: ast.AST) -> set[str]:
    """Return strings that are the name of a backend or a distribution of this project."""
    constants = {
        node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    return constants & (BACKENDS | KNOWN.keys())


def compared_names(tree: ast.AST) -> list[str]:
    """Return comparisons of, look-ups by, and lists of the names of backends; capabilities say the same of all."""
    violations = []
    declared = {
        id(k.value) for n in ast.walk(tree) if isinstance(n, ast.Call) for k in n.keywords if k.arg == "backends"
    }
    for node in ast.walk(tree):
        parts: list[ast.expr] = []
        if isinstance(node, ast.Compare):
            parts = [node.left, *node.comparators]
        elif isinstance(node, ast.Subscript):
            parts = [node.slice]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("startswith", "endswith"):
            parts = [node.func.value]
        elif isinstance(node, ast.Match):
            parts = [node.subject]
        elements = getattr(node, "elts", getattr(node, "keys", [])) if id(node) not in declared else []
        listed = {e.value for e in elements if isinstance(e, ast.Constant) and isinstance(e.value, str)}
        if len(listed & BACKENDS) > 1 or any(_is_backend_name(part) for part in parts):
            violations.append(ast.unparse(node))
    return violations


def _is_backend_name(node: ast.expr) -> bool:
    """Whether this is ``backend.name``, ``self.backend.name``, ``compiled.backend.name`` and the like."""
    if not isinstance(node, ast.Attribute) or node.attr != "name":
        return False
    owner = getattr(node.value, "attr", getattr(node.value, "id", ""))
    return owner == "backend" or owner.endswith("_backend")


def text_runners(tree: ast.AST) -> list[str]:
    """Return the calls of ``exec`` and ``eval``, also of ``builtins.exec``."""
    return [
        ast.unparse(call.func)
        for call in calls(tree, "exec", "eval")
        if not isinstance(call.func, ast.Attribute) or ast.unparse(call.func.value) == "builtins"
    ]


def readers_of_result_names(tree: ast.AST) -> list[str]:
    """Return code that recognizes a result by its name; ``graph.results_of(role)`` and ``result.of`` say what it is."""
    prefixes = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    violations = [text for text in prefixes if re.match("(grad|state|report|check)/", text)]
    for call in calls(tree, "startswith", "removeprefix", "partition", "split"):
        names = {n.id for argument in call.args for n in ast.walk(argument) if isinstance(n, ast.Name)}
        if names & {"PREFIXES", "result_name", "cotangent_name"}:
            violations.append(ast.unparse(call))
    return violations


def frameworks_at_import(tree: ast.Module) -> set[str]:
    """Return the frameworks that a file imports when it is imported itself, not in functions or for type checkers."""
    pending: list[ast.AST] = list(tree.body)
    names: set[str] = set()
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module or ""} | {alias.name for alias in node.names}
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            is_typing = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
            pending += node.orelse if isinstance(node, ast.If) and is_typing else ast.iter_child_nodes(node)
    return {name.split(".")[0] for name in names} & FRAMEWORKS


def untyped_operations(tree: ast.AST) -> list[str]:
    """Return ``op: Any`` and ``getattr(node.op, "...")``: attributes of operations are typed."""
    arguments = [n for n in ast.walk(tree) if isinstance(n, ast.arg) and n.annotation]
    violations = [f"{n.arg}: Any" for n in arguments if n.arg == "op" and ast.unparse(n.annotation) == "Any"]
    return violations + [ast.unparse(c) for c in calls(tree, "getattr") if re.search(r"\bnode\.op, '", ast.unparse(c))]


Rule = Callable[[ast.Module], object]
CASES: list[tuple[Rule, list[str], list[str]]] = [  # rule, code that breaks it, code that does not
    (
        internal_imports,
        [
            "from mithril.graph.core import Graph",
            "def f():\n    from mithril.graph.dims import Dim",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import mithril.graph.core",
            "from mithril.graph import _solve",
            "from mithril.ops import activations",
            'import_module("mithril.graph.core")',
        ],
        ["from mithril.graph import Graph\nfrom mithril.graph import Dim\nfrom mithril.ops import exp, threefry"],
    ),
    (late_bindings, ["from mithril.graph import Op\nOp._axes = staticmethod(len)"], ["table = {}\ntable['x'] = 1"]),
    (first_party_names, ['KNOWN = ("torch",)', 'x = "mithril-jax"'], ['text = "install mithril-jax"']),
    (
        compared_names,
        [
            'if compiled.backend.name != "torch": pass',
            "if self.backend.name in FAST: pass",
            "table[backend.name]",
            'backend.name.startswith("tp")',
            'match backend.name:\n    case "c": pass',
            'FAST = ("numpy", "jax")',
        ],
        ['print(f"built for {backend.name}"); names = [backend.name]', 'F("zip", backends=("numpy", "jax"))'],
    ),
    (
        text_runners,
        ["exec('x = 1')", "y = eval('1')", "import builtins\nbuiltins.exec('')"],
        ["model.eval()\nre.compile('x')\nrun.exec(program)"],
    ),
    (
        readers_of_result_names,
        ['name == "grad/w"', "name.removeprefix(PREFIXES[role])", "name.split(result_name('state', ''))"],
        ["graph.results_of('gradient')", "path.split('/')"],
    ),
    (
        frameworks_at_import,
        [
            "import torch",
            "import numpy as np",
            "from jax.experimental import pallas",
            "try:\n    import torch\nexcept ImportError:\n    torch = None",
            "class Lazy:\n    import mlx.core",
            "if True:\n    import tvm",
        ],
        [
            "def load():\n    import torch",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch",
            "from mithril import hookimpl\nimport json",
        ],
    ),
    (untyped_operations, ["def f(op: Any): pass", 'getattr(self.node.op, "flops")'], ["def f(op: Op): node.op.flops"]),
]


@pytest.mark.parametrize(("rule", "breaking", "keeping"), CASES, ids=lambda case: getattr(case, "__name__", ""))
def test_each_rule_fires_on_code_that_breaks_it_only(rule, breaking, keeping):
    assert not [code for code in breaking if not rule(ast.parse(code))]
    assert not [code for code in keeping if rule(ast.parse(code))]


def broken(rule: Rule, files: list[Path]) -> dict[str, object]:
    violations = {str(file): rule(parsed(file)) for file in files}
    return {file: parts for file, parts in violations.items() if parts}


def test_packages_are_imported_through_their_exports():
    for package in ["", *PACKAGES]:
        files = [path for path in CORE_FILES if package_of(path) == package]
        assert not broken(lambda tree, own=package: internal_imports(tree, own), files)
    assert not broken(internal_imports, PLUGIN_FILES)


def test_late_bindings_are_those_of_the_architecture_page():
    violations = {module_of(path): late_bindings(parsed(path)) for path in CORE_FILES}
    assert {module: names for module, names in violations.items() if names} == LATE_BINDINGS
    page = (PROJECT / "docs" / "architecture.md").read_text()
    assert not [name for names in LATE_BINDINGS.values() for name in names if f"{name}`" not in page]


def test_the_core_names_no_backend_and_no_distribution():
    allowed = {  # "numpy": a module that generated code may import, and the kind of arrays that a library returns
        str(CORE / "backend" / "codegen" / "emit.py"): {"numpy"},
        str(CORE / "compiler" / "weight_files.py"): {"numpy"},
    }
    assert broken(first_party_names, CORE_FILES) == allowed


def test_names_of_backends_are_not_compared():
    assert not broken(compared_names, CORE_FILES + PLUGIN_FILES)


def test_the_core_runs_text_in_one_place():
    assert broken(text_runners, CORE_FILES) == {str(CORE / "backend" / "codegen" / "source.py"): ["exec"]}


def test_results_are_identified_by_role_not_by_name():
    files = [path for path in CORE_FILES + PLUGIN_FILES if path != CORE / "graph" / "result_names.py"]
    assert not broken(readers_of_result_names, files)


def test_entry_modules_import_no_framework():
    entries = [file for plugin in PLUGINS for file in plugin.glob("*.py") if file.name in ("plugin.py", "__init__.py")]
    assert len(entries) > len(PLUGINS)
    assert not broken(frameworks_at_import, entries)


def test_nodes_know_the_type_of_their_operation():
    assert get_type_hints(Node.__init__)["op"] is Op
    assert not broken(untyped_operations, [p for p in CORE_FILES if p != CORE / "graph" / "registry.py"] + PLUGIN_FILES)


def names_of_files(folder: Path, package: ModuleType) -> set[str]:
    """Return the exports, other than modules, that a file or folder of the package bears the name of."""
    files = {path.stem for path in folder.glob("*.py")} | {p.name for p in folder.iterdir() if p.is_dir()}
    return {n for n in files & set(package.__all__) if not isinstance(getattr(package, n), ModuleType)}


@pytest.mark.parametrize("name", PACKAGES)
def test_no_file_bears_the_name_of_an_export(name):
    """Importing ``mithril.graph.verify`` would put a module where users of the package expect the function."""
    assert not names_of_files(CORE / name, import_module(f"mithril.{name}"))


def test_a_file_with_the_name_of_an_export_is_found(tmp_path):
    package = ModuleType("package")
    package.__all__, package.verify, package.toy = ["verify", "toy"], len, ModuleType("toy")
    for name in package.__all__:
        (tmp_path / f"{name}.py").touch()
    assert names_of_files(tmp_path, package) == {"verify"}


# The contracts of lint-imports

SETTINGS = tomllib.loads((PROJECT / "pyproject.toml").read_text())["tool"]["importlinter"]
CONTRACTS = {contract["type"]: contract for contract in SETTINGS["contracts"]}


def test_contracts_cover_every_distribution():
    plugins = {path.name for path in PLUGINS}
    assert set(SETTINGS["root_packages"]) == set(CONTRACTS["acyclic_siblings"]["ancestors"]) == {"mithril", *plugins}
    assert set(CONTRACTS["forbidden"]["forbidden_modules"]) >= plugins
    assert {*CONTRACTS["independence"]["modules"], "mithril_testing_summary"} == plugins


def dependencies(distribution: Path, *, optional: bool = True, tests: bool = False) -> set[str]:
    """Return the packages of this project that a distribution, or its tests, need, with its extras if ``optional``."""
    project = tomllib.loads((distribution / "pyproject.toml").read_text())["project"]
    extras = project.get("optional-dependencies", {}) if optional else {}
    listed = [lines for extra, lines in extras.items() if tests or extra != "test"]
    declared = [*project["dependencies"], *itertools.chain(*listed)]
    return {name.replace("-", "_") for line in declared for name in re.findall(r"^mithril-\w+", line)}


@pytest.mark.parametrize("package", PLUGINS, ids=lambda path: path.name)
def test_tests_need_only_what_their_distribution_declares(package):
    """``mithril plugins verify`` installs the extra ``test`` and the kit; programs need the standard passes."""
    distribution = PROJECT / "plugins" / package.name.replace("_", "-")
    plugins = {path.name for path in PLUGINS}
    modules = sorted(distribution.glob("tests/*.py"))
    imports = {name for path in modules for name in re.findall(r"^ *(?:from|import) (\w+)", path.read_text(), re.M)}
    needed = {*imports & plugins, "mithril_passes"} - {"mithril_testing", "mithril_testing_summary", "mithril_tools"}
    assert not modules or needed - {package.name} <= dependencies(distribution, tests=True)


def test_exceptions_of_independence_are_declared_dependencies():
    for line in CONTRACTS["independence"]["ignore_imports"]:
        importer, imported = re.findall(r"mithril_\w+", line)
        assert imported in dependencies(PROJECT / "plugins" / importer.replace("_", "-"))


def lint_imports(sources: list[Path]) -> str:
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as f; f()", "--no-cache"]
    path = os.pathsep.join(map(str, sources))
    run = subprocess.run(
        [*command, "--no-logo", str(PROJECT / "pyproject.toml")],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "COLUMNS": "200"},
    )
    return run.stdout + run.stderr


def test_contracts_are_kept():
    output = lint_imports([CORE.parent, *sorted({path.parent for path in PLUGINS})])
    assert f"Contracts: {len(CONTRACTS)} kept, 0 broken." in output, output


def test_each_contract_fires_on_imports_that_break_it(tmp_path):
    for package in (CORE, *PLUGINS):
        shutil.copytree(package, tmp_path / package.name, ignore=shutil.ignore_patterns("__pycache__"))
    for file, code in {
        "mithril/graph/dims.py": "def f():\n    import mithril.models",
        "mithril/loose.py": "",
        "mithril/graph/errors.py": "from mithril.graph.dims import Dim",
        "mithril/ops/nn.py": "import torch\ndef f():\n    import mithril_jax",
        "mithril_numpy/plugin.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import mithril_onnx",
    }.items():
        with (tmp_path / file).open("a") as stream:
            stream.write(f"\n{code}\n")
    output = lint_imports([tmp_path])
    assert f"Contracts: 0 kept, {len(CONTRACTS)} broken." in output, output
    for text in (
        "mithril.graph is not allowed to import mithril.models",
        "mithril.loose",
        "No cycles are allowed in mithril.graph",
        "mithril is not allowed to import torch",
        "mithril is not allowed to import mithril_jax",
        "mithril_numpy is not allowed to import mithril_onnx",
    ):
        assert text in output, output


# Parts that run without the others

REFUSING = """
import sys
from importlib.abc import MetaPathFinder

class Refuse(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        parts = name.split(".")
        if parts[0] == "mithril" and len(parts) > 1 and parts[1] in {refused}:
            raise ImportError(f"package {parts[1]} is refused")

sys.meta_path.insert(0, Refuse())
"""

KERNEL = """
from mithril.graph.registry import operation
from mithril.graph.dims import TensorType
from mithril.graph.dtypes import float32
from mithril.graph import Builder, parse, structurally_equal, verify
from mithril.graph.declare import composite, unary
from mithril.graph.evaluation import evaluate
from mithril.passes import PassManager, pass_
from mithril.passes import RuleSet, rule
import numpy as np

double = unary("acme.double", lambda x: 2 * x, "Twice x.", vjp=lambda g, y, x: double(g))
half = unary("acme.half", lambda x: x / 2, "Half of x.", vjp=lambda g, y, x: half(g))

undo = rule(lambda x: double(half(x)), lambda x: x, exact=True, name="undo")

with Builder("g") as builder:
    x = builder.input("x", (3, 2))
    y = double(double(half(x)))
graph = builder.build({"y": y})
verify(graph)
assert structurally_equal(parse(str(graph)), graph)
rewritten = RuleSet("undo", [undo])(graph)
assert [n.op.name for n in rewritten.nodes] == ["acme.double"], rewritten

@pass_
def nothing(graph):
    return graph

after, report = PassManager([nothing]).run(rewritten)
value = evaluate(after, {"x": np.ones((3, 2), np.float32)})["y"]
assert (value == 2).all()
from mithril import plugins
print(len(plugins.passes()))
"""


def run_refusing(refused: set[str], code: str) -> subprocess.CompletedProcess[str]:
    text = REFUSING.replace("{refused}", repr(refused)) + code
    return subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=300)


def test_the_kernel_runs_without_the_other_packages():
    done = run_refusing(set(PACKAGES) - {*KERNEL_PACKAGES}, KERNEL)
    assert done.returncode == 0, done.stderr


GRAPH = """
import numpy as np
import mithril as ml
from mithril.backend.arrays import as_numpy
from mithril.backend.base import Backend
from mithril.graph.evaluation import evaluate

class Program:
    source = ""
    def __init__(self, graph): self.graph = graph
    def __call__(self, params, inputs): return evaluate(self.graph, {**params, **inputs})

class Reference(Backend):
    name = "reference"
    def lowers(self, node, options=None): return not node.op.composite
    def build(self, graph, options=None): return Program(graph)
    def array(self, data, dtype=None): return as_numpy(data, self.dtype)
    def to_numpy(self, array): return array
    def is_array(self, x): return isinstance(x, np.ndarray)

with ml.Builder("g") as builder:
    x = builder.input("x", (ml.Dim("B"), 2))
    w = builder.param("w", (2, 3), init="ones")
    y = ml.ops.matmul(x, w)
graph = builder.build({"y": y})
compiled = ml.compile(graph, Reference())
params = compiled.randomize_params(seed=0)
x = np.ones((4, 2), np.float32)
outputs, gradients = compiled.evaluate(params, {"x": x}, output_gradients={"y": np.ones((4, 3), np.float32)})
assert outputs["y"].shape == (4, 3) and (outputs["y"] == 2).all()
assert (gradients["w"] == 4).all()
"""


def test_graphs_compile_without_models():
    done = run_refusing({"models"}, GRAPH)
    assert done.returncode == 0, done.stderr


def test_refused_packages_are_refused():
    assert "package ops is refused" in run_refusing({"ops"}, "import mithril.ops").stderr


def test_helpers_of_tests_have_names_of_their_own():
    """Refuse equal names: pytest, running several distributions, finds a module in whichever folder came first."""
    hidden = {p for p in PROJECT.iterdir() if p.name.startswith(".")}
    tests = [p for p in PROJECT.rglob("tests/**/*.py") if hidden.isdisjoint(p.parents)]
    modules = [p.stem for p in tests if not (p.parent / "__init__.py").exists()]
    helpers = [name for name in modules if not name.startswith(("test_", "conftest"))]
    assert not [name for name in helpers if helpers.count(name) > 1]
    assert not [str(p) for p in tests if re.search(r"^\s*(from|import) conftest\b", p.read_text(), re.M)]


def test_decisions_are_numbered_once_and_listed():
    folder = PROJECT / "docs" / "decisions"
    pages = sorted(path.name for path in folder.glob("0*.md"))
    assert [int(name[:4]) for name in pages] == list(range(1, len(pages) + 1))
    listed = (folder / "README.md").read_text()
    assert not [name for name in pages if f"({name})" not in listed]
