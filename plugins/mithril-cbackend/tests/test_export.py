"""Exported C: compiled without warnings, without Python and TVM, gives what the model gives."""

import shutil
import subprocess
from types import SimpleNamespace

import pytest

import mithril as ml
import mithril_cbackend
from mithril.errors import MithrilError
from mithril.models import Conv2d, LayerNorm, Linear, Model, MultiHeadAttention, Relu

GCC = shutil.which("gcc")
needs_gcc = pytest.mark.skipif(GCC is None, reason="there is no gcc")


def mlp():
    model = Model()
    for k, size in enumerate((32, 10)):
        model += Linear(size, name=f"l{k}")
        if k == 0:
            model += Relu()
    return model, (5, 16)


def normalised():
    model = Model()
    model += LayerNorm(name="n")
    model += Linear(7, name="l")
    return model, (6, 24)


def image():
    model = Model()
    model += Conv2d(4, kernel_size=3, padding=1, name="c")
    model += Relu()
    return model, (1, 3, 8, 8)


def attention():
    model = Model()
    model += MultiHeadAttention(heads=2, name="a")
    return model, (2, 5, 16)


def make(folder, *arguments):
    done = subprocess.run(["make", "-C", str(folder), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_gcc
@pytest.mark.parametrize("build", [mlp, normalised, image, attention], ids=lambda f: f.__name__)
def test_exported_c_gives_the_same(build, tmp_path):
    model, shape = build()
    name = "query" if build is attention else "input"
    compiled = ml.compile(model, "c", shapes={name: list(shape)}, inference=True)
    compiled.bind(compiled.randomize_params(seed=1))
    mithril_cbackend.export(compiled, tmp_path)
    assert "tvm" not in (tmp_path / "model.c").read_text().lower()
    assert "largest difference" in make(tmp_path, "check")


@needs_gcc
def test_sanitizers_are_silent(tmp_path):
    model, shape = mlp()
    compiled = ml.compile(model, "c", shapes={"input": list(shape)}, inference=True)
    compiled.bind(compiled.randomize_params(seed=1))
    mithril_cbackend.export(compiled, tmp_path)
    flags = "-std=c11 -O1 -g -Wall -Werror -fsanitize=address,undefined -fno-sanitize-recover=all"
    make(tmp_path, "check", f"CFLAGS={flags}")


@needs_gcc
@pytest.mark.skipif(shutil.which("valgrind") is None, reason="there is no valgrind")
def test_valgrind_is_silent(tmp_path):
    model, shape = normalised()
    compiled = ml.compile(model, "c", shapes={"input": list(shape)}, inference=True)
    compiled.bind(compiled.randomize_params(seed=1))
    mithril_cbackend.export(compiled, tmp_path)
    make(tmp_path, "all", "CFLAGS=-std=c11 -O1 -g -Wall -Werror")
    done = subprocess.run(
        ["valgrind", "--error-exitcode=9", "--leak-check=full", str(tmp_path / "model_test")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_other_backends_do_not_export(tmp_path):
    other = SimpleNamespace(programs=[SimpleNamespace(executable=object())], backend=SimpleNamespace(name="numpy"))
    with pytest.raises(MithrilError, match="backend 'numpy' does not export C"):
        mithril_cbackend.export(other, tmp_path)
