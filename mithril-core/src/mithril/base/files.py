"""Whole files or none: written next to the target under a random name that follows no link, then moved there."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from mithril.base.errors import MithrilError, OptionError

ABANDONED = 3600.0  # seconds without progress, after which a part is the leftover of a killed process

PART = re.compile(r"\..*\.[0-9a-f]{16}\.part", re.DOTALL)
PathLike = str | os.PathLike[str]


def write(path: PathLike, data: bytes | str, option: str = "", mode: int = 0o666) -> Path:
    """Write a file, its folders as well; ``option`` is the option or argument that named it, for messages."""
    raw = data.encode("utf-8", "backslashreplace") if isinstance(data, str) else data
    with parts(path, option) as folder:
        part = folder / "part"
        with open(os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode), "wb") as file:
            file.write(raw)
        return move(part, path)


@contextlib.contextmanager
def parts(path: PathLike, option: str = "") -> Iterator[Path]:
    """Open a private folder next to the target, for libraries that write files themselves; ``move`` ends the work.

    It goes away with the block, and those of killed processes at the next write.
    """
    target = Path(path)
    folder = target.parent / f".{target.name[:100]}.{secrets.token_hex(8)}.part"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        sweep(target.parent)
        folder.mkdir(mode=0o700)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    except MithrilError:
        raise
    except (OSError, ValueError) as error:
        cause = getattr(error, "strerror", None) or error
        name = f"{option}: " if option else ""
        raise OptionError(
            f"{name}'{target}' cannot be written: {cause}", hint="name a file in a folder that you may write to"
        ) from None


def move(part: Path, path: PathLike) -> Path:
    """Put a finished part in its place at once; a link there is replaced, not followed."""
    target = Path(path)
    os.replace(part, target)
    return target


def sweep(folder: Path) -> None:
    """Remove the parts that killed processes left there."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if PART.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                times = [entry.stat(follow_symlinks=False).st_mtime]
                times += [p.lstat().st_mtime for p in Path(entry.path).iterdir()]
                if time.time() - max(times) > ABANDONED:
                    shutil.rmtree(entry.path, ignore_errors=True)


# -- who else can write --------------------------------------------------------------------------------------------
def private_folder(path: Path, above: bool = True) -> None:
    """Make the folder, for this user alone; raise if others can write to it, or with ``above`` can exchange it."""
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    real = path.resolve()
    for place in (real, *(real.parents if above else ())):
        if problem := _trouble(place, top=place == real):
            raise OptionError(
                f"the cache folder '{path}' is not safe: {problem}",
                facts=["programs in a cache are run, so only you may be able to write there"],
                hint=f"chmod go-w '{place}', or name a folder of your own with cache_dir= or MITHRIL_CACHE_DIR",
            )


def own(status: os.stat_result, forbidden: int = 0o022) -> bool:
    """Whether a file is this user's, and gives others none of these permissions; always, where there are no users."""
    return not hasattr(os, "getuid") or (status.st_uid == os.getuid() and not status.st_mode & forbidden)


def _trouble(place: Path, top: bool) -> str | None:
    """Return the reason why others could put files into a folder, or exchange a folder in it."""
    if not hasattr(os, "getuid"):
        return None
    status = place.lstat()
    if status.st_uid not in (os.getuid(), 0):
        return f"'{place}' belongs to another user (number {status.st_uid})"
    sticky = status.st_mode & 0o1000 and not top  # users cannot move the files of others
    group = 0 if not top and status.st_gid == os.getgid() else 0o020
    return None if sticky or not status.st_mode & (0o002 | group) else f"others can write to '{place}'"
