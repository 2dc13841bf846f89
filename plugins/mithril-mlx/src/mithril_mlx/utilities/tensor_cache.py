"""``MlxTensorCache``: tensors by key, evaluated before they are stored, and copied out of larger buffers."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from datetime import timedelta
from typing import Any, NamedTuple

from mlx.utils import tree_flatten, tree_map

from mithril.backend import CheckedType, parse_bytes
from mithril_mlx.mlx_loader import mx
from mithril_mlx.utilities.lru_cache import Counts, LruCache


class CacheSize(NamedTuple):
    """The current and the maximum number of entries."""

    current: int
    maximum: int


class MlxTensorCache(metaclass=CheckedType):
    """An LRU cache of arrays, or of lists and dictionaries of arrays, with limits of entries, bytes and age.

    ``ttl`` is in seconds, or a ``timedelta``; ``max_bytes`` a number of bytes, or text such as "512MiB".
    """

    def __init__(
        self,
        max_size: int = 100,
        ttl: float | timedelta | None = None,
        max_bytes: int | str | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cache: LruCache[Any] = LruCache(
            max_size,
            seconds(ttl),
            parse_bytes(max_bytes) if isinstance(max_bytes, str) else max_bytes,
            size_of=tree_bytes,
            clock=clock,
        )

    def put(self, key: Hashable, tensor: Any, version: Any = None) -> None:
        """Store a tensor. A lookup must pass the same ``version``, for example that of the weights."""
        self._cache.put(key, materialized(tensor), version)

    def get(self, key: Hashable, version: Any = None) -> Any:
        """Return the tensor, or None."""
        return self._cache.get(key, version)

    def get_or_compute(self, key: Hashable, compute: Callable[[], Any], version: Any = None) -> Any:
        """Return the tensor, or compute and store it; concurrent requests wait for it."""
        return self._cache.get_or_compute(key, lambda: materialized(compute()), version)

    def remove(self, key: Hashable) -> bool:
        return self._cache.remove(key)

    def cleanup(self) -> int:
        """Remove expired entries and return their number; ``put`` also does this."""
        return self._cache.cleanup()

    def clear(self) -> None:
        self._cache.clear()

    def stats(self) -> CacheSize:
        """Return ``(current_size, max_size)``; ``counts`` has further statistics."""
        return CacheSize(len(self._cache), self._cache.max_entries)

    @property
    def counts(self) -> Counts:
        """Hits, misses, evictions, expirations, entries, bytes."""
        return self._cache.counts

    def __len__(self) -> int:
        return len(self._cache)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._cache


def materialized(tensor: Any) -> Any:
    """Evaluate the tensor and copy it out of larger buffers.

    A lazy array would keep all operands of its computation alive, and a slice its base array.
    """
    computed = tree_map(lambda x: mx.contiguous(x) if isinstance(x, mx.array) else x, tensor)
    mx.eval(computed)
    return computed


def tree_bytes(tensor: Any) -> int:
    return sum(x.nbytes for _, x in tree_flatten(tensor) if isinstance(x, mx.array))


def seconds(duration: float | timedelta | None) -> float | None:
    return duration.total_seconds() if isinstance(duration, timedelta) else duration
