"""``python -m mithril_compat`` runs programs of the predecessor; programs of today keep their meaning."""

import subprocess
import sys
import textwrap

import pytest

OLD = """
import mithril as ml
from mithril.models import Model, Linear, Relu
from mithril.types import DataType
from mithril_parts import NAME
from parts import head

model = Model()
model |= Linear(dimension=4).connect(input="input")
model += Relu()
model += head().connect(output="output")
backend = ml.NumpyBackend(dtype=ml.float64)
compiled = ml.compile(model, backend, shapes={"input": [2, 3]}, jit=False)
params = {name: backend.ones(*x.shape) for name, x in compiled.randomize_params().items()}
print(compiled.evaluate(params, {"input": backend.ones(2, 3)})["output"].tolist(), __name__, NAME)
"""
PART = """
from mithril.models import Linear


def head():
    return Linear(dimension=1, use_bias=False)
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "program.py").write_text(textwrap.dedent(OLD))
    (tmp_path / "parts.py").write_text(textwrap.dedent(PART))
    (tmp_path / "mithril_parts.py").write_text("import mithril\n\nNAME = mithril.__name__\n")  # a plugin's package
    return tmp_path


def run(*arguments, folder):
    done = subprocess.run([sys.executable, *arguments], cwd=folder, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done


def test_a_program_and_its_modules_run_unchanged(folder):
    done = run("-m", "mithril_compat", "program.py", folder=folder)
    assert done.stdout == "[[16.0], [16.0]] __main__ mithril\n"
    assert "PredecessorWarning: 'connect' is the predecessor's" in done.stderr
    assert "program.py:9" in done.stderr
    written = {file.name.partition(".")[0] for file in folder.glob("__pycache__/*")}
    assert "parts" not in written  # bytecode of a redirected module would mislead Python


TODAY = [
    'print(ml.compile(Linear(3), "numpy", shapes={"input": [2, 4]}).count_params())',
    'print(ml.Model(Linear(3), Relu()).outputs)',
    'print(ml.compile(ml.Model(Linear(3), Relu(), Linear(2)), "numpy", shapes={"input": [2, 4]}).get_shapes())',
    'print(Linear(3)(input="x").label)',
    'm = ml.Model(); m |= Linear(2)(input="a", output="b"); m |= Linear(2)(input="b"); print(m.inputs, m.outputs)',
    'print(hasattr(Linear(3), "connect"), hasattr(ml.Model(), "cout"), hasattr(ml, "TBD"))',
    'm = ml.Model(); m += Linear(2); m.freeze("*"); print(m.frozen)',
    'x = ml.IOKey("x"); print(ml.Model.create(outputs=x * 2 + 1).inputs)',
    'print(ml.NumpyBackend().ones((2, 3), "int32").tolist())',
    'from mithril import models; print(len(models.__all__), hasattr(models, "Convolution2D"))',
    'print(ml.compile(ml.Model(LSTMCell(3)), "numpy", shapes={"input": [2, 4]}).count_params())',
    'print(round(float(CrossEntropy()(np.eye(3, dtype="f4"), np.arange(3))), 5))',
]  # fmt: skip
START = "import mithril as ml\nimport numpy as np\nfrom mithril.models import CrossEntropy, LSTMCell, Linear, Relu\n"


def test_programs_of_today_mean_the_same_next_to_it(tmp_path):
    (tmp_path / "plain.py").write_text(START + "\n".join(TODAY))
    (tmp_path / "next.py").write_text("import mithril_compat.models\n" + START + "\n".join(TODAY))
    plain, beside = (run(name, folder=tmp_path).stdout for name in ("plain.py", "next.py"))
    assert plain == beside
    assert len(plain.splitlines()) == len(TODAY)
