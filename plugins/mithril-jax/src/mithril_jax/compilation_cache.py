"""``cache=True``: compiled XLA programs are cached in mithril's store, so that a later process only loads them.

JAX caches compiled programs in one directory for the process, if at all. While a mithril program compiles, that
directory is a temporary one; it is filled from the store before and copied to the store afterwards.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import RLock
from typing import Any

import jax
import jaxlib
from jax.experimental.compilation_cache import compilation_cache

from mithril.backend import Forward
from mithril.system import Store

_LOCK = RLock()  # the settings belong to the process
_CACHE_ALL = {
    "jax_persistent_cache_min_compile_time_secs": 0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
    "jax_persistent_cache_enable_xla_caches": "",  # their paths would become part of the cache keys
}
_FOLDER = "jax_compilation_cache_dir"
_SUFFIX = "-cache"  # file suffix of compiled programs; JAX derives the rest of the name from the program's contents


class CacheContext:
    """A context for calls that may compile; compiled programs are stored in the cache entry of their source."""

    def __init__(self, settings: Mapping[str, Any], generated: Sequence[Forward], platform: str) -> None:
        self.store = Store(settings["cache_dir"])
        sources = " ".join(forward.__code__.co_filename for forward in generated)  # made from the text
        identity = f"{sources} {jax.__version__} {jaxlib.__version__} {platform}"
        self.key = hashlib.sha256(identity.encode()).hexdigest()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        if getattr(jax.config, _FOLDER) is not None:  # the user has enabled JAX's own cache
            yield
            return
        with _LOCK, tempfile.TemporaryDirectory(prefix="mithril-jax-") as folder:
            cached = self.store.get(self.key) or {}
            for name, program in cached.items():
                Path(folder, Path(name).name).write_bytes(program)
            with _cache_directory(folder):
                yield
            compiled = {p.name: p.read_bytes() for p in Path(folder).iterdir() if p.name.endswith(_SUFFIX)}
            if compiled.keys() != cached.keys():
                self.store.put(self.key, compiled)


@contextmanager
def _cache_directory(folder: str) -> Iterator[None]:
    """Make JAX cache every program in ``folder``, and restore its settings afterwards."""
    settings = {**_CACHE_ALL, _FOLDER: folder}
    previous = {name: getattr(jax.config, name) for name in settings}
    # JAX opens its cache once and keeps the folder; only a reset makes it read the setting again.
    compilation_cache.reset_cache()
    try:
        for name, value in settings.items():
            jax.config.update(name, value)
        yield
    finally:
        for name, value in previous.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
