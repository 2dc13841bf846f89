"""Results that belong to an array, shared by everything that computes them while the array lives."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable, Iterable
from typing import Any, ClassVar, TypeVar

import numpy as np

T = TypeVar("T")


class ArrayCache:
    """A table of results by read-only array and further arguments, without a reference to the array.

    A result of a writable array is not stored, because the array may change.
    """

    _all: ClassVar[weakref.WeakSet[ArrayCache]] = weakref.WeakSet()

    def __init__(self) -> None:
        self._all.add(self)
        self._results: dict[tuple[int, Hashable], tuple[weakref.ref[Any], Any]] = {}
        self._lock = threading.RLock()

    def get(self, array: np.ndarray[Any, Any], key: Hashable, compute: Callable[[], T]) -> T:
        """Return the result for an array and a key, computed once."""
        if array.flags.writeable:
            return compute()
        entry_key = (id(array), key)
        with self._lock:
            entry = self._results.get(entry_key)
            if entry is not None and entry[0]() is array:
                return entry[1]  # type: ignore[no-any-return]
            result = compute()
            reference = weakref.ref(array, lambda _: self._results.pop(entry_key, None))
            self._results[entry_key] = reference, result
        return result

    @classmethod
    def forget(cls, arrays: Iterable[Any]) -> None:
        """Release the results for these arrays."""
        released = {id(x) for x in arrays}
        for cache in [*cls._all]:
            with cache._lock:
                for key in [key for key in cache._results if key[0] in released]:
                    cache._results.pop(key, None)

    @classmethod
    def results_of(cls, array: np.ndarray[Any, Any]) -> list[Any]:
        """Return the results of all tables for an array."""
        return [result for cache in cls._all for ref, result in [*cache._results.values()] if ref() is array]
