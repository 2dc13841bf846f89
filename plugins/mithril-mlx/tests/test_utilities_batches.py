"""``MlxBatchOptimizer``: the batch size is fast and fits; results are in order."""

from __future__ import annotations

from itertools import count, islice

import numpy as np
import pytest

import mithril as ml
from mithril.models import Linear, Model
from mithril_mlx import MlxBatchOptimizer
from mithril_mlx.mlx_loader import mx


def with_overhead(size):
    return 1e-3 + 1e-5 * size  # throughput grows up to about 2000


def test_the_smallest_of_the_fastest_is_taken():
    optimizer = MlxBatchOptimizer(1 << 20)
    assert optimizer.find_optimal_batch_size("flat", 128, lambda n: 1e-6 * n) == 1
    assert optimizer.find_optimal_batch_size("overhead", 128, with_overhead) == 128
    assert set(optimizer.choices["flat"].rates) == {1, 2, 4}


def test_batches_over_the_limit_never_run():
    ran = []

    def benchmark(size):
        ran.append(size)
        return with_overhead(size)

    optimizer = MlxBatchOptimizer("1MB")
    assert optimizer.find_optimal_batch_size("op", 128, benchmark, memory=lambda n: 30_000 * n) == 32
    assert max(ran) == 33
    with pytest.raises(ml.MemoryLimitError, match="a batch of one needs"):
        optimizer.find_optimal_batch_size("op", 128, benchmark, memory=lambda n: 2_000_000)


def test_results_of_lists_are_in_order():
    optimizer = MlxBatchOptimizer()
    optimizer.find_optimal_batch_size("double", 64, with_overhead)
    sizes = []

    def process(batch):
        sizes.append(len(batch))
        return [2 * x for x in batch]

    assert optimizer.process_in_batches("double", range(1000), process) == [2 * x for x in range(1000)]
    assert sizes == [64] * 15 + [40]
    with pytest.raises(ml.InputError, match="no batch size is known for 'other'"):
        optimizer.process_in_batches("other", [1], process)
    with pytest.raises(ml.InputError, match="every item must have one"):
        optimizer.process_in_batches("double", [1, 2], lambda batch: [1])


@pytest.mark.parametrize("kind", [np.asarray, mx.array])
def test_arrays_keep_one_shape_and_are_cut(kind):
    optimizer, shapes = MlxBatchOptimizer(), set()

    def process(batch):
        shapes.add(tuple(batch.shape))
        return batch * 2

    data = kind(np.arange(26, dtype=np.float32).reshape(13, 2))
    results = optimizer.process_in_batches("op", data, process, batch_size=5)
    assert isinstance(results, type(data)) and shapes == {(5, 2)}
    np.testing.assert_array_equal(np.asarray(results), np.arange(26).reshape(13, 2) * 2)


def test_endless_data_is_streamed_with_one_batch_ahead():
    optimizer, begun = MlxBatchOptimizer(), []

    def process(batch):
        begun.append(batch[0])
        return mx.array(batch)

    stream = optimizer.stream("op", count(), process, batch_size=4)
    assert [piece.tolist() for piece in islice(stream, 2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert begun == [0, 4, 8]


def test_the_plan_of_a_model_limits_its_batch():
    model = Model()
    model |= Linear(16)(input="x", output="y")
    compiled = ml.compile(model, "mlx", shapes={"x": ["B", 8]})
    optimizer = MlxBatchOptimizer(8_000)
    size = optimizer.find_model_batch_size(compiled, {"x": np.ones((1, 8), np.float32)})
    assert 1 <= size <= optimizer.choices[compiled.name].fits < 1024
    assert compiled.memory_report({"x": [optimizer.choices[compiled.name].fits, 8]}).peak <= 8_000


@pytest.mark.parametrize("threshold", [1 << 20, "1MiB"])
def test_memory_is_measured_without_a_memory_function(threshold):
    largest = []

    def benchmark(size):
        x = mx.ones((size, 1024), mx.float32) + 1  # 4 KiB for each item, twice
        mx.eval(mx.exp(x))
        largest.append(size)
        return with_overhead(size)

    optimizer = MlxBatchOptimizer(threshold)
    best = optimizer.find_optimal_batch_size("exp", 4096, benchmark)
    assert 64 <= best <= 256 and max(largest) <= 256
    assert optimizer.choices["exp"].fits <= 256
    with pytest.raises(ml.MemoryLimitError, match="a batch of one needs"):
        MlxBatchOptimizer(1).find_optimal_batch_size("exp", 64, benchmark)


def test_sizes_between_powers_of_two_are_found():
    def benchmark(size):
        return 1e-3 + 1e-5 * size if size <= 40 else 1.0

    assert MlxBatchOptimizer().find_optimal_batch_size("edge", 128, benchmark) == 40
