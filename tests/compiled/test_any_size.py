"""Programs of the C backend with symbolic sizes: one program runs all of them, or a decision says why not."""

import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

import mithril as ml
from mithril import ops
from mithril.graph import symbols
from mithril.models import (
    AvgPool2d,
    Conv2d,
    ConvTranspose2d,
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
    Softmax,
)

pytest.importorskip("mithril_cbackend")
SIZES = (1, 2, 5, 7, 8, 9, 15, 16, 17, 33, 64, 200, 0, 3)


def perceptron():
    x = IOKey("input")
    y = LayerNorm(48)(Gelu()(Linear(48)(Relu()(Linear(40)(x)))))
    return Model.create(outputs={"output": Softmax()(Linear(10)(y))})


def block():
    x = IOKey("input")
    y = x + MultiHeadAttention(32, 4, causal=True)(LayerNorm(32)(x))
    return Model.create(outputs={"output": y + Linear(32)(Gelu()(Linear(64)(y)))})


def compiled_on(backend, model, shape, **options):
    return ml.compile(model, backend, shapes={"input": list(shape)}, inference=True, **options)


def fallbacks(compiled):
    return [d.message for d in compiled.decisions if "one program for each size" in d.message]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("model", "rest"), [(perceptron, (24,)), (block, (12, 32))])
def test_one_program_runs_all_sizes(model, rest, threads):
    any_size = compiled_on("c", model(), (None, *rest), num_threads=threads)
    reference = compiled_on("numpy", model(), (None, *rest))
    params = any_size.randomize_params(0)
    rng = np.random.default_rng(0)
    for n in SIZES:
        x = {"input": rng.normal(size=(n, *rest)).astype(np.float32)}
        expected = reference.evaluate(reference.randomize_params(0), x)["output"]
        for _ in range(2):
            result = any_size.evaluate(params, x)["output"]
            np.testing.assert_allclose(result, expected, rtol=2e-5, atol=2e-6, err_msg=f"size {n}")
    assert len(any_size.programs) == 1
    assert not fallbacks(any_size)


def test_results_of_earlier_sizes_are_not_overwritten():
    compiled = compiled_on("c", perceptron(), (None, 24))
    params = compiled.randomize_params(0)
    arrays = [np.random.default_rng(n).normal(size=(n, 24)).astype(np.float32) for n in (4, 9, 4, 9)]
    results = [compiled.evaluate(params, {"input": x})["output"] for x in arrays]
    copies = [r.copy() for r in results]
    for x in arrays:
        compiled.evaluate(params, {"input": -x})
    for result, copy in zip(results, copies, strict=True):
        np.testing.assert_array_equal(result, copy)


def test_memory_is_that_of_the_size():
    compiled = compiled_on("c", perceptron(), (None, 24))
    params = compiled.randomize_params(0)
    peaks = []
    for n in (8, 512):
        x = {"input": np.zeros((n, 24), np.float32)}
        compiled.evaluate(params, x)
        peaks.append(compiled.programs[-1].executable.memory_of({"input_0": n}))
    assert peaks[1] > 32 * peaks[0] / 2


def convolutions():
    x = Relu()(Conv2d(4, 8, kernel_size=3, padding=1)(IOKey("input")))
    x = MaxPool2d(2)(Conv2d(8, 8, kernel_size=1)(x))
    x = Conv2d(8, 16, kernel_size=5, stride=2, padding=2)(Conv2d(8, 8, kernel_size=3, padding=1, groups=8)(x))
    return Model.create(outputs={"output": Linear(3)(Flatten()(AvgPool2d(2)(x)))})


@pytest.mark.parametrize("threads", [1, 2])
def test_convolutions_run_any_batch(threads):
    compiled = compiled_on("c", convolutions(), (None, 4, 16, 16), num_threads=threads)
    reference = compiled_on("numpy", convolutions(), (None, 4, 16, 16))
    params = reference.randomize_params(0)
    for n in (1, 3, 8, 0):
        x = {"input": np.random.default_rng(n).normal(size=(n, 4, 16, 16)).astype(np.float32)}
        result, expected = compiled.evaluate(params, x)["output"], reference.evaluate(params, x)["output"]
        np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5)
    assert len(compiled.programs) == 1


def test_small_maps_are_multiplied_by_several_images():
    """Select plans by the batch; the last block of images is smaller."""
    from mithril_cbackend.lowering.conv.direct_convolution import cheaper_plan
    from mithril_cbackend.lowering.conv.plans_by_size import BySize

    x = Relu()(Conv2d(48, 48, kernel_size=3, padding=1)(IOKey("input")))  # 5x5: odd
    x = Relu()(Conv2d(48, 64, kernel_size=3)(x))  # 3x3
    x = Conv2d(256, 32, kernel_size=3, padding=1)(Conv2d(64, 256, kernel_size=2)(x))  # 2x2
    model = Model.create(outputs={"output": x})
    compiled = compiled_on("c", model, (None, 48, 5, 5), num_threads=2)
    reference = compiled_on("numpy", model, (None, 48, 5, 5))
    executable = compiled.programs[-1].executable
    kernels = [k for k in executable.program.kernels.values() if k.anchor.op is ops.conv]
    plans = [cheaper_plan(k, executable.machine, False) for k in kernels]
    assert any(isinstance(p, BySize) for p in plans)
    params = reference.randomize_params(0)
    for n in (1, 2, 3, 5, 6, 8, 9, 23, 0):
        x = {"input": np.random.default_rng(n).normal(size=(n, 48, 5, 5)).astype(np.float32)}
        result, expected = compiled.evaluate(params, x)["output"], reference.evaluate(params, x)["output"]
        np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-4)
    assert len(compiled.programs) == 1


def test_convolutions_and_pools_run_any_image():
    """Strides, dilation, groups, padding and none; sizes at the edges of vectors, smaller ones, and none at all."""
    x = Relu()(Conv2d(4, 8, kernel_size=3, stride=2, padding=1)(IOKey("input")))
    x = MaxPool2d(3, stride=2, padding=1)(Conv2d(8, 8, kernel_size=3, padding=2, dilation=2, groups=8)(x))
    x = Conv2d(8, 16, kernel_size=5, padding=1)(AvgPool2d(2, stride=1)(x)) + Conv2d(8, 16, kernel_size=4)(x)
    model = Model.create(outputs={"output": Linear(3)(GlobalAvgPool2d()(x)), "image": x})
    compiled = compiled_on("c", model, (None, 4, None, None), num_threads=2)
    reference = compiled_on("numpy", model, (None, 4, None, None))
    params = reference.randomize_params(0)
    for shape in ((1, 13, 16), (1, 31, 64), (2, 40, 15), (1, 14, 151), (3, 127, 13), (0, 13, 13)):
        x = {"input": np.random.default_rng(0).normal(size=(shape[0], 4, *shape[1:])).astype(np.float32)}
        results, expected = compiled.evaluate(params, x), reference.evaluate(params, x)
        for name in expected:
            np.testing.assert_allclose(results[name], expected[name], rtol=1e-4, atol=1e-5, err_msg=str(shape))
    with pytest.raises(ml.MithrilError):  # no window fits
        compiled.evaluate(params, {"input": np.zeros((1, 4, 3, 3), np.float32)})
    assert len(compiled.programs) == 1


@pytest.mark.parametrize("options", [{}, {"padding": 1}, {"padding": (2, 3)}], ids=str)
@pytest.mark.parametrize("stride", [2, (3, 1)])
def test_transposed_convolutions_run_any_image(stride, options):
    """Copy pixels at the distance of the stride; padding crops the result."""
    model = ConvTranspose2d(8, 16, kernel_size=3, stride=stride, **options)
    for shape in ((None, 8, None, None), (None, 8, 7, None)):
        compiled, reference = (compiled_on(b, model, shape) for b in ("c", "numpy"))
        params = reference.randomize_params(0)
        for n, width in ((1, 5), (2, 17), (3, 4)):
            x = {"input": np.random.default_rng(0).normal(size=(n, 8, 7, width)).astype(np.float32)}
            result, expected = (c.evaluate(params, x)["output"] for c in (compiled, reference))
            np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5, err_msg=str((n, width)))
        assert len(compiled.programs) == 1


def test_latency_asks_for_exact_sizes():
    compiled = compiled_on("c", perceptron(), (None, 24), optimize_for="latency")
    params = compiled.randomize_params(inputs={"input": np.zeros((2, 24), np.float32)})
    for n in (2, 3):
        compiled.evaluate(params, {"input": np.zeros((n, 24), np.float32)})
    assert len(compiled.programs) == 2
    assert len(fallbacks(compiled)) == 1


def test_an_accidental_failure_is_not_stored(tmp_path, monkeypatch):
    from mithril_cbackend.program import compile_graph

    compiled, options = compile_graph.compiled, {"shapes": {"input": [None, 8]}, "cache": True}

    def failing(graph, *arguments):
        if any(symbols(*i.type.shape) for i in graph.inputs):
            raise ml.BackendError("no space left on device")
        return compiled(graph, *arguments)

    counts = []
    for function in (failing, compiled):
        monkeypatch.setattr(compile_graph, "compiled", function)
        model = ml.compile(Linear(3), "c", inference=True, cache_dir=str(tmp_path), **options)
        params = model.randomize_params(0)
        for n in (2, 5):
            model.evaluate(params, {"input": np.zeros((n, 8), np.float32)})
        counts.append((len(model.programs), len(fallbacks(model))))
    assert counts == [(2, 1), (1, 0)]


STORED = """
import sys
import numpy as np
import mithril as ml
from mithril.models import Gelu, IOKey, Linear, Model

x = IOKey("input")
model = Model.create(outputs={"output": Linear(3)(Gelu()(Linear(16)(x)))})
options = {"optimize_for": "latency"} if "exact" in sys.argv else {}
compiled = ml.compile(model, "c", shapes={"input": [None, 8]}, inference=True, cache=True, **options)
params = compiled.randomize_params(0, inputs={"input": np.zeros((2, 8), np.float32)})
total = 0.0
for n in (2, 5, 0, 300, 2):
    result = compiled.evaluate(params, {"input": np.full((n, 8), 0.1, np.float32)})["output"]
    assert result.shape == (n, 3)
    total += float(result.sum())
print(len(compiled.programs), "tvm" in sys.modules, round(total, 3), *compiled.decisions, sep="\\n")
if "source" in sys.argv:
    assert "int64_t size_input_0;" in compiled.source
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_a_second_process_loads_the_program_of_all_sizes(tmp_path):
    """Neither the program of all sizes nor, where exact ones are requested, their absence is compiled again."""

    def run(*arguments):
        environment = {**os.environ, "MITHRIL_CACHE_DIR": str(tmp_path)}
        command = [sys.executable, "-c", STORED, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        assert done.returncode == 0, done.stderr
        programs, uses_compiler, total, *decisions = done.stdout.splitlines()
        return int(programs), uses_compiler == "True", decisions, float(total)

    first, second = run(), run("source")
    assert (first[0], second[0]) == (1, 1)
    assert (first[1], second[1]) == (True, False)
    assert first[2:] == second[2:]
    exact = [run("exact"), run("exact")]
    assert [e[0] for e in exact] == [4, 4]
    assert [e[1] for e in exact] == [True, False]


def test_sizes_that_contradict_each_other_are_rejected():
    a, b = IOKey("a"), IOKey("b")
    model = Model.create(outputs={"output": a + b})
    compiled = ml.compile(model, "c", shapes={"a": ["n", 4], "b": ["n", 4]}, inference=True)
    two, three = np.ones((2, 4), np.float32), np.ones((3, 4), np.float32)
    np.testing.assert_array_equal(compiled({"a": three, "b": three})["output"], three + three)
    with pytest.raises(ml.MithrilError):
        compiled({"a": two, "b": three})


def test_reductions_over_a_symbolic_axis():
    x = IOKey("input")
    model = Model.create(outputs={"total": ops.sum(x, axis=0), "mean": ops.mean(x, axis=0)})
    compiled = compiled_on("c", model, (None, 20))
    for n in (1, 3, 50):
        values = np.random.default_rng(n).normal(size=(n, 20)).astype(np.float32)
        results = compiled({"input": values})
        np.testing.assert_allclose(results["total"], values.sum(0), rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(results["mean"], values.mean(0), rtol=1e-5, atol=1e-5)
    assert len(compiled.programs) == 1


def decoder(cache=None):
    tokens, position = IOKey("input", dtype="int32"), IOKey("position", dtype="int32", shape=[])
    x = Embedding(20, 32)(tokens)
    attention = MultiHeadAttention(32, 4, causal=True, cache=cache)
    x = x + (attention(x, position) if cache else attention(PositionalEmbedding(64)(x)))
    return Model.create(outputs={"output": Linear(20)(LayerNorm(32)(x))})


def test_one_program_runs_all_batches_and_lengths():
    any_size, reference = (
        ml.compile(decoder(), b, shapes={"input": [None, None]}, inference=True) for b in "c numpy".split()
    )
    params = {any_size: any_size.randomize_params(0), reference: reference.randomize_params(0)}
    for shape in ((1, 1), (2, 3), (1, 7), (3, 16), (1, 17), (2, 31), (1, 32), (2, 33), (1, 64), (0, 5), (2, 0)):
        x = {"input": np.random.default_rng(0).integers(0, 20, shape).astype(np.int32)}
        result, expected = (c.evaluate(params[c], x)["output"] for c in (any_size, reference))
        np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5, err_msg=str(shape))
    assert len(any_size.programs) == 1
    assert not fallbacks(any_size)


def test_encoder_of_any_length_reads_the_mask_and_no_further():
    x, mask = IOKey("input"), IOKey("mask", dtype="bool")
    model = Model.create(outputs={"output": MultiHeadAttention(32, 4)(x, mask=mask)})
    shapes = {"input": ["n", "l", 32], "mask": ["n", 1, 1, "l"]}
    any_size, reference = (ml.compile(model, b, shapes=shapes, inference=True) for b in "c numpy".split())
    rng = np.random.default_rng(0)
    for n, length in ((1, 5), (2, 40), (1, 100)):
        mask = rng.random((n, 1, 1, length)) < 0.7
        mask[..., 0] = True
        inputs = {"input": rng.normal(size=(n, length, 32)).astype(np.float32), "mask": mask}
        result, expected = (c.evaluate(c.randomize_params(0), inputs)["output"] for c in (any_size, reference))
        np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5)
    assert len(any_size.programs) == 1


def test_one_program_reads_the_prompt_and_generates():
    runners = []
    for backend in ("c", "numpy"):
        compiled = ml.compile(decoder(cache=64), backend, shapes={"input": [None, None]}, inference=True)
        runners.append((compiled, compiled.runner(compiled.randomize_params(0))))
    position, rng = 0, np.random.default_rng(0)
    for length in (5, 1, 9, 2, 1, 17, 3):
        x = {"input": rng.integers(0, 20, (2, length)).astype(np.int32), "position": np.int32(position)}
        result, expected = (run(x)["output"] for _, run in runners)
        np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5, err_msg=str(position))
        position += length
    assert len(runners[0][0].programs) == 1
    source = runners[0][0].source
    assert "int64_t size_input_1;" in source
    if shutil.which("gcc"):
        check = ["gcc", "-std=c11", "-fsyntax-only", "-Werror", "-xc", "-"]
        subprocess.run(check, input=source, text=True, check=True)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: ops.softmax(x, axis=-1),
        lambda x: ops.max(x, axis=-1),
        lambda x: ops.mean(x, axis=1),
        lambda x: ops.logsumexp(x, axis=-1),
        lambda x: ops.argmax(x, axis=-1),
        lambda x: ops.argmax(x, axis=0),
        lambda x: ops.sum(x),
        lambda x: x[:, -1],
        lambda x: x[:, ::2],
    ],
)
def test_operations_along_a_symbolic_last_axis(function):
    model = Model.create(outputs={"output": function(IOKey("input"))})
    any_size, reference = (compiled_on(backend, model, (None, None)) for backend in ("c", "numpy"))
    for shape in ((1, 3), (2, 16), (3, 50), (1, 200)):
        x = {"input": np.random.default_rng(0).normal(size=shape).astype(np.float32)}
        np.testing.assert_allclose(any_size(x)["output"], reference(x)["output"], rtol=1e-5, atol=1e-6)
    assert len(any_size.programs) == 1


@pytest.mark.parametrize("width", [1, 3, 10])
@pytest.mark.parametrize("depth", [5, 40])
def test_few_rows_and_few_columns(width, depth):
    any_size, reference = (compiled_on(b, Linear(width), (None, depth)) for b in ("c", "numpy"))
    params = any_size.randomize_params(0)
    for n in range(10):
        x = {"input": np.random.default_rng(0).normal(size=(n, depth)).astype(np.float32)}
        for _ in range(2):
            result, expected = (
                any_size.evaluate(params, x)["output"],
                reference.evaluate(reference.randomize_params(0), x)["output"],
            )
            np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)
    assert len(any_size.programs) == 1


def test_repeated_calls_check_the_sizes_again():
    compiled = compiled_on("c", perceptron(), (None, 24))
    params = compiled.randomize_params(0)
    arrays = [np.random.default_rng(n).normal(size=(n, 24)).astype(np.float32) for n in (3, 7)]
    expected = [compiled.evaluate(params, {"input": x})["output"] for x in arrays]
    for k in (0, 0, 0, 1, 1, 1, 0, 1, 0, 0):
        np.testing.assert_array_equal(compiled.evaluate(params, {"input": arrays[k]})["output"], expected[k])


NARROW = {
    "static int8": {},  # with calibrated ranges
    "int8": {"quantization": {"activations": "dynamic"}},
    "nf4": {"quantization": {"weights": "nf4"}},
    "int4": {"quantization": {"weights": "int4"}},
    "bfloat16": {"precision": "bfloat16"},
}


@pytest.mark.parametrize("cpu", [{}, {"vector_bytes": 16}], ids=str)
@pytest.mark.parametrize("kind", NARROW)
def test_narrow_products_run_any_number_of_rows(kind, cpu):
    """Weights are embedded and packed; the last rows are a tile of any height."""
    model = Model.create(outputs={"output": Linear(40)(Relu()(Linear(128)(IOKey("input"))))})
    options = {"static_inference": True, **NARROW[kind]}
    shapes = {"input": [None, 64]}
    if kind == "static int8":
        exact = compiled_on("numpy", model, (40, 64))
        exact.bind(exact.randomize_params(0))
        samples = [{"input": np.random.default_rng(0).normal(size=(40, 64)).astype(np.float32)}]
        options["quantization"] = {"ranges": ml.calibrate_ranges(exact, samples)}
    compiled = ml.compile(model, "c", shapes=shapes, cpu_options=cpu, num_threads=2, **options)
    reference = ml.compile(model, "numpy", shapes=shapes, **options)
    params = compiled_on("numpy", model, (2, 64)).randomize_params(0)
    for c in (compiled, reference):
        c.bind(params)
    for n in (1, 7, 2, 16, 31, 33, 300, 0):
        x = {"input": np.random.default_rng(n).normal(size=(n, 64)).astype(np.float32)}
        result, expected = (np.asarray(c(x)["output"]).astype(np.float32) for c in (compiled, reference))
        bound = (1e-2 if kind in ("bfloat16", "int8", "static int8") else 1e-5) * np.abs(expected).max(initial=1.0)
        np.testing.assert_allclose(result, expected, rtol=0, atol=bound, err_msg=str(n))
    assert len(compiled.programs) == 1
    functions = compiled.programs[-1].executable.program.functions.values()
    in_float32 = "float32 computes faster than 16-bit floats" in str(compiled.decisions)
    assert any(f.pieces for f in functions) or in_float32  # the tiles of narrow elements
