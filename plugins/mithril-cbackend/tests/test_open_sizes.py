"""Exported C whose sizes are arguments of a run: results, checks of sizes, and the arena that they need."""

import ctypes
import shutil
import subprocess

import numpy as np
import pytest

import mithril as ml
import mithril_cbackend
from mithril import ops
from mithril.graph import Builder, InputError
from mithril.models import (
    Conv2d,
    Embedding,
    Flatten,
    Gelu,
    GlobalAvgPool2d,
    IOKey,
    LayerNorm,
    Linear,
    MaxPool2d,
    Model,
    MultiHeadAttention,
    PositionalEmbedding,
    Relu,
)

STRICT = (
    "-std=c11 -O1 -march=native -ffp-contract=fast -fwrapv -fstrict-aliasing -Wall -Wextra -Wpedantic -Wconversion "
    "-Wcast-qual -Wstrict-prototypes -Werror"
)
PORTABLE = "-std=c11 -O0 -ffp-contract=fast -fwrapv -Wall -Wextra -Wpedantic -Wconversion -Werror"  # of any machine
OK, MISSING, UNINITIALIZED, MISALIGNED, SIZES, SMALL = 0, -1, -2, -3, -5, -6


def needs(*tools):
    missing = [t for t in tools if shutil.which(t) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


def perceptron():
    x = IOKey("input")
    model = Model.create(outputs={"output": Linear(10)(LayerNorm(48)(Gelu()(Linear(48)(x))))})
    return model, {"input": [ml.Dim("rows", 1, 40), 24]}


def encoder():
    x = IOKey("input")
    model = Model.create(outputs={"output": x + MultiHeadAttention(16, 2)(x)})
    return model, {"input": ["batch", "length", 16]}


def table():
    x = PositionalEmbedding(64)(Embedding(20, 32)(IOKey("input", dtype="int32")))
    return Model.create(outputs={"output": Linear(20)(LayerNorm(32)(x))}), {"input": ["batch", "length"]}


def cached():
    x, position = IOKey("input"), IOKey("position", dtype="int32", shape=[])
    x = x + MultiHeadAttention(32, 4, causal=True, cache=16)(x, position)
    return Model.create(outputs={"output": Linear(20)(x)}), {"input": [1, "length", 32]}


def images():
    x = MaxPool2d(2)(Relu()(Conv2d(16, 24, kernel_size=3, padding=1)(IOKey("input"))))
    x = Conv2d(24, 48, kernel_size=3, stride=2, padding=1)(x)
    return Model.create(outputs={"output": Linear(5)(Flatten()(x))}), {"input": ["n", 16, 8, 8]}


def pictures():
    """Return convolutions of open images: Winograd transforms, columns of pixels, columns of channels."""
    x = Relu()(Conv2d(16, 24, kernel_size=3, padding=1)(IOKey("input")))
    x = Conv2d(24, 48, kernel_size=3, stride=2, padding=1)(x)
    return Model.create(outputs={"output": GlobalAvgPool2d()(x)}), {"input": ["n", 16, "h", "w"]}


def exported(build, folder, inputs=None, **options):
    model, shapes = build()
    narrow = {"vector_bytes": 16}  # short kernels compile quickly
    compiled = ml.compile(model, "c", shapes=shapes, inference=True, cpu_options=narrow)
    compiled.bind(compiled.randomize_params(0))
    return compiled, mithril_cbackend.export(compiled, folder, inputs=inputs, **options)


def run(folder, *arguments):
    done = subprocess.run(["make", "-C", str(folder), "check", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs("gcc", "make")
@pytest.mark.parametrize(
    ("build", "compilers"),
    [
        (perceptron, {"gcc": STRICT, "clang": STRICT}),
        (encoder, {"gcc": PORTABLE}),
        (images, {"gcc": PORTABLE}),
        (pictures, {"gcc": PORTABLE}),
    ],
)
def test_one_exported_program_runs_several_sizes(build, compilers, tmp_path):
    _, result = exported(build, tmp_path)
    assert len(result.contents.cases) == 3
    for compiler, flags in compilers.items():
        if shutil.which(compiler):
            output = run(tmp_path, "-B", f"CC={compiler}", f"CFLAGS={flags}")
            assert output.count("largest difference") == 3


@needs("gcc", "make")
def test_int8_weights_run_several_sizes(tmp_path):
    """Store weights as bytes, for processors that have no instructions for them as well."""
    model = Model.create(outputs={"output": Linear(10)(Relu()(Linear(48)(IOKey("input"))))})
    shapes = {"input": [ml.Dim("rows", 1, 40), 24]}
    options = {"platform": "linux", "arch": "x86_64", "quantization": "int8"}
    compiled = ml.compile(model, "c", shapes=shapes, inference=True, mobile_options=options)
    compiled.bind(compiled.randomize_params(0))
    result = mithril_cbackend.export(compiled, tmp_path, library=None)
    assert 0 < result.quantization_error < 0.02
    assert len(result.contents.weights) < 0.4 * sum(x.nbytes for x in compiled.params.values())
    assert run(tmp_path, "-B", "CC=gcc", f"CFLAGS={PORTABLE}", "RUN=").count("largest difference") == 3


def library(folder, exported, sizes):
    """Load an exported library with typed functions, and a struct of sizes."""
    loaded = ctypes.CDLL(str(exported.library))
    for name in ("arena_size", "instance_size"):
        getattr(loaded, f"model_{name}").restype = ctypes.c_size_t
    return loaded, type("Sizes", (ctypes.Structure,), {"_fields_": [(n, ctypes.c_int32) for n in sizes]})


def address(x):
    return ctypes.c_void_p(x.ctypes.data)


def aligned(size):
    x = np.zeros(size + 64, np.uint8)
    return x[-x.ctypes.data % 64 :][:size]


@needs("gcc", "make")
def test_sizes_and_the_arena_are_checked(tmp_path):
    """Check each run: bounds, guards (64 positions), elements, and the bytes of the arena."""
    compiled, result = exported(table, tmp_path, library="shared")
    c, Sizes = library(tmp_path, result, ["batch", "length"])
    instance = aligned(c.model_instance_size())
    needed = {s: c.model_arena_size(ctypes.byref(Sizes(*s))) for s in ((1, 1), (2, 14), (3, 64), (0, 5))}
    assert 0 < needed[1, 1] < needed[2, 14] < needed[3, 64]
    for wrong in ((-1, 3), (1, -1), (1, 65), (1 << 26, 64), (1 << 30, 1)):
        assert c.model_arena_size(ctypes.byref(Sizes(*wrong))) == 0
    arena = aligned(needed[2, 14])
    weights = np.frombuffer(result.contents.weights, np.uint8)
    stored = aligned(weights.size)
    stored[:] = weights
    assert c.model_init(address(instance), address(arena), ctypes.c_size_t(arena.size)) == OK
    assert c.model_set_weights(address(instance), address(stored)) == OK
    rng = np.random.default_rng(0)
    for batch, length in ((2, 14), (1, 1), (1, 28), (2, 3), (0, 5)):
        x = rng.integers(0, 20, (batch, length)).astype(np.int32)
        expected = compiled({"input": x})["output"]
        out = np.full((max(batch, 1), length, 20), np.nan, np.float32)
        tokens = x if x.size else np.zeros(1, np.int32)
        sizes = Sizes(batch, length)
        assert c.model_run(address(instance), address(tokens), address(out), ctypes.byref(sizes)) == OK
        np.testing.assert_allclose(out[:batch], expected, rtol=1e-4, atol=1e-5)
    arguments = [address(instance), address(tokens), address(out)]
    assert c.model_run(*arguments, ctypes.byref(Sizes(3, 64))) == SMALL
    assert c.model_run(*arguments, ctypes.byref(Sizes(1, 65))) == SIZES
    assert c.model_run(*arguments, None) == MISSING


def test_the_header_documents_sizes_and_bounds(tmp_path):
    _, result = exported(perceptron, tmp_path)
    header = (tmp_path / "model.h").read_text()
    assert "int32_t rows; /* 1 to 40 */" in header
    assert "#define MODEL_INPUT_SHAPE {-1, 24}" in header
    assert "float32[rows, 24], row by row" in header
    highest = result.contents.open.arena({"rows": 40})
    assert f"#define MODEL_ARENA_BYTES {highest} " in header
    assert "int model_run(model_t *self, const float *input, float *output, const model_sizes_t *sizes);" in header


@needs("gcc", "make")
def test_state_of_fixed_size_is_carried_between_runs_of_several_lengths(tmp_path):
    inputs = {"input": np.random.default_rng(0).normal(size=(1, 2, 32)).astype(np.float32), "position": np.int32(0)}
    _, result = exported(cached, tmp_path, inputs)
    assert result.contents.cases[0].sizes == {"length": 2}
    run(tmp_path, "CC=gcc", f"CFLAGS={PORTABLE}")


@needs("gcc", "make")
def test_exported_bytes_of_an_open_batch(tmp_path):
    """Run convolutions and pools of bytes with channels last, with the instructions of this processor."""
    rng = np.random.default_rng(0)
    x = MaxPool2d(2)(Relu()(Conv2d(8, 16, kernel_size=3, padding=1)(IOKey("input"))))
    model = Model.create(outputs={"output": Linear(5)(Flatten()(Conv2d(16, 16, kernel_size=1)(x)))})
    exact = ml.compile(model, "c", shapes={"input": [32, 8, 6, 6]}, inference=True)
    exact.bind(exact.randomize_params(0))
    ranges = ml.calibrate_ranges(exact, [{"input": rng.normal(size=(32, 8, 6, 6)).astype(np.float32)}])
    options = {"static_inference": True, "quantization": {"ranges": ranges}}
    compiled = ml.compile(model, "c", shapes={"input": ["n", 8, 6, 6]}, **options)
    compiled.bind(exact.params)
    result = mithril_cbackend.export(compiled, tmp_path)
    assert len(result.contents.cases) == 3
    assert len(compiled.programs) == 1
    output = run(tmp_path, "-B", "CC=gcc", f"CFLAGS={STRICT}")
    assert output.count("largest difference") == 3


@needs("gcc", "make")
def test_the_users_inputs_decide_the_sizes_of_the_test(tmp_path):
    x = {"input": np.ones((5, 24), np.float32)}
    _, result = exported(perceptron, tmp_path, x)
    assert [case.sizes["rows"] for case in result.contents.cases] == [5, 8, 2]
    np.testing.assert_array_equal(result.contents.cases[0].inputs["input"], x["input"])


def blocks(n, sizes):
    """Return an exported program of the first ceil(n / 8) columns."""
    with Builder() as b:
        x = b.input("input", (ml.Dim("rows"), ml.Dim(n)), "float32")
        size = -(-x.shape[1] // 8)
        y = ops.exp(ops.slice(x, starts=(0,), stops=(size,), steps=(1,), axes=(1,)))
        y = ops.matmul(ops.transpose(y, perm=(1, 0)), ops.sin(y))  # with values in the arena
    return ml.compile(b.build({"output": y}), "c", cpu_options={"vector_bytes": 16}), sizes


@needs("gcc", "make")
def test_quotients_of_negative_sizes_are_rounded_down(tmp_path):
    compiled, sizes = blocks("length", (1, 7, 8, 9, 16, 17))
    result = mithril_cbackend.export(
        compiled, tmp_path, inputs={"input": np.ones((3, 9), np.float32)}, library="shared"
    )
    run(tmp_path, "CC=gcc", f"CFLAGS={STRICT}")
    c, Sizes = library(tmp_path, result, result.contents.open.names)
    for n in sizes:
        values = {"rows": 3, "length": n}
        struct = Sizes(**values)
        assert c.model_arena_size(ctypes.byref(struct)) == result.contents.open.arena(values)
    source = '#include "model.h"\n#include <stdio.h>\nint main(void) {\n  for (int n = 1; n < 18; ++n) {\n'
    source += "    const model_sizes_t sizes = {.rows = 3, .length = n};\n"
    source += '    printf("%zu ", MODEL_OUTPUT_SIZE(sizes));\n  }\n  return 0;\n}\n'
    (tmp_path / "sizes.c").write_text(source)
    subprocess.run(["gcc", *STRICT.split(), "sizes.c", "-o", "sizes"], cwd=tmp_path, check=True)
    printed = subprocess.run([tmp_path / "sizes"], capture_output=True, text=True, check=True).stdout
    assert [int(n) for n in printed.split()] == [(-(-n // 8)) ** 2 for n in range(1, 18)]


def short_table():
    x = PositionalEmbedding(4)(Embedding(20, 8)(IOKey("input", dtype="int32")))
    return Model.create(outputs={"output": Linear(5)(x)}), {"input": ["batch", "length"]}


def test_the_sizes_of_the_test_satisfy_the_guards(tmp_path):
    """Export a table of 4 rows, although the typical length is 8."""
    _, result = exported(short_table, tmp_path)
    examples = [case.sizes for case in result.contents.cases]
    assert len(examples) == 3
    assert all(result.contents.open.allows(sizes) for sizes in examples)


def test_no_allowed_sizes_for_the_test_are_an_error(tmp_path):
    with Builder() as b:
        x = b.input("input", (ml.Dim("n", 65),), "float32")
        y = ops.sum(ops.exp(ops.reshape(x, shape=(71, -1))), axis=0)
    compiled = ml.compile(b.build({"output": y}), "c")
    with pytest.raises(InputError, match="no sizes are known"):
        mithril_cbackend.export(compiled, tmp_path)
    result = mithril_cbackend.export(compiled, tmp_path, inputs={"input": np.ones(142, np.float32)})
    assert result.contents.cases[0].sizes == {"n": 142}
