"""A folder of results by key: written whole or not at all, checked when read, bounded in size.

Each entry is one file: a line of JSON that names its parts and their sizes, with a digest of all this and the entry's
key, then the bytes. The digest is keyed by a secret of the user's: a file that is torn, changed, renamed or written by
another user is dropped, as if it had never been there. Several processes may share the folder.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from mithril.base import files
from mithril.base.errors import OptionError

SUFFIX = ".mithril"
LIMIT = 2 << 30  # bytes in all; the entries that were not used for longest go first
HEADER = 1 << 20  # a longer first line is no header
SECRET = 32  # bytes


@dataclass(frozen=True)
class StoreInfo:
    """What lies in a store."""

    folder: Path
    entries: int
    bytes: int
    limit: int


class Store:
    """``put`` and ``get`` parts by key. Nothing in it is ever unpickled."""

    def __init__(self, folder: str | os.PathLike[str] | None = None, limit: int = LIMIT) -> None:
        self.folder = Path(folder) if folder is not None else default_folder()
        self.limit = limit

    def get(self, key: str) -> dict[str, bytes] | None:
        """Return the parts of an entry, or None if there is none that is whole and the user's own."""
        file = self._file(key)
        try:
            with file.open("rb") as opened:
                raw = opened.read() if files.own(os.fstat(opened.fileno())) else b""
        except OSError:
            return None
        self.secure()
        parts = _read(raw, key)
        if parts is None:
            with contextlib.suppress(OSError):
                file.unlink()
            return None
        with contextlib.suppress(OSError):
            os.utime(file)
        return parts

    def put(self, key: str, parts: Mapping[str, bytes]) -> None:
        """Write an entry; readers see the old one or the new one, never half of it."""
        body = b"".join(parts.values())
        sizes = [(name, len(data)) for name, data in parts.items()]
        header = {"parts": sizes, "digest": _digest(key, sizes, body)}
        file = self._file(key)
        self.secure()
        files.write(file, json.dumps(header).encode() + b"\n" + body, "cache_dir", mode=0o600)
        self._trim()

    def secure(self) -> None:
        """Make the folder; raise if others can write to it, since programs in it are run."""
        try:
            files.private_folder(self.folder, above=False)  # entries are signed
        except OSError as error:
            raise OptionError(
                f"the cache folder '{self.folder}' cannot be written: {error.strerror or error}",
                hint="give another cache_dir=",
            ) from None

    def info(self) -> StoreInfo:
        files = list(self._files())
        return StoreInfo(self.folder, len(files), sum(size for _, size, _ in files), self.limit)

    def clear(self) -> int:
        """Remove every entry; how many there were."""
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
                found = path.stat()
                yield found.st_mtime, found.st_size, path

    def _trim(self) -> None:
        files = sorted(self._files())
        total = sum(size for _, size, _ in files)
        for _, size, path in files[:-1]:
            if total <= self.limit:
                return
            with contextlib.suppress(OSError):
                path.unlink()
                total -= size


def _read(raw: bytes, key: str) -> dict[str, bytes] | None:
    """Return the parts of a file's bytes, or None if anything is not as written for this key by this user."""
    end = raw.find(b"\n", 0, HEADER)
    try:
        header = json.loads(raw[: max(end, 0)])
        body = raw[end + 1 :]
        sizes = [(str(name), int(size)) for name, size in header["parts"]]
        if sum(size for _, size in sizes) != len(body):
            return None
        if not hmac.compare_digest(_digest(key, sizes, body), str(header["digest"])):
            return None
    except (ValueError, TypeError, KeyError):
        return None
    parts, at = {}, 0
    for name, size in sizes:
        parts[name] = body[at : at + size]
        at += size
    return parts


def _digest(key: str, sizes: Sequence[tuple[str, int]], body: bytes) -> str:
    """Sign an entry's key, the names and sizes of its parts and their bytes."""
    signed = hmac.new(_secret(key_file()), json.dumps([key, sizes]).encode() + b"\n", "sha256")
    signed.update(body)
    return signed.hexdigest()


@cache
def _secret(file: Path) -> bytes:
    """Return the user's secret, made at the first use."""
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
            hint="leave cache= out, or name a file of your own in MITHRIL_CACHE_KEY",
        ) from None
    private = files.own(status, 0o077)
    if not private or len(secret) < SECRET:
        raise OptionError(
            f"'{file}' is no key of caches" if private else f"the key of caches '{file}' is not secret",
            facts=["whoever knows the key can write programs into a cache that are run"],
            hint=f"rm '{file}': a new one is made, and programs are recompiled",
        )
    return secret


def key_file() -> Path:
    """``MITHRIL_CACHE_KEY``, else a file among the user's settings."""
    named = os.environ.get("MITHRIL_CACHE_KEY")
    if named:
        return Path(named)
    import platformdirs

    return Path(platformdirs.user_config_dir("mithril", appauthor=False)) / "cache.key"


def default_folder() -> Path:
    """``MITHRIL_CACHE_DIR``, else the user's cache folder."""
    named = os.environ.get("MITHRIL_CACHE_DIR")
    if named:
        return Path(named)
    import platformdirs

    return Path(platformdirs.user_cache_dir("mithril", appauthor=False))
