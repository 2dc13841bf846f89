"""Atomic file writes: to a temporary file next to the target, under a random name, then moved to the target."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
import stat
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from mithril.graph import InputError, MithrilError, OptionError, check_memory

ABANDONED = 3600.0  # seconds since its last change after which a part counts as left over by a killed process

PART = re.compile(r"\..*\.[0-9a-f]{16}\.part", re.DOTALL)
PathLike = str | os.PathLike[str]
# A function writes the file of a library at the path that it gets.
Data = bytes | bytearray | str | Sequence[bytes | bytearray] | Callable[[Path], None]
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def write(path: PathLike, data: Data, option: str = "", mode: int = 0o666) -> Path:
    """Write a file, of several parts in turn, and create its folders; ``option`` names it in messages."""
    with parts(path, option) as folder:
        return move(_written(folder / "part", data, mode), path)


def write_folder(path: PathLike, contents: Mapping[str, Data], option: str = "") -> Path:
    """Write files of a folder, which may exist; if one cannot be written, the folder is unchanged."""
    target = Path(path)
    with parts(target, option) as folder:
        written = {name: _written(folder / name, data) for name, data in contents.items()}
        target.mkdir(exist_ok=True)
        # All targets are checked before the first one is replaced: afterwards the folder could not be
        # restored.
        for name in written:
            _check_target(target / name)
        for name, part in written.items():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            move(part, target / name)
        return target


def _written(path: Path, data: Data, mode: int = 0o666) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if callable(data):
        data(path)
        return path
    encoded = data.encode("utf-8", "backslashreplace") if isinstance(data, str) else data
    # O_EXCL: a link that was placed under this name is not followed.
    with open(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode), "wb") as file:
        file.writelines([encoded] if isinstance(encoded, (bytes, bytearray)) else encoded)
    return path


@contextlib.contextmanager
def parts(path: PathLike, option: str = "") -> Iterator[Path]:
    """Create a private folder next to the target, for libraries that write files themselves; finish with ``move``.

    The folder is removed at the end of the block; folders of killed processes are removed at the next write.
    """
    target = Path(path)
    # Next to the target, because a move is atomic within one file system only.
    folder = target.parent / f".{target.name[:100]}.{secrets.token_hex(8)}.part"
    try:
        _check_target(target)
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
        code = getattr(error, "errno", None)  # None in errors of libraries
        place = "on a disk with free space" * (code is None or code in FULL)
        place += " and " * (code is None) + "in a folder with write permission" * (code not in FULL)
        raise OptionError(f"{name}'{target}' cannot be written: {cause}", hint=f"pass a file {place}") from None


def _check_target(target: Path) -> None:
    """Raise if the target is a device, pipe or socket: a file that replaces it would be of no use to its other end."""
    with contextlib.suppress(FileNotFoundError):
        mode = target.lstat().st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode) or stat.S_ISDIR(mode)):
            raise OSError(errno.EEXIST, "it is a device, pipe or socket")


def move(part: Path, path: PathLike) -> Path:
    """Move a finished part to its target atomically; a link at the target is replaced, not followed."""
    target = Path(path)
    os.replace(part, target)
    return target


def sweep(folder: Path) -> None:
    """Remove the parts that killed processes left in the folder."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if PART.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                times = [entry.stat(follow_symlinks=False).st_mtime]
                times += [p.lstat().st_mtime for p in Path(entry.path).iterdir()]
                if time.time() - max(times) > ABANDONED:
                    shutil.rmtree(entry.path, ignore_errors=True)


# -- files that files name ------------------------------------------------------------------------------------------
def relative(name: str) -> str:
    """Return the name of a file in a folder; raise InputError if it leads out of the folder."""
    steps = name.replace("\\", "/").split("/")
    if not name or "\0" in name or ".." in steps or not steps[0] or ":" in steps[0]:
        raise InputError(
            f"{name[:200]!r} names no file inside of its folder", facts=["names in files may not lead to other folders"]
        )
    return name


def inside(folder: PathLike, name: str) -> Path:
    """Return the path of a file that another file names, which need not exist; links may not lead out of the folder.

    Those of a snapshot in the cache of huggingface_hub lead to other folders of the same repository.
    """
    path, root = Path(folder) / relative(name), Path(folder).resolve()
    if root.parent.name == "snapshots" and root.parent.parent.name.startswith("models--"):
        root = root.parent.parent
    if not path.resolve().is_relative_to(root):
        raise InputError(
            f"'{path}' is a link that leads out of its folder",
            facts=[f"to '{path.resolve()}'"],
            hint="replace the link by a copy of the file",
        )
    return path


# -- permissions ---------------------------------------------------------------------------------------------------
def private_folder(path: Path, above: bool = True) -> None:
    """Create a folder for this user only; raise if others can write to it or, with ``above``, replace it."""
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    real = path.resolve()
    for folder in (real, *(real.parents if above else ())):
        if problem := _permission_problem(folder, is_target=folder == real):
            raise OptionError(
                f"the cache folder '{path}' is not safe: {problem}",
                facts=["cached programs are executed, so only you may have write permission"],
                hint=f"chmod go-w '{folder}', or set cache_dir= or MITHRIL_CACHE_DIR to a folder of your own",
            )


def is_private(status: os.stat_result, forbidden: int = 0o022) -> bool:
    """Whether this user owns the file and others lack these permissions; always true on systems without user ids."""
    return not hasattr(os, "getuid") or (status.st_uid == os.getuid() and not status.st_mode & forbidden)


def _permission_problem(folder: Path, is_target: bool) -> str | None:
    """Return the reason why others could write into the folder or replace a folder in it, or None."""
    if not hasattr(os, "getuid"):
        return None
    status = folder.lstat()
    if status.st_uid not in (os.getuid(), 0):
        return f"'{folder}' belongs to another user (number {status.st_uid})"
    sticky = status.st_mode & 0o1000 and not is_target  # users cannot move the files of others
    group = 0 if not is_target and status.st_gid == os.getgid() else 0o020
    return None if sticky or not status.st_mode & (0o002 | group) else f"others can write to '{folder}'"


def storable(name: object) -> bool:
    """Whether a name can be stored in a file: it is a str without lone surrogates."""
    return isinstance(name, str) and not any("\ud800" <= c <= "\udfff" for c in name)


def utf8(text: str) -> bytes:
    """Return the name in UTF-8; lone surrogates are encoded by their code points."""
    return text.encode("utf-8", "surrogatepass")


METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # Python bounds the memory of these while it reads them


def check_archive(archive: zipfile.ZipFile, size: int, name: str | os.PathLike[str]) -> None:
    """Raise InputError if the members that are compressed, together, expand too much, ValueError for other members."""
    for info in archive.infolist():
        if info.compress_type not in METHODS or info.flag_bits & 1:
            raise ValueError(f"'{info.filename}' is encrypted, or compressed by another method than deflate")
        if info.compress_size > size or (info.compress_type == zipfile.ZIP_STORED and info.file_size > size):
            raise ValueError(f"'{info.filename}' claims {info.file_size} bytes in a file of {size}")
    expanded = sum(i.file_size for i in archive.infolist() if i.compress_type != zipfile.ZIP_STORED)
    check_memory(expanded, size, f"the compressed content of '{os.fspath(name)}'")
