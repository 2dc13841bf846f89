"""One arena: close to the live peak; equal kernels share one function."""

import itertools

import numpy as np
import pytest
from hypothesis import given, strategies as st

import mithril as ml
from mithril import ops
from mithril.backend import Buffer
from mithril.backend.memory_plan import smallest
from mithril.graph import Builder, decompose, evaluate
from mithril.models import Conv2d, Gelu, LayerNorm, Linear, MaxPool2d, Model, MultiHeadAttention, Relu
from mithril_cbackend import tir as t
from mithril_cbackend.backend import CBackend


def stacked(*layers):
    model = Model()
    for layer in layers:
        model += layer
    return model


def encoder(blocks):
    layers = []
    for k in range(blocks):
        layers += [LayerNorm(name=f"n{k}"), MultiHeadAttention(heads=2, name=f"a{k}"), LayerNorm(name=f"m{k}")]
        layers += [Linear(64, name=f"u{k}"), Gelu(), Linear(32, name=f"d{k}")]
    return stacked(*layers)


def convolutions():
    layers = []
    for k, channels in enumerate((8, 16, 32)):
        layers += [Conv2d(channels, kernel_size=3, padding=1, name=f"c{k}"), Relu(), MaxPool2d(2)]
    return stacked(*layers)


def program(model, shapes):
    return ml.compile(model, "c", shapes=shapes, inference=True).programs[-1].executable.program


@pytest.mark.parametrize(
    ("model", "shapes"),
    [(encoder(3), {"input": [2, 24, 32]}), (convolutions(), {"input": [1, 3, 32, 32]})],
    ids=["encoder", "convolutions"],
)
def test_the_arena_is_close_to_the_live_peak(model, shapes):
    plan = program(model, shapes).plan
    assert plan.size <= 1.05 * plan.peak
    assert plan.size < 0.7 * plan.total  # values that do not live together share bytes


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 20), st.integers(0, 6)), max_size=24))
def test_live_buffers_do_not_overlap(rows):
    buffers = [Buffer([], 64 * size, start, start + length) for size, start, length in rows]
    smallest(buffers)
    for a, b in itertools.combinations(buffers, 2):
        if a.start <= b.end and b.start <= a.end:
            assert a.offset + a.size <= b.offset or b.offset + b.size <= a.offset


def test_more_equal_blocks_are_more_calls_of_the_same_kernels():
    three, five = (program(encoder(n), {"input": [2, 24, 32]}) for n in (3, 5))
    assert len(five.functions) == len(three.functions)
    assert five.calls > 1.5 * three.calls


def test_parts_of_kernels_share_a_function_only_if_they_are_equal():
    """Copy with other strides and offsets, for which TVM's structural hash is the same number."""

    def called(stride, offset):
        code, arrays = t.Code(), [t.pointer(name, "float32") for name in ("source", "target")]
        with code.block() as body, code.loop("i", 7) as i:
            code.store(arrays[1][1], i * stride + offset, t.load(arrays[0][1], i))
        code.call_part("copy", body, arrays, read=1)
        ((name, function),) = code.helpers.items()
        return name, function

    parts = [called(*numbers) for numbers in ((3, 2), (6, 44), (6, 44), (3, 2))]
    names = [name for name, _ in parts]
    assert names[0] != names[1]
    assert names == [*names[:2], *names[1::-1]]
    assert [str(function.primfunc.attrs["global_symbol"]) for _, function in parts] == names


def counted(function, *shapes):
    """Count the kernel calls of a function, after comparing it with its references."""
    with Builder() as b:
        result = function(*(b.input(f"x{k}", s) for k, s in enumerate(shapes)))
    graph = decompose(b.build({"y": result}), CBackend().lowers)
    executable = CBackend().build(graph)
    draw = np.random.default_rng(0)
    inputs = {f"x{k}": draw.standard_normal(s).astype(np.float32) for k, s in enumerate(shapes)}
    np.testing.assert_allclose(executable({}, inputs)["y"], evaluate(graph, inputs)["y"], rtol=1e-4, atol=1e-5)
    return executable.program.calls


def test_elementwise_chains_are_one_kernel():
    assert counted(lambda x, y: ops.tanh(ops.exp(x * 0.1) + y) / (ops.abs(x) + 1.0), (8, 33), (33,)) == 1


def test_what_follows_a_product_runs_on_its_tiles():
    assert counted(lambda x, w, b: ops.relu(ops.matmul(x, w) + b), (9, 40), (40, 48), (48,)) == 1


def test_what_follows_a_convolution_runs_in_it():
    function = lambda x, w, b: ops.relu(ops.conv(x, w, padding=((1, 1), (1, 1))) + ops.reshape(b, shape=(8, 1, 1)))  # noqa: E731
    assert counted(function, (1, 4, 16, 16), (8, 4, 3, 3), (8,)) == 1


def test_operands_of_a_sum_are_fused_into_it():
    assert counted(lambda x: ops.sum(ops.exp(x) * 2.0, axis=1), (7, 50)) == 1


def test_a_value_read_by_two_kernels_is_stored_once():
    def function(x, w):
        y = ops.exp(x)
        return ops.matmul(y, w) + ops.sum(y, axis=1, keepdims=True)

    assert counted(function, (9, 40), (40, 48)) <= 3


def test_optimize_size_takes_convolutions_with_small_buffers():
    """Columns of a few rows in place of a whole image, with the same results."""

    def program(**options):
        model = stacked(
            *[layer for k in range(3) for layer in (Conv2d(16, kernel_size=3, padding=1, name=f"c{k}"), Relu())]
        )
        mobile = {"arch": "x86_64", "platform": "linux", **options}
        return ml.compile(model, "c", shapes={"input": [1, 3, 32, 32]}, mobile_options=mobile, num_threads=1)

    fast, small = program(), program(optimize_size=True)
    params = fast.randomize_params(seed=0)
    x = {"input": np.random.default_rng(0).standard_normal((1, 3, 32, 32)).astype(np.float32)}
    results = [compiled_model.evaluate(params, x)["output"] for compiled_model in (fast, small)]
    np.testing.assert_allclose(*results, rtol=1e-4, atol=1e-5)
    sizes = [compiled_model.programs[-1].executable.layout.arena for compiled_model in (fast, small)]
    activations = 2 * 16 * 32 * 32 * 4
    assert sizes[1] < 2 * activations < sizes[0]
