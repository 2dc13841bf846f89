"""On-disk cache of the options that ``ml.tune`` found fastest, read by ``optimization_level="high"``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from mithril import __version__
from mithril.models import flatten
from mithril.system import Store, UnhashableObject, fingerprint, package_version_key, this_machine

_searching: ContextVar[bool] = ContextVar("searching", default=False)


@contextmanager
def tuning_in_progress() -> Iterator[None]:
    """Ignore stored options while options are measured."""
    token = _searching.set(True)
    try:
        yield
    finally:
        _searching.reset(token)


def save_best(store: Store, model: Any, backend: Any, shapes: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Store the fastest options for these shapes."""
    key = _key(model, backend, shapes)
    if key is not None:
        store.put(key, {"options": json.dumps(dict(options), default=dict).encode()})


def load_best(model: Any, backend: Any, settings: Mapping[str, Any], user_options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the stored fastest options, without those that the user has set.

    Empty below level high, if shapes are symbolic, or if nothing was measured.
    """
    if settings["optimization_level"] != "high" or _searching.get() or not settings["shapes"]:
        return {}
    key = _key(model, backend, settings["shapes"])
    parts = Store(settings["cache_dir"]).get(key) if key is not None else None
    try:
        options = json.loads(parts["options"]) if parts is not None else {}
        return {n: v for n, v in options.items() if n not in user_options or n == "optimization_level"}
    except (ValueError, KeyError, AttributeError):
        return {}


def stamps(backend: Any) -> list[str]:
    """Return the versions of the core and of a backend, down to the files."""
    package = type(backend).__module__.partition(".")[0]
    return [__version__, package_version_key("mithril"), package_version_key(package)]


def _key(model: Any, backend: Any, shapes: Mapping[str, Any]) -> str | None:
    """Return a key of everything that the result depends on, or None if shapes are open or a part has no key."""
    sizes = {n: list(shape) for n, shape in sorted(shapes.items())}
    if not all(isinstance(size, int) for shape in sizes.values() for size in shape):
        return None
    backend_key = (type(backend), backend.identity())
    try:
        return fingerprint("winners", flatten(model), backend_key, sizes, this_machine(), stamps(backend))
    except UnhashableObject:
        return None
