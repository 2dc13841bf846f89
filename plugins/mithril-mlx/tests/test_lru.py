"""``utilities/lru_cache.py``: eviction in order of use, limits, versions, one computation for all who wait."""

from __future__ import annotations

import random
import threading
from collections import OrderedDict

import pytest

from mithril.graph.errors import OptionError
from mithril_mlx.utilities.lru_cache import LruCache


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_least_recently_used_entry_is_evicted_first():
    cache = LruCache(2)
    cache.put("a", 1)
    cache.put("b", 2)
    assert cache.get("a") == 1
    cache.put("c", 3)
    assert "b" not in cache and "a" in cache and "c" in cache
    assert cache.counts.evictions == 1 and cache.counts.entries == 2


def test_bytes_are_a_limit_too():
    cache = LruCache(10, max_bytes=10, size_of=len)
    cache.put("a", "xxxx")
    cache.put("b", "xxxx")
    cache.put("c", "xxxx")
    assert "a" not in cache and cache.counts.bytes == 8
    cache.put("huge", "x" * 11)
    assert "huge" not in cache and "b" in cache
    cache.put("b", "x")
    assert cache.counts.bytes == 5


def test_old_entries_are_swept_while_others_are_put():
    clock = Clock()
    cache = LruCache(100, ttl=8.0, clock=clock)
    for k in range(5):
        cache.put(k, k)
    clock.now = 9.0
    cache.put("new", 0)
    assert len(cache) == 1 and cache.counts.expirations == 5
    clock.now = 17.1
    assert cache.cleanup() == 1 and len(cache) == 0


def test_cache_matches_reference_model():
    """Thousand random steps against an obvious list."""
    cache, plain, rng = LruCache(4), OrderedDict(), random.Random(0)
    for step in range(1000):
        key = rng.randrange(8)
        if rng.random() < 0.5:
            cache.put(key, step)
            plain.pop(key, None)
            plain[key] = step
            while len(plain) > 4:
                plain.popitem(last=False)
        else:
            assert cache.get(key) == plain.get(key)
            if key in plain:
                plain.move_to_end(key)
    assert len(cache) == len(plain)


def test_failure_reaches_all_waiting_threads_and_is_not_cached():
    cache, started, go = LruCache(2), threading.Event(), threading.Event()

    def compute():
        started.set()
        go.wait(60)
        raise ValueError("no")

    errors = []

    def ask():
        try:
            cache.get_or_compute("k", compute)
        except ValueError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=ask) for _ in range(3)]
    threads[0].start()
    started.wait(60)
    for thread in threads[1:]:
        thread.start()
    go.set()
    for thread in threads:
        thread.join(60)
    assert errors.count("no") == 3
    assert cache.get_or_compute("k", lambda: 5) == 5


def test_recursive_computation_is_rejected():
    cache = LruCache(2)
    with pytest.raises(OptionError, match="requests 'k' from the same cache"):
        cache.get_or_compute("k", lambda: cache.get_or_compute("k", lambda: 1))


@pytest.mark.parametrize(
    "limits", [{"max_entries": 0}, {"max_entries": 1, "ttl": 0}, {"max_entries": 1, "max_bytes": 0}]
)
def test_limits_must_be_positive(limits):
    with pytest.raises(OptionError, match="limits of a cache must be positive"):
        LruCache(**limits)
