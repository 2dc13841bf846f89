"""The rows of docs/migrating.md: the column of the other framework and that of mithril have one result."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import mithril as ml
from mithril import models, ops

PAGE = (Path(__file__).parents[1] / "docs/migrating.md").read_text()
RNG = np.random.default_rng(0)
ARRAYS = {
    "x": RNG.normal(size=(4, 8)).astype(np.float32),
    "y": RNG.normal(size=(4, 8)).astype(np.float32),
    "w": RNG.normal(size=(8, 3)).astype(np.float32),
    "labels": np.array([0, 2, 1, 2], np.int32),
    "image": RNG.normal(size=(2, 3, 16, 16)).astype(np.float32),
}


def rows(chapter, head):
    """Return the rows of the tables of a chapter whose first column has this head."""
    text = re.search(rf"^## {chapter}$(.*?)(?=^## |\Z)", PAGE, re.M | re.S)[1]
    tables = re.findall(rf"^\| {head} \|.*\n\|[-|]*\n((?:\|.*\n)+)", text, re.M)
    lines = [line for table in tables for line in table.splitlines()]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def code(cell):
    assert re.fullmatch(r"`[^`]+`", cell), cell
    return cell.strip("`")


def mithril(cell):
    names = {**{n: getattr(models, n) for n in models.__all__}, **ARRAYS, "ml": ml, "ops": ops, "np": np}
    names["model"] = models.Sequential(models.Linear(16), models.Relu(), models.Linear(3))
    names["ml"] = type("ml", (), {**{n: getattr(ml, n) for n in dir(ml) if not n.startswith("_")}})
    names["ml"].Trainer = lambda *args, **options: ml.Trainer(*args, **{"backend": "numpy", **options})
    return eval(code(cell), names)


def assert_same(expected, result):
    expected = np.asarray(expected, np.float64)
    assert expected.shape == np.shape(result)
    np.testing.assert_allclose(np.asarray(result, np.float64), expected, rtol=1e-5, atol=1e-5)


PYTORCH = rows("PyTorch", "PyTorch")
VALUES = [row for row in PYTORCH if len(row) == 2 and row[1].startswith("`ops.")]
LAYERS = [row for row in PYTORCH if len(row) == 3]
CALLS = [row for row in PYTORCH if len(row) == 2 and not row[1].startswith("`ops.")] + rows("Keras", "Keras")
JAX = rows("JAX and Flax", "JAX")


def test_the_tables_are_read():
    assert [len(VALUES) >= 35, len(LAYERS) >= 15, len(CALLS) >= 30, len(JAX) >= 18] == [True] * 4


@pytest.mark.parametrize("row", VALUES, ids=lambda row: row[0])
def test_an_operation_of_pytorch(row):
    torch = pytest.importorskip("torch")
    tensors = {name: torch.tensor(a) for name, a in ARRAYS.items()}
    expected = eval(code(row[0]), {**tensors, "torch": torch, "F": torch.nn.functional})
    assert_same(expected.float().numpy(), mithril(row[1]))


@pytest.mark.parametrize("row", LAYERS, ids=lambda row: row[0])
def test_a_layer_of_pytorch(row):
    torch = pytest.importorskip("torch")
    module = eval(code(row[0]), {"nn": torch.nn})
    inputs = ARRAYS[code(row[2])]
    compiled = ml.compile(mithril(row[1]), "numpy", shapes={"input": list(inputs.shape)})
    result = compiled.evaluate(compiled.randomize_params(0), {"input": inputs}, state=compiled.initial_state(0))[0]
    assert next(iter(result.values())).shape == tuple(module(torch.tensor(inputs)).shape)
    expected = sorted(p.numel() for p in module.parameters())
    assert sorted(p.size for p in compiled.randomize_params(0).values()) == expected


@pytest.mark.parametrize("row", CALLS, ids=lambda row: row[0])
def test_a_call_of_training(row, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if '"torch"' in row[1]:
        pytest.importorskip("torch")
    assert mithril(row[1]) is not None


@pytest.mark.parametrize("row", JAX, ids=lambda row: row[0])
def test_an_operation_of_jax(row):
    jax = pytest.importorskip("jax")
    arrays = {name: jax.numpy.asarray(a) for name, a in ARRAYS.items()}
    expected = eval(code(row[0]), {**arrays, "jax": jax, "jnp": jax.numpy})
    assert_same(expected, mithril(row[1]))


@pytest.mark.filterwarnings("ignore:.*is the predecessor's:FutureWarning")
@pytest.mark.parametrize(
    "block", re.findall(r"^```python\n(.*?)^```", PAGE, re.S | re.M), ids=["module", "predecessor"]
)
def test_blocks_run(block):
    if "mithril_compat" in block:
        pytest.importorskip("mithril_compat")
    exec(compile(block, "docs/migrating.md", "exec"), {"__name__": "guide"})


PREDECESSOR = rows("The predecessor of mithril", "predecessor")
REWRITTEN = [row for row in PREDECESSOR if re.fullmatch(r"`[^`]+`", row[1])]


@pytest.mark.parametrize("row", REWRITTEN, ids=lambda row: row[0])
def test_a_name_of_the_predecessor_is_rewritten(row):
    codemod = pytest.importorskip("mithril_compat.migration.codemod")
    names = "import mithril as ml\nfrom mithril.models import Convolution2D\n"
    result = codemod.migrated(f"{names}{code(row[0])}\n")
    assert (result.source.splitlines()[-1], result.remaining) == (code(row[1]), [])
    assert len(REWRITTEN) >= 8
