"""``mithril migrate``: programs of the predecessor in today's spelling compute the same, without this package."""

import subprocess
import sys
import textwrap

import pytest
from click.testing import CliRunner

from mithril_compat.migration.codemod import migrated
from mithril_compat.migration.command import migrate

HEAD = """
import mithril as ml
import numpy as np
from mithril.models import {names}

backend = ml.NumpyBackend(dtype=ml.float64)
"""
# Both runs use the same numbers: parameters by shape, since their names are paths today.
TAIL = """
params = {{name: backend.ones(x.shape) * 0.1 for name, x in compiled.randomize_params().items()}}
x = np.linspace(-1, 1, {size}).reshape({shape})
{call}
print([np.round(np.asarray(outputs[name]), 5).tolist() for name in {outputs}])
"""
PROGRAMS = {
    "layers": (
        "Add, Buffer, Linear, Model, Relu, SiLU, Softmax",
        """
        block = Model()
        block |= Linear(dimension=4, use_bias=False).connect(input="x", output="hidden")
        block += SiLU()
        block += Linear(3).connect(output="output")
        block.expose_keys("output")
        model = Model()
        model |= block.connect(x="image", output="features")
        model |= Softmax(axis=-1).connect(input="features", output="shares")
        model |= Add().connect(left="shares", right="features", output="total")
        model.expose_keys("total", copy="shares")
        model.set_shapes(image=[2, 3])
        model.freeze()
        compiled = ml.compile(model, backend, data_keys={"image"}, safe_names=True)
        """,
        6, (2, 3), 'outputs = compiled.evaluate(params, data={"image": x})', ["total", "copy"],
    ),
    "images": (
        "Convolution2D, Flatten, Linear, MaxPool2D, Mean, Model, Relu",
        """
        model = Model()
        model |= Convolution2D(kernel_size=3, out_channels=2, padding=1, use_bias=False).connect(input="input")
        model += Relu()
        model += MaxPool2D(kernel_size=2)
        model += Flatten(start_dim=1)
        model += Linear(3)
        model += Mean(axis=1, keepdim=True).connect(output="output")
        compiled = ml.compile(model, backend, data_keys={"input"}, shapes={"input": [2, 1, 4, 4]})
        """,
        32, (2, 1, 4, 4), 'outputs = compiled.evaluate(params, {"input": x})', ["output"],
    ),
    "training": (
        "Linear, Mean, Model, SquaredError, Tanh, TrainModel",
        """
        model = Model()
        model |= Linear(4).connect(input="input")
        model += Tanh()
        model += Linear(1).connect(output="output")
        model.expose_keys("output")
        training = TrainModel(model)
        training.add_loss(SquaredError(), input="output", target="target", reduce_steps=[Mean()])
        constants = {"input": np.ones((5, 2)), "target": np.zeros((5, 1))}
        compiled = ml.compile(model=training, backend=backend, constant_keys=constants)
        """,
        1, (1,), "outputs, gradients = compiled.evaluate(params, output_gradients=True)", ["final_cost"],
    ),
    "renamed": (
        "Divide, Model, Multiply, Power",
        """
        model = Model()
        model |= Power().connect(base="a", exponent="b", output="powers")
        model |= Divide().connect(numerator="powers", denominator="c", output="ratio")
        model.merge_connections("a", "c", name="x")
        model.rename_key(model["ratio"] if hasattr(model, "merge") else model.ratio, "result")
        model.expose_keys("result")
        compiled = ml.compile(model, backend, data_keys={"x", "b"}, shapes={"x": [4], "b": [4]})
        """,
        4, (4,), 'outputs = compiled.evaluate({}, {"x": x + 2, "b": x})', ["result"],
    ),
}  # fmt: skip


def source_of(name):
    names, body, size, shape, call, outputs = PROGRAMS[name]
    tail = TAIL.format(size=size, shape=shape, call=call, outputs=outputs)
    return HEAD.format(names=names) + textwrap.dedent(body) + tail


def printed(arguments, folder):
    done = subprocess.run([sys.executable, *arguments], cwd=folder, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_migrated_programs_compute_the_same_without_the_old_names(tmp_path):
    files = [tmp_path / f"{name}.py" for name in PROGRAMS]
    for file in files:
        file.write_text(source_of(file.stem))
    imports = f"import {', '.join(PROGRAMS)}\n"
    (tmp_path / "all.py").write_text(imports)
    before, warnings = printed(["-m", "mithril_compat", "all.py"], tmp_path)
    assert "PredecessorWarning" in warnings
    assert len(before.splitlines()) == len(PROGRAMS)
    done = CliRunner().invoke(migrate, list(map(str, files)))
    assert done.exit_code == 0, done.output
    refused = "import os, sys\nos.environ['MITHRIL_DISABLE_PLUGINS'] = 'compat'\nsys.modules['mithril_compat'] = None\n"
    (tmp_path / "all.py").write_text(refused + imports)
    assert printed(["-W", "error", "all.py"], tmp_path) == (before, "")


def test_places_without_an_equivalent_stay_and_are_listed(tmp_path):
    file = tmp_path / "program.py"
    file.write_text(
        "from mithril.models import Arange, Model\n\nmodel = Model()\nmodel += Arange(stop=3)\nprint(model.cout)\n"
    )
    done = CliRunner().invoke(migrate, [str(file)])
    assert done.exit_code == 1
    assert done.output.splitlines() == [
        f"{file}: unchanged, 2 to decide",
        f"{file}:4: 'Arange': today has no layer of this meaning; today, the operation in mithril.ops",
        f"{file}:5: 'cout': the name of the output: model['output']",
    ]


def test_the_difference_is_printed_without_writing(tmp_path):
    file = tmp_path / "program.py"
    file.write_text("from mithril.models import SiLU  # an activation\n\nlayer = SiLU()\n")
    done = CliRunner().invoke(migrate, ["--diff", str(file)])
    assert "-layer = SiLU()\n+layer = Silu()\n" in done.output
    assert "layer = SiLU()" in file.read_text()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Flatten()", "Flatten(start=0)"),
        ("Gelu(True)", 'Gelu(approximate="tanh")'),
        ("Convolution1D(3, 8, stride=2)", "Conv1d(8, kernel_size=3, stride=2)"),
        ("Clamp(min_val=0, max_val=1)", "Clip(low=0, high=1)"),
        ("Variance(correction=1.0)", "Variance(ddof=1)"),
        ("Embedding(10, dim=4)", "Embedding(vocabulary=10, size=4)"),
        ('Linear(3, use_bias=False, name="head")', 'Linear(dimension=3, bias=False, name="head")'),
        ("MLP([Relu(), Buffer()], [4, 1])", 'MLP([4, 1], activation=["relu"])'),
        ('IOKey("x", shape=[2], differentiable=True)', 'IOKey("x", shape=[2], trainable=True)'),
    ],
)
def test_constructors(old, new):
    names = "Flatten, Gelu, Convolution1D, Clamp, Variance, Embedding, Linear, MLP, Relu, Buffer, IOKey"
    result = migrated(f"from mithril.models import {names}\nx = {old}\n")
    assert (result.source.splitlines()[-1], result.remaining) == (f"x = {new}", [])


def test_other_programs_are_left_unchanged(tmp_path):
    source = "import torch\n\nx = torch.nn.Linear(3, 4).connect\n"
    assert migrated(source).source == source
    (tmp_path / "broken.py").write_text("def (:\n")
    done = CliRunner().invoke(migrate, [str(tmp_path / "broken.py")])
    assert "is not valid Python" in done.output
