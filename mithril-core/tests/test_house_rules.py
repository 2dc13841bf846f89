"""Each rule of ``test_house.py`` on code that breaks it: a rule that never fires proves nothing."""

from __future__ import annotations

import ast
import sys
import types
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import test_house as house


@pytest.fixture
def file(tmp_path):
    def write(code, name="toy.py"):
        (tmp_path / name).write_text(code)
        return tmp_path / name

    return write


def test_imports_that_point_up_are_found():
    graph = {"mithril.ir.core": {"mithril.ops.basic"}, "mithril.ops.basic": {"mithril.ir.core"}}
    assert house.upward(graph) == ["mithril.ir.core -> mithril.ops.basic"]


def test_rooms_of_one_floor_are_not_tied():
    assert house.upward({"mithril.passes.order": {"mithril.rewrite.rules"}}) == [
        "mithril.passes.order -> mithril.rewrite.rules"
    ]


def test_circles_are_found():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}
    assert house.circles(graph) == [["a", "b", "c"]]


@pytest.mark.parametrize(
    "code",
    [
        "from mithril.ir.core import Graph",
        "def f():\n    from mithril.ir.core import Graph",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from mithril.ir.core import Graph",
        "import mithril.ir.core",
        'from importlib import import_module\nimport_module("mithril.ir.core")',
    ],
    ids=["top", "function", "type checkers", "module", "import_module"],
)
def test_imports_are_read_wherever_they_stand(file, code):
    assert "mithril.ir.core" in set(house.imports(file(code), house.CORE_MODULES))


@pytest.mark.parametrize(
    "code",
    [
        "from mithril.ir.core import Graph",
        "def f():\n    from mithril.base.dims import Dim",
        "from mithril.base import _solve",
        "from mithril.ops import activations",
        "import mithril.ir.core",
    ],
)
def test_imports_past_the_doors_are_found(file, code):
    assert len(house.past_doors(file(code), "")) == 1


def test_imports_through_the_doors_are_accepted(file):
    code = "from mithril.ir import Graph\nfrom mithril.base import Dim\nfrom mithril.ops import exp, threefry\n"
    assert house.past_doors(file(code), "") == []
    assert house.past_doors(file("from mithril.ir.core import Graph"), "ir") == []


def test_a_file_with_the_name_of_an_export_is_found(file):
    path = file("", "verify.py")
    door = types.ModuleType("door")
    door.__all__, door.verify, door.toy = ["verify", "toy"], len, types.ModuleType("toy")
    file("", "toy.py")
    assert house.names_of_files(path.parent, door) == {"verify"}


def test_undeclared_distributions_and_private_names_are_found(file):
    code = "import mithril_jax\nfrom mithril_torch.backend import TorchBackend\nimport mithril._secret\n"
    assert len(house.foreign_modules(file(code), {"mithril_torch"})) == 2


def test_slots_are_found(file):
    code = "from mithril.ir import Op\nOp._axes = staticmethod(len)\ntable = {}\n"
    assert house.filled_slots(file(code)) == {"Op._axes"}


def test_the_closed_rooms_are_closed():
    """Refuse the other rooms in the processes that run the kernel alone."""
    assert "the room ops is closed" in house.run_refusing({"ops"}, "import mithril.ops").stderr


def test_names_of_backends_are_compared():
    assert len(house.compared_names(ast.parse('if backend.name == "numpy": pass'))) == 1


@pytest.mark.parametrize(
    "code",
    [
        "import torch",
        "import numpy as np",
        "from jax.experimental import pallas",
        "try:\n    import torch\nexcept ImportError:\n    torch = None",
        "class Lazy:\n    import mlx.core",
        "if True:\n    import tvm",
    ],
)
def test_frameworks_that_entry_modules_import_are_found(file, code):
    assert house.frameworks_at_import(file(code))


@pytest.mark.parametrize(
    "code",
    [
        "def load():\n    import torch",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch",
        "from mithril import hookimpl\nimport json",
    ],
    ids=["function", "type checkers", "others"],
)
def test_entry_modules_may_import_frameworks_in_functions(file, code):
    assert not house.frameworks_at_import(file(code))


def test_names_of_this_project_are_found(file):
    code = 'KNOWN = ("torch", "mithril-jax")\ntext = "install mithril-jax"\nfor name in ["ggml"]: pass\n'
    assert house.first_party_names(file(code)) == {"torch", "mithril-jax", "ggml"}


@pytest.mark.parametrize("code", ["exec('x = 1')", "y = eval('1')", "import builtins\nbuiltins.exec('')"])
def test_text_that_runs_is_found(file, code):
    assert house.text_runners(file(code))
    assert not house.text_runners(file("model.eval()\nre.compile('x')\nrun.exec(program)"))


def test_decisions_are_numbered_once_and_listed():
    folder = house.PROJECT / "docs" / "decisions"
    pages = sorted(path.name for path in folder.glob("0*.md"))
    assert [int(name[:4]) for name in pages] == list(range(1, len(pages) + 1))
    listed = (folder / "README.md").read_text()
    assert not [name for name in pages if f"({name})" not in listed]
