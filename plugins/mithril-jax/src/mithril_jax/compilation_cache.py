"""``cache=True``: what XLA compiled is kept in mithril's store, so that a later process has only to load it.

JAX keeps compiled programs in one folder for the process, if at all. While a program of ours is compiled, that folder
is a temporary one, filled from the store before and taken over by it afterwards.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import RLock
from typing import Any

import jax
import jaxlib
from jax.experimental.compilation_cache import compilation_cache

from mithril.backend import Forward
from mithril.base import Store

_ONE_AT_A_TIME = RLock()  # the settings are those of the process
_EVERYTHING = {
    "jax_persistent_cache_min_compile_time_secs": 0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
    "jax_persistent_cache_enable_xla_caches": "",  # whose paths would go into the names of programs
}
_FOLDER = "jax_compilation_cache_dir"
_SUFFIX = "-cache"  # of compiled programs, which JAX names after all that goes into them


class Kept:
    """A context for calls that may compile; what they compile is found by name in the entry of their source."""

    def __init__(self, settings: Mapping[str, Any], forward: Forward, platform: str) -> None:
        self.store = Store(settings["cache_dir"])
        named = f"{forward.__code__.co_filename} {jax.__version__} {jaxlib.__version__} {platform}"
        self.key = hashlib.sha256(named.encode()).hexdigest()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        if getattr(jax.config, _FOLDER) is not None:  # the user lets JAX keep everything already
            yield
            return
        with _ONE_AT_A_TIME, tempfile.TemporaryDirectory(prefix="mithril-jax-") as folder:
            found = self.store.get(self.key) or {}
            for name, program in found.items():
                Path(folder, Path(name).name).write_bytes(program)
            with _kept_in(folder):
                yield
            made = {p.name: p.read_bytes() for p in Path(folder).iterdir() if p.name.endswith(_SUFFIX)}
            if made.keys() != found.keys():
                self.store.put(self.key, made)


@contextmanager
def _kept_in(folder: str) -> Iterator[None]:
    """JAX's settings so that it keeps every program there; as they were afterwards."""
    wanted = {**_EVERYTHING, _FOLDER: folder}
    before = {name: getattr(jax.config, name) for name in wanted}
    compilation_cache.reset_cache()
    try:
        for name, value in wanted.items():
            jax.config.update(name, value)
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
