"""A folder of results by key: written whole or not at all, checked when read, bounded in size.

Each entry is one file: a line of JSON that names its parts, their sizes and a checksum, then their bytes. A file that
is torn, too short or changed is dropped, as if it had never been there. Several processes may share the folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from mithril.base.errors import OptionError

SUFFIX = ".mithril"
LIMIT = 2 << 30  # bytes in all; the entries that were not used for longest go first
HEADER = 1 << 20  # a longer first line is no header


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
        """The parts of an entry, or None where there is none that is whole."""
        file = self._file(key)
        try:
            raw = file.read_bytes()
        except OSError:
            return None
        parts = _read(raw)
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
        header = {
            "parts": [[name, len(data)] for name, data in parts.items()],
            "sha256": hashlib.sha256(body).hexdigest(),
        }
        file = self._file(key)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            handle, part = tempfile.mkstemp(dir=file.parent, suffix=".part")
            with os.fdopen(handle, "wb") as out:
                out.write(json.dumps(header).encode() + b"\n" + body)
            os.replace(part, file)
        except OSError as error:
            raise OptionError(
                f"the cache folder '{self.folder}' cannot be written: {error.strerror or error}",
                hint="give another cache_dir=",
            ) from None
        self._trim()

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
        for path in self.folder.glob(f"??/*{SUFFIX}"):
            with contextlib.suppress(OSError):
                found = path.stat()
                yield found.st_mtime, found.st_size, path
        for path in self.folder.glob("??/*.part"):  # of a process that was killed while writing
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > 3600:
                    path.unlink()

    def _trim(self) -> None:
        files = sorted(self._files())
        total = sum(size for _, size, _ in files)
        for _, size, path in files[:-1]:
            if total <= self.limit:
                return
            with contextlib.suppress(OSError):
                path.unlink()
                total -= size


def _read(raw: bytes) -> dict[str, bytes] | None:
    """The parts of a file's bytes; None where anything is not as written."""
    end = raw.find(b"\n", 0, HEADER)
    try:
        header = json.loads(raw[: max(end, 0)])
        body = raw[end + 1 :]
        sizes = [(str(name), int(size)) for name, size in header["parts"]]
        if sum(size for _, size in sizes) != len(body) or hashlib.sha256(body).hexdigest() != header["sha256"]:
            return None
    except (ValueError, TypeError, KeyError):
        return None
    parts, at = {}, 0
    for name, size in sizes:
        parts[name] = body[at : at + size]
        at += size
    return parts


def default_folder() -> Path:
    """``MITHRIL_CACHE_DIR``, else the user's cache folder."""
    named = os.environ.get("MITHRIL_CACHE_DIR")
    if named:
        return Path(named)
    import platformdirs

    return Path(platformdirs.user_cache_dir("mithril", appauthor=False))
