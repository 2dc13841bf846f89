"""``MlxTensorCache``: stored entries, eviction and memory use."""

from __future__ import annotations

import gc
import threading
from datetime import timedelta

import pytest

import mithril as ml
from mithril_mlx import MlxTensorCache
from mithril_mlx.mlx_loader import mx


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_the_name_is_on_the_public_face():
    assert ml.MlxTensorCache is MlxTensorCache


def test_a_tensor_is_found_until_it_is_too_old():
    clock = Clock()
    cache = MlxTensorCache(100, timedelta(seconds=10), clock=clock)
    cache.put("w", mx.array([1.0, 2.0]))
    clock.now = 9.9
    assert cache.get("w").tolist() == [1.0, 2.0] and "w" in cache
    clock.now = 10.0
    assert "w" not in cache and cache.get("w") is None
    current, maximum = cache.stats()
    assert (current, maximum) == (0, 100)
    assert (cache.counts.hits, cache.counts.misses, cache.counts.expirations) == (1, 1, 1)


def test_another_version_is_a_miss():
    cache = MlxTensorCache(4)
    cache.put("w", mx.array([1.0]), version=1)
    assert cache.get("w", version=2) is None and cache.get("w", version=1) is None  # the first look let it go


def test_lazy_values_are_computed_before_they_are_kept():
    gc.collect()  # arrays of other tests that are freed later would change MLX's counters
    cache = MlxTensorCache(4)
    before = mx.get_active_memory()
    big = mx.zeros((1 << 22,))
    mx.eval(big)
    cache.put("sum", mx.sum(big))
    del big
    assert mx.get_active_memory() - before < 1000
    assert cache.get("sum").item() == 0.0


def test_a_slice_does_not_keep_its_base_alive():
    gc.collect()
    cache = MlxTensorCache(4)
    before = mx.get_active_memory()
    big = mx.ones((1 << 22,))
    mx.eval(big)
    cache.put("part", big[:4])
    del big
    assert mx.get_active_memory() - before < 100_000
    assert cache.get("part").tolist() == [1.0] * 4
    assert cache.counts.bytes == 16


def test_whole_sets_of_weights_are_one_entry():
    cache = MlxTensorCache(4, max_bytes="1kB")
    cache.put("layer", {"w": mx.ones((4, 4)), "rest": [mx.ones(4)]})
    assert cache.counts.bytes == 80
    assert cache.get("layer")["rest"][0].tolist() == [1.0] * 4
    cache.put("large", mx.ones(1000))
    assert "large" not in cache and "layer" in cache


def test_threads_compute_once():
    cache = MlxTensorCache(4)
    computed, started, go = [], threading.Event(), threading.Event()

    def compute():
        computed.append(1)
        started.set()
        go.wait(60)
        return mx.full((2,), 7.0)

    results = []
    threads = [threading.Thread(target=lambda: results.append(cache.get_or_compute("x", compute))) for _ in range(4)]
    threads[0].start()
    started.wait(60)
    for thread in threads[1:]:
        thread.start()
    go.set()
    for thread in threads:
        thread.join(60)
    assert computed == [1] and [x.tolist() for x in results] == [[7.0, 7.0]] * 4
    assert cache.counts.misses == 1 and cache.counts.hits == 3


def test_limits_must_leave_room():
    with pytest.raises(ml.OptionError, match="limits of a cache must be positive"):
        MlxTensorCache(0)
