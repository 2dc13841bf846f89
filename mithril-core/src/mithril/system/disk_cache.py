"""Disk cache of entries by key: written atomically, authenticated when read, bounded in size.

Each entry is one file: a line of JSON with the names and sizes of its parts and a digest of these, the key and the
bytes, then the bytes. The digest is keyed by a secret of the user: a file that is truncated, modified, renamed or
written by another user is a cache miss and is deleted. Several processes can share the folder, and the memory of the
first part, which can be mapped: an entry is replaced or removed, but never changed.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import mmap
import os
import secrets
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, TypeVar

import numpy as np

from mithril.graph import OptionError
from mithril.system import files

SUFFIX = ".mithril"
LIMIT = 2 << 30  # total bytes; least recently used entries are evicted first
HEADER = 1 << 20  # maximal bytes of the first line
SECRET = 32  # bytes
ALIGNMENT = 64  # of the first part in the file


@dataclass(frozen=True)
class StoreInfo:
    """Statistics of a store; sizes in bytes."""

    folder: Path
    entries: int
    bytes: int
    limit: int


class Store:
    """A disk cache with ``put`` and ``get`` of named parts by key. Entries are never unpickled."""

    def __init__(self, folder: str | os.PathLike[str] | None = None, limit: int = LIMIT) -> None:
        self.folder = Path(folder) if folder is not None else default_folder()
        self.limit = limit

    def get(self, key: str, mapped: str | None = None) -> dict[str, Any] | None:
        """Return the parts of an entry, or None if no intact entry of this user exists.

        If the first part is named ``mapped``, it is a view of the file, which all processes share.
        """
        file = self._file(key)
        try:
            with file.open("rb") as opened:
                parts = _read(opened, key, mapped)
        except OSError:
            return None
        self.secure()
        if parts is None:
            with contextlib.suppress(OSError):
                file.unlink()
            return None
        with contextlib.suppress(OSError):
            # Entries are evicted by the time of their last use, for which the time of modification
            # serves: many systems do not record that of access.
            os.utime(file)
        return parts

    def latest(self, prefix: str, mapped: str | None = None) -> dict[str, Any] | None:
        """Return the parts of the entry that was used last, of those whose keys begin with ``prefix``."""
        entries = []
        for path in self.folder.glob(f"{prefix[:2]}/{prefix}*{SUFFIX}"):
            with contextlib.suppress(OSError):  # evicted by another process
                entries.append((path.stat().st_mtime, path.stem))
        return self.get(max(entries)[1], mapped) if entries else None

    def put(self, key: str, parts: Mapping[str, bytes | bytearray]) -> None:
        """Write an entry atomically: concurrent readers see the old or the new one."""
        sizes = [(name, len(data)) for name, data in parts.items()]
        header = {"parts": sizes, "digest": _digest(key, sizes, parts.values())}
        line = json.dumps(header).encode()
        # The first part begins at a multiple of 64 bytes of the mapping, where vectors of weights are
        # read fastest.
        line += b" " * (-(len(line) + 1) % ALIGNMENT) + b"\n"
        file = self._file(key)
        self.secure()
        files.write(file, [line, *parts.values()], "cache_dir", mode=0o600)
        self._trim()

    def secure(self) -> None:
        """Create the folder; raise if other users can write to it, since cached programs are executed."""
        try:
            files.private_folder(self.folder, above=False)  # entries are signed
        except OSError as error:
            raise OptionError(
                f"the cache folder '{self.folder}' cannot be written: {error.strerror or error}",
                hint="pass another cache_dir=",
            ) from None

    def info(self) -> StoreInfo:
        files = list(self._files())
        return StoreInfo(self.folder, len(files), sum(size for _, size, _ in files), self.limit)

    def clear(self) -> int:
        """Remove every entry and return their number."""
        files = list(self._files())
        for _, _, path in files:
            with contextlib.suppress(OSError):
                path.unlink()
        return len(files)

    def _file(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}{SUFFIX}"

    def _files(self) -> Iterator[tuple[float, int, Path]]:
        for folder in self.folder.glob("??"):
            files.sweep(folder)
        for path in self.folder.glob(f"??/*{SUFFIX}"):
            with contextlib.suppress(OSError):
                status = path.stat()
                yield status.st_mtime, status.st_size, path

    def _trim(self) -> None:
        files = sorted(self._files())
        total = sum(size for _, size, _ in files)
        # The latest entry stays even if it alone exceeds the limit, or the program would be compiled
        # again at each start.
        for _, size, path in files[:-1]:
            if total <= self.limit:
                return
            with contextlib.suppress(OSError):
                path.unlink()
                total -= size


def _read(file: BinaryIO, key: str, mapped: str | None) -> dict[str, Any] | None:
    """Return the parts of an entry, or None if they were not written for this key by this user."""
    status = os.fstat(file.fileno())
    if not files.is_private(status):
        return None
    try:
        line = file.readline(HEADER)
        header = json.loads(line if line.endswith(b"\n") else b"")
        sizes = [(str(name), int(size)) for name, size in header["parts"]]
        if min((size for _, size in sizes), default=0) < 0 or sum(size for _, size in sizes) != status.st_size - len(
            line
        ):
            return None
        parts: dict[str, Any] = {}
        for name, size in sizes:  # each once: a part can hold all weights of a model
            if (
                name == mapped and not parts and size and os.name == "posix"
            ):  # elsewhere mapped files cannot be replaced
                view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                parts[name] = memoryview(view)[len(line) : len(line) + size]
                file.seek(size, os.SEEK_CUR)
            else:
                parts[name] = file.read(size)
        return parts if hmac.compare_digest(_digest(key, sizes, parts.values()), str(header["digest"])) else None
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def _digest(key: str, sizes: Sequence[tuple[str, int]], parts: Iterable[bytes | bytearray]) -> str:
    """Sign an entry's key, the names and sizes of its parts and their bytes."""
    signed = hmac.new(_secret(key_file()), json.dumps([key, sizes]).encode() + b"\n", "sha256")
    for part in parts:
        signed.update(part)
    return signed.hexdigest()


@cache
def _secret(file: Path) -> bytes:
    """Return the user's secret, created at the first use."""
    try:
        if not os.path.lexists(file):
            file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with files.parts(file, "the key of caches") as folder:
                part = folder / "key"
                with open(os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as out:
                    out.write(secrets.token_bytes(SECRET))
                with contextlib.suppress(FileExistsError):  # another process was first
                    os.link(part, file)
        with open(os.open(file, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0)), "rb") as out:
            status, secret = os.fstat(out.fileno()), out.read()
    except OSError as error:
        raise OptionError(
            f"the key of caches '{file}' cannot be read or written: {error.strerror or error}",
            hint="omit cache=, or set MITHRIL_CACHE_KEY to a file of your own",
        ) from None
    private = files.is_private(status, 0o077)
    if not private or len(secret) < SECRET:
        raise OptionError(
            f"'{file}' is not a key of caches" if private else f"the key of caches '{file}' is not secret",
            facts=["anyone who knows the key can insert programs that are executed from a cache"],
            hint=f"rm '{file}': a new key is created, and programs are recompiled",
        )
    return secret


def key_file() -> Path:
    """Return ``MITHRIL_CACHE_KEY``, or a file in the user's configuration folder."""
    configured = os.environ.get("MITHRIL_CACHE_KEY")
    if configured:
        return Path(configured)
    import platformdirs

    return Path(platformdirs.user_config_dir("mithril", appauthor=False)) / "cache.key"


def default_folder() -> Path:
    """Return ``MITHRIL_CACHE_DIR``, or a folder in the user's cache folder."""
    configured = os.environ.get("MITHRIL_CACHE_DIR")
    if configured:
        return Path(configured)
    import platformdirs

    return Path(platformdirs.user_cache_dir("mithril", appauthor=False))


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
        # By address, since hashing gigabytes takes longer than most computations here; the weak
        # reference tells a new array at the same address from the old one.
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
        for other in [*cls._all]:
            with other._lock:
                for key in [key for key in other._results if key[0] in released]:
                    other._results.pop(key, None)

    @classmethod
    def results_of(cls, array: np.ndarray[Any, Any]) -> list[Any]:
        """Return the results of all tables for an array."""
        return [result for other in cls._all for ref, result in [*other._results.values()] if ref() is array]
