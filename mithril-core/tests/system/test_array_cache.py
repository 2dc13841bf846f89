"""Results that belong to arrays."""

import gc

import numpy as np

from mithril.system import ArrayCache


def test_results_of_read_only_arrays_are_shared_while_the_arrays_live():
    cache, calls = ArrayCache(), []

    def compute():
        calls.append(1)
        return len(calls)

    array = np.zeros(3)
    assert [cache.get(array, "a", compute) for _ in range(2)] == [1, 2]
    array.setflags(write=False)
    assert [cache.get(array, key, compute) for key in ("a", "b", "a")] == [3, 4, 3]
    assert len(cache._results) == 2
    del array
    gc.collect()
    assert not cache._results
