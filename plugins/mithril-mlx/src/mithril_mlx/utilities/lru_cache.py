"""Thread-safe LRU cache, bounded in number of entries, bytes and age."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from mithril.graph import OptionError

V = TypeVar("V")


@dataclass(slots=True)
class Counts:
    """Statistics of a cache."""

    hits: int = 0
    misses: int = 0
    evictions: int = 0  # entries removed to stay within the bounds
    expirations: int = 0  # entries removed since they were too old or of another version
    entries: int = 0
    bytes: int = 0

    @property
    def hit_rate(self) -> float:
        return self.hits / (self.hits + self.misses) if self.hits + self.misses else 0.0


@dataclass(slots=True)
class _Entry(Generic[V]):
    value: V
    size: int
    expires: float
    version: Any


class LruCache(Generic[V]):
    """A thread-safe cache that evicts the least recently used entry first.

    ``clock`` is any monotonic function; ``size_of`` returns bytes. A value larger than ``max_bytes`` is not cached.
    """

    def __init__(
        self,
        max_entries: int,
        ttl: float | None = None,
        max_bytes: int | None = None,
        *,
        size_of: Callable[[V], int] = lambda value: 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if max_entries < 1 or (ttl is not None and ttl <= 0) or (max_bytes is not None and max_bytes < 1):
            raise OptionError(
                "the limits of a cache must be positive",
                facts=[f"max_entries={max_entries}, ttl={ttl}, max_bytes={max_bytes}"],
                hint="pass positive numbers, or None for no limit of age or bytes",
            )
        self.max_entries, self.ttl, self.max_bytes = max_entries, ttl, max_bytes
        self._size_of, self._clock = size_of, clock
        self._entries: OrderedDict[Hashable, _Entry[V]] = OrderedDict()
        self._counts = Counts()
        self._sweep_at = clock()
        self._lock = threading.RLock()
        self._flights: dict[Hashable, tuple[int, Future[V]]] = {}

    def get(self, key: Hashable, version: Any = None) -> V | None:
        """Return the value, or None if it is absent, expired or of another version."""
        with self._lock:
            entry = self._fresh(key, version)
            if entry is None:
                self._counts.misses += 1
                return None
            self._counts.hits += 1
            self._entries.move_to_end(key)
            return entry.value

    def put(self, key: Hashable, value: V, version: Any = None) -> None:
        """Insert a value and evict others to stay within the bounds."""
        size = self._size_of(value)
        with self._lock:
            now = self._clock()
            self._drop(key)
            if now >= self._sweep_at:
                self.cleanup()
            if self.max_bytes is not None and size > self.max_bytes:
                self._counts.evictions += 1
                return
            expires = now + self.ttl if self.ttl is not None else float("inf")
            self._entries[key] = _Entry(value, size, expires, version)
            self._counts.bytes += size
            while len(self._entries) > self.max_entries or (
                self.max_bytes is not None and self._counts.bytes > self.max_bytes
            ):
                self._drop(next(iter(self._entries)))
                self._counts.evictions += 1

    def get_or_compute(self, key: Hashable, compute: Callable[[], V], version: Any = None) -> V:
        """Return the value, computed if it is missing; concurrent threads wait for one computation.

        An exception of ``compute`` is raised in all of them, and nothing is cached.
        """
        with self._lock:
            entry = self._fresh(key, version)
            if entry is not None:
                self._counts.hits += 1
                self._entries.move_to_end(key)
                return entry.value
            flight = self._flights.get((key, version))
            if flight is None:
                self._counts.misses += 1
                future: Future[V] = Future()
                self._flights[key, version] = (threading.get_ident(), future)
        if flight is not None:
            if flight[0] == threading.get_ident():
                raise OptionError(f"computing '{key}' requests '{key}' from the same cache")
            value = flight[1].result()
            with self._lock:
                self._counts.hits += 1
            return value
        try:
            value = compute()
            self.put(key, value, version)
            future.set_result(value)
            return value
        except BaseException as error:
            future.set_exception(error)
            raise
        finally:
            with self._lock:
                del self._flights[key, version]

    def remove(self, key: Hashable) -> bool:
        """Remove an entry; return whether it existed."""
        with self._lock:
            return self._drop(key)

    def cleanup(self) -> int:
        """Remove expired entries and return their number. ``put`` does so once per quarter of the ``ttl``."""
        with self._lock:
            now = self._clock()
            old = [key for key, entry in self._entries.items() if now >= entry.expires]
            for key in old:
                self._drop(key)
            self._counts.expirations += len(old)
            self._sweep_at = now + (self.ttl or float("inf")) / 4
            return len(old)

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()
            self._counts.bytes = 0

    @property
    def counts(self) -> Counts:
        """A snapshot of the statistics."""
        with self._lock:
            return replace(self._counts, entries=len(self._entries))

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: Hashable) -> bool:
        with self._lock:
            entry = self._entries.get(key)
            return entry is not None and self._clock() < entry.expires

    def _fresh(self, key: Hashable, version: Any) -> _Entry[V] | None:
        entry = self._entries.get(key)
        if entry is not None and (self._clock() >= entry.expires or entry.version != version):
            self._drop(key)
            self._counts.expirations += 1
            return None
        return entry

    def _drop(self, key: Hashable) -> bool:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._counts.bytes -= entry.size
        return entry is not None
