"""``ml.diff``: agreement is said, a wrong backend and a wrong pass are found, with a reproducer that runs."""

from __future__ import annotations

import json

import numpy as np
import pytest
from click.testing import CliRunner

import mithril as ml
from mithril.compiler.weight_files import load_file
from mithril.graph import parse
from mithril.models import Dropout, LayerNorm, Linear, Model, Softmax, Tanh
from mithril_numpy.backend import NumpyBackend
from mithril_tools.cli import main


def model():
    net = Model()
    net |= Linear(8, name="first")(input="x", output="h")
    net += Tanh(name="bend")(input="h", output="t")
    net += LayerNorm(name="norm")(input="t", output="n")
    net += Softmax(name="out")(input="n", output="y")
    return net


X = {"x": np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)}


class Wrong(NumpyBackend):
    """NumPy, but tanh is another function."""

    name = "wrong"

    def table(self, options=None):
        table = super().table(options).extend()
        table.function("tanh")(lambda call: f"np.sin({call.x})")
        return table


def test_backends_that_agree(backend):
    report = ml.diff(model(), ["numpy", backend], X)
    assert report, str(report)
    assert str(report).endswith("everything agrees")
    assert max(report.outputs.values()) < 1e-4


def test_the_first_operation_that_departs_is_named(tmp_path):
    report = ml.diff(model(), ["numpy", Wrong()], X, reproducer=tmp_path / "found")
    assert not report
    assert report.first.node.op.name == "tanh"
    text = str(report)
    for word in ("tanh", "bend", "ulp", "the operation itself differs", "test_diff.py"):
        assert word in text, text
    graph = parse((tmp_path / "found" / "graph.txt").read_text())
    operands = load_file(tmp_path / "found" / "operands.safetensors")
    assert [n.op.name for n in graph.nodes] == ["tanh"]
    assert set(operands) == {i.name for i in graph.inputs}


def spoil(graph):
    """Negate the results of tanh."""
    from mithril.ops import neg

    node = next((n for n in graph.nodes if n.op.name == "tanh"), None)
    if node is None or any(n.op.name == "neg" for n in graph.nodes):
        return graph
    editor, reader = graph.edit(), graph.users[node.result][0]
    with editor.before(reader):
        new = neg(node.result)
    operands = tuple(new if v is node.result else v for v in reader.operands)
    editor.replace_node(reader, reader.replaced(operands=operands))
    return editor.freeze()


def test_a_pass_that_changes_the_result_is_named():
    report = ml.diff(model(), ["numpy"], X, across="passes", custom_passes=[spoil])
    assert not report
    assert report.culprit_pass == "spoil"
    assert "spoil" in str(report)
    assert ml.diff(model(), ["numpy"], X, across="passes")


def test_models_with_state_and_randomness(backend):
    net = Model()
    net |= Linear(4)(input="x", output="h")
    net += Dropout(0.5)(input="h", output="y")
    assert ml.diff(net, ["numpy", backend], X)


def test_one_backend_is_too_few():
    with pytest.raises(ml.OptionError, match="two backends"):
        ml.diff(model(), ["numpy"], X)


# -- the command line ---------------------------------------------------------------------------------------------
FILE = """
from mithril.models import Linear, Model, Relu

def net():
    model = Model()
    model |= Linear(4, name="a")(input="x", output="h")
    model += Relu()(input="h", output="y")
    return model

number = 3
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "mine_for_cli.py").write_text(FILE)
    return f"{tmp_path / 'mine_for_cli.py'}"


def call(*arguments):
    return CliRunner().invoke(main, list(arguments))


def test_compile_prints_the_source(file, tmp_path):
    done = call("compile", f"{file}:net", "--shape", "x=2,3")
    assert done.exit_code == 0, done.output
    assert "def forward(params, inputs):" in done.output
    done = call("compile", f"{file}:net", "--shape", "x=B,3", "--out", str(tmp_path / "made.py"))
    assert done.exit_code == 0, done.output
    assert "def forward" in (tmp_path / "made.py").read_text()
    assert "16" in call("compile", f"{file}:net", "--shape", "x=2,3", "--summary").output


def test_diff_on_the_command_line(file):
    done = call("diff", f"{file}:net", "--shape", "x=2,3", "--backends", "numpy,jax")
    assert done.exit_code == 0, done.output
    assert "everything agrees" in done.output
    assert call("diff", f"{file}:net", "--shape", "x=2,3", "--across", "passes").exit_code == 0


def test_explain_on_the_command_line(file):
    assert "linear-activation" in call("explain", f"{file}:net", "--shape", "x=2,3").output
    done = call("explain", f"{file}:net", "--shape", "x=2,3", "--rule", "silu")
    assert done.exit_code == 0, done.output
    assert "silu" in done.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["compile", "nosuch.py:net"], "there is no file"),
        (["compile", "{file}:nett", "--shape", "x=2,3"], "did you mean 'net'?"),
        (["compile", "{file}:number"], "no model"),
        (["compile", "{file}"], "names no model"),
        (["compile", "{file}:net"], "Cannot infer shape for tensor 'x'"),
        (["compile", "{file}:net", "--shape", "x"], "expected NAME=VALUE"),
        (["explain", "{file}:net", "--shape", "x=2,3", "--rule", "gelo"], "gelu"),
    ],
)
def test_mistakes_on_the_command_line(file, arguments, message):
    done = call(*[a.replace("{file}", file) for a in arguments])
    assert done.exit_code != 0
    assert message in done.output
    assert "Traceback" not in done.output


def test_bench_on_the_command_line(file):
    shape = ("--shape", "x=N,3", "--backends", "numpy", "--iterations", "3", "--warmup", "1")
    done = call("bench", f"{file}:net", *shape, "--batches", "1,8", "--operations")
    assert done.exit_code == 0, done.output
    assert "items/s" in done.output and "FLOP/s" in done.output
    rows = json.loads(call("bench", f"{file}:net", *shape, "--batches", "1,8", "--json").output)
    assert [row["batch"] for row in rows] == [1, 8]
    assert call("bench", f"{file}:net", *shape, "--batches", "1,x").exit_code == 1
