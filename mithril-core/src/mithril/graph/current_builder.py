"""The builder that a thread has entered: operations on values append to it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class _Thread(threading.local):
    builder: Any = None  # a Builder, whose module imports this one, or None


thread = _Thread()


def is_building() -> bool:
    """Whether a builder is entered on this thread."""
    return thread.builder is not None


@contextmanager
def computing() -> Iterator[None]:
    """Suspend the current builder, so that operations on arrays compute eagerly in the block."""
    outer, thread.builder = thread.builder, None
    try:
        yield
    finally:
        thread.builder = outer
