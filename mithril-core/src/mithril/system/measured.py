"""Results of measurements on disk. They expire, because drivers, firmware and neighbors of a machine change."""

from __future__ import annotations

import json
import os
import platform
import time
from typing import Any

from mithril.system.disk_cache import Store

LIFETIME = 30 * 24 * 3600  # seconds


def this_machine() -> list[Any]:
    """Return the facts about this machine that run times depend on, for the key of a measurement."""
    return [platform.machine(), platform.processor(), platform.node(), os.cpu_count()]


def save_measured(store: Store, key: str, result: Any) -> None:
    """Store a result that JSON can contain, with the time of its measurement."""
    store.put(key, {"measured": json.dumps({"time": time.time(), "result": result}).encode()})


def read_measured(store: Store, key: str) -> Any:
    """Return a stored result, or None if there is none, or if it has expired."""
    parts = store.get(key)
    if parts is None:
        return None
    try:
        entry = json.loads(parts["measured"])
        return entry["result"] if 0 <= time.time() - entry["time"] < LIFETIME else None
    except (ValueError, KeyError, TypeError):
        return None
