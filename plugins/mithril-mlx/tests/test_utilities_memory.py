"""``MlxMemoryOptimizer``: leases, statistics compared with MLX's counters, budgets with measured calls."""

from __future__ import annotations

import gc
import operator

import numpy as np
import pytest

import mithril as ml
from mithril.models import Linear, Model, Tanh
from mithril_mlx import MlxMemoryOptimizer
from mithril_mlx.mlx_loader import mx
from mithril_mlx.utilities.memory_pool import planned_bytes


@pytest.fixture(autouse=True)
def nothing_left_over():
    """Clear caches: arrays of other tests that are freed later, and reused larger buffers, change the counters."""
    gc.collect()
    mx.clear_cache()


def test_returned_tensors_are_reused():
    pool = MlxMemoryOptimizer(100)
    first = pool.get_or_create_tensor([64, 128], mx.float32, "cpu")
    pool.return_to_pool(first, "cpu")
    second = pool.get_or_create_tensor([64, 128], "float32")
    assert second.shape == (64, 128)
    other = pool.get_or_create_tensor([128, 64])
    stats = pool.get_stats()
    assert (stats.pool_hits, stats.pool_misses, stats.total_allocations) == (1, 2, 2)
    assert stats.hit_rate == 1 / 3 and other.dtype == mx.float32


def test_the_statistics_are_those_of_mlx():
    pool, before = MlxMemoryOptimizer(1), mx.get_active_memory()

    def agree():
        assert mx.get_active_memory() - before == pool.get_stats().current_memory_usage

    a, b = pool.get_or_create_tensor([256, 256]), pool.get_or_create_tensor([1024], mx.float16)
    agree()
    assert pool.get_stats().current_memory_usage == 256 * 256 * 4 + 2048
    pool.return_to_pool(a)
    pool.return_to_pool(b)  # the pool is full: this one is released
    agree()
    assert pool.get_stats().total_deallocations == 1
    assert pool.get_stats().peak_memory_usage == 256 * 256 * 4 + 2048
    pool.clear()
    agree()
    assert pool.get_stats().current_memory_usage == 0


def test_a_dropped_lease_is_released():
    pool, before = MlxMemoryOptimizer(4), mx.get_active_memory()
    lease = pool.get_or_create_tensor([1024])
    del lease
    gc.collect()
    assert pool.get_stats().current_memory_usage == 0 == mx.get_active_memory() - before


def test_wrong_use_is_rejected():
    pool = MlxMemoryOptimizer(4)
    lease = pool.get_or_create_tensor([4])
    array = lease.array
    pool.return_to_pool(lease)
    with pytest.raises(ml.InputError, match="was returned to its pool"):
        pool.return_to_pool(lease)
    for use in (lambda: lease.array, lambda: lease.fill(1), lambda: lease.shape):
        with pytest.raises(ml.InputError, match="was returned to its pool"):
            use()
    with pytest.raises(ml.InputError, match="expected a tensor of a pool"):
        pool.return_to_pool(array)
    with pytest.raises(ml.InputError, match="another pool"):
        MlxMemoryOptimizer(4).return_to_pool(pool.get_or_create_tensor([4]))
    with pytest.raises(ml.OptionError, match="not a device of MLX"):
        pool.get_or_create_tensor([4], device="tpu")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8", "bool"])
def test_filling_takes_no_memory(dtype):
    pool = MlxMemoryOptimizer(4)
    lease = pool.get_or_create_tensor([3, 4], dtype)

    def total(x):
        return mx.sum(x.astype(mx.float32))

    mx.eval(total(lease.array))
    before = mx.get_active_memory()
    lease.fill(np.ones((3, 4)))
    assert mx.get_active_memory() <= before
    assert total(lease.array).item() == 12.0
    lease.fill(0)
    assert total(lease.array).item() == 0.0
    with pytest.raises(ml.InputError, match=r"shape \[3, 4\] cannot be filled with \[4, 3\]"):
        lease.fill(np.ones((4, 3)))


def test_a_compiled_model_sees_new_contents():
    model = Model()
    model |= Linear(2)(input="x", output="y")
    compiled, pool = ml.compile(model, "mlx", shapes={"x": [3, 4]}), MlxMemoryOptimizer(4)
    params = compiled.randomize_params(0)
    with pool.staged([3, 4]) as lease:
        for k in range(3):
            data = np.full((3, 4), k, np.float32)
            output = compiled.evaluate(params, {"x": lease.fill(data)})["y"]
            np.testing.assert_array_equal(output, compiled.evaluate(params, {"x": data})["y"])


def chain(depth, rows=512):
    model = Model()
    for k in range(depth):
        model += Linear(64, name=f"layer{k}")(input=f"h{k}", output=f"g{k}")
        model += Tanh()(input=f"g{k}", output=f"h{k + 1}")
    return ml.compile(model, "mlx", shapes={"h0": [rows, 64]}, optimization_level="none")


@pytest.mark.parametrize("depth", [2, 10, 40])
def test_a_call_takes_no_more_than_planned(depth):
    compiled = chain(depth)
    params, x = compiled.randomize_params(0), mx.ones((512, 64))
    mx.eval(params, x)
    compiled.evaluate(params, {"h0": x})
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    outputs = compiled.evaluate(params, {"h0": x})
    peak = mx.get_peak_memory() - before
    report = compiled.memory_report()
    values = planned_bytes(compiled) - report.inputs - report.parameters
    assert outputs and 0.2 * values < peak <= values


def test_calls_over_the_budget_are_rejected_before_they_run():
    compiled = chain(4)
    assert MlxMemoryOptimizer(0, "1GB").check(compiled) < 10_000_000
    with pytest.raises(ml.MemoryLimitError, match="may take .* and the budget is 100 kB"):
        MlxMemoryOptimizer(0, "100kB").check(compiled)


def test_limits_end_with_their_block():
    before = mx.set_cache_limit(1 << 30)
    try:
        with MlxMemoryOptimizer.limits(MlxMemoryOptimizer(0), cache="0B"):
            freed = mx.ones(1 << 20)
            mx.eval(freed)
            del freed
            assert MlxMemoryOptimizer.allocator().cached == 0
        assert mx.set_cache_limit(before) == 1 << 30
    finally:
        mx.set_cache_limit(before)


def test_batches_are_gathered_by_shape():
    arrays = [mx.full((2,), k) if k % 2 else mx.full((3,), k) for k in range(5)]
    even, odd = MlxMemoryOptimizer.optimize_batch_layout(arrays)
    assert even.places == (0, 2, 4) and odd.places == (1, 3)
    assert even.array.tolist() == [[0] * 3, [2] * 3, [4] * 3] and odd.array.shape == (2, 2)


@pytest.mark.parametrize("again", ["fill", "lease"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "bool", "uint32"])
@pytest.mark.parametrize("begun", [False, True], ids=["lazy", "begun"])
def test_lazy_results_and_views_keep_their_values(dtype, again, begun):
    pool = MlxMemoryOptimizer(4)
    lease = pool.get_or_create_tensor([4], dtype)
    array = lease.fill(1)
    lazy, view, compiled = array + array, array.reshape(2, 2), mx.compile(lambda x: x + x)(lease.array)
    if begun:
        mx.async_eval(compiled)
    if again == "lease":
        pool.return_to_pool(lease)
        lease = pool.get_or_create_tensor([4], dtype)
        assert pool.get_stats().pool_hits == 1
    later = lease.fill(0)
    ones = mx.ones([4], array.dtype)
    for result, expected in ((lazy, ones + ones), (view, ones.reshape(2, 2)), (compiled, ones + ones), (array, ones)):
        assert mx.array_equal(result, expected)
    assert mx.array_equal(later, mx.zeros([4], array.dtype))


def test_copies_are_exact_and_arrays_for_others():
    pool = MlxMemoryOptimizer(4)
    special = np.array([np.nan, -0.0, np.inf, 1e-42], np.float32)
    lease = pool.get_or_create_tensor([4])
    bits = np.array(lease.fill(special)).view(np.uint32)
    np.testing.assert_array_equal(bits, special.view(np.uint32))
    np.testing.assert_array_equal(np.asarray(lease), special)
    assert mx.array_equal(mx.array(lease), lease.array, equal_nan=True)


@pytest.mark.parametrize("name", ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"])
def test_tensors_are_operands(name):
    function, x = getattr(operator, name), np.arange(1, 5, dtype=np.float32).reshape(2, 2)
    tensor = MlxMemoryOptimizer().get_or_create_tensor([2, 2])
    tensor.fill(x)
    pairs = [(tensor, mx.array(x + 1), x, x + 1), (mx.array(x + 1), tensor, x + 1, x), (tensor, tensor, x, x)]
    if name == "matmul":  # mx.array raises TypeError before Python asks the right operand
        del pairs[1]
    for left, right, a, b in pairs:
        np.testing.assert_allclose(np.asarray(function(left, right)), function(a, b), rtol=1e-6)
