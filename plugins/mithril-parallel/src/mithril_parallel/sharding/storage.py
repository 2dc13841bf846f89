"""Folders of checkpoints: on a local disk, or in an object store by fsspec."""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from mithril.graph import BackendError, InputError, MithrilError, PluginError, parsed_json
from mithril.system import files

PathLike = str | os.PathLike[str]


class DamagedError(InputError):
    """A checkpoint is incomplete or its bytes have changed; an older one may be intact."""


class SaveError(BackendError):
    """A process could not write its part of a checkpoint; all processes know, and the previous one is intact."""


@contextmanager
def damaged(path: object) -> Iterator[None]:
    """Raise DamagedError if a library cannot read a checkpoint."""
    try:
        yield
    except MithrilError:
        raise
    except Exception as error:  # every library has errors of its own
        hint = "use an older checkpoint, or copy this one again"
        raise DamagedError(
            f"'{path}' is damaged", facts=[f"{type(error).__name__}: {error}".partition("\n")[0][:300]], hint=hint
        ) from error


def parsed(content: bytes | str, description: str) -> Any:
    """Parse JSON within ``damaged``: malformed text is damage, and one that needs much memory is refused."""
    try:
        return parsed_json(content, description)
    except InputError as error:
        if error.hint is None:
            raise ValueError(error.what) from None
        raise


def library(name: str, package: str) -> Any:
    """Import a module of a library that only some formats need."""
    try:
        return import_module(name)
    except ImportError:
        raise PluginError(f"this format needs {package}", hint=f"pip install {package}") from None


class Folder(Protocol):
    """A folder of files that appear complete or not at all."""

    def __truediv__(self, name: str) -> Folder: ...
    def write(self, name: str, fill: Callable[[BinaryIO], Any], /) -> None: ...
    def open(self, name: str, /) -> BinaryIO: ...
    def exists(self, name: str, /) -> bool: ...
    def is_file(self) -> bool: ...
    def names(self) -> list[str]: ...
    def size(self) -> int: ...
    def remove(self, name: str, /) -> None: ...


def _unreadable(error: OSError, message: str) -> InputError:
    """Return the error of a file that cannot be opened: one without access may be intact, and an older one too old."""
    if isinstance(error, FileNotFoundError):
        return DamagedError(message)
    return InputError(message, hint="check the permissions of the file and the connection to the store")


class LocalFolder:
    """A folder of the file system."""

    def __init__(self, path: PathLike) -> None:
        self.path = Path(path)

    def __str__(self) -> str:
        return str(self.path)

    def __truediv__(self, name: str) -> LocalFolder:
        return LocalFolder(self.path / name)

    def write(self, name: str, fill: Callable[[BinaryIO], Any]) -> None:
        """Write a file and make it durable; a failure leaves the previous file unchanged."""
        target = self.path / name
        changed = [target.parent]  # the folders with a new entry
        while not changed[-1].exists():
            changed.append(changed[-1].parent)
        with files.parts(target, "checkpoint") as folder:
            part = folder / "part"
            with open(part, "wb") as file:
                fill(file)
                file.flush()
                os.fsync(file.fileno())
            files.move(part, target)
        # The entry of a new file is in its folder, whose own entry is in the one above: after a crash
        # of the machine either may be missing unless it is written, too.
        for folder in changed:
            _make_durable(folder)

    def open(self, name: str) -> BinaryIO:
        path = files.inside(self.path, name)
        try:
            return open(path, "rb")
        except OSError as error:
            raise _unreadable(error, f"'{self.path / name}' cannot be read: {error.strerror}") from None

    def exists(self, name: str) -> bool:
        return (self.path / files.relative(name)).exists()

    def is_file(self) -> bool:
        """Whether there is a file at the path of the folder."""
        return self.path.is_file()

    def size(self) -> int:
        """Return the bytes of all files in the folder and in those below."""
        return sum(path.lstat().st_size for path in self.path.rglob("*"))

    def names(self) -> list[str]:
        return sorted(entry.name for entry in self.path.iterdir()) if self.path.is_dir() else []

    def remove(self, name: str) -> None:
        """Remove a file or a folder; another process may remove it at the same time."""
        target = self.path / name
        if target.is_dir():
            shutil.rmtree(target, ignore_errors=True)
        else:
            target.unlink(missing_ok=True)


class RemoteFolder:
    """A folder of an object store: an object appears when it is complete."""

    def __init__(self, files: Any, path: str) -> None:
        self.files, self.path = files, path.rstrip("/")

    def __str__(self) -> str:
        return str(self.files.unstrip_protocol(self.path))

    def __truediv__(self, name: str) -> RemoteFolder:
        return RemoteFolder(self.files, f"{self.path}/{name}")

    def write(self, name: str, fill: Callable[[BinaryIO], Any]) -> None:
        target = f"{self.path}/{name}"
        self.files.makedirs(target.rpartition("/")[0], exist_ok=True)
        with self.files.open(target, "wb") as file:
            fill(file)

    def open(self, name: str) -> BinaryIO:
        try:
            file: BinaryIO = self.files.open(f"{self.path}/{files.relative(name)}", "rb")
        except OSError as error:
            raise _unreadable(error, f"'{self}/{name}' cannot be read: {error}") from None
        return file

    def exists(self, name: str) -> bool:
        return bool(self.files.exists(f"{self.path}/{files.relative(name)}"))

    def is_file(self) -> bool:
        """Whether there is an object at the path of the folder."""
        return bool(self.files.isfile(self.path))

    def size(self) -> int:
        """Return the bytes of all objects in the folder."""
        return int(self.files.du(self.path))

    def names(self) -> list[str]:
        # fsspec caches listings, also those of before another process has written.
        self.files.invalidate_cache()
        if not self.files.isdir(self.path):
            return []
        return sorted(path.rstrip("/").rpartition("/")[2] for path in self.files.ls(self.path, detail=False))

    def remove(self, name: str) -> None:
        if self.exists(name):
            self.files.rm(f"{self.path}/{name}", recursive=True)


def folder_of(path: PathLike) -> Folder:
    """Return the folder of a path; one with a protocol, such as ``s3://bucket/run``, is opened by fsspec."""
    text = os.fspath(path)
    if "://" not in text:
        return LocalFolder(text)
    try:
        fsspec = import_module("fsspec.core")
    except ImportError:
        raise PluginError(f"'{text}' needs fsspec", hint='pip install "mithril-parallel[storage]"') from None
    try:
        file_system, root = fsspec.url_to_fs(text)
    except (ImportError, ValueError) as error:
        raise PluginError(f"fsspec cannot open '{text}'", facts=[str(error)]) from None
    return RemoteFolder(file_system, root)


def read_bytes(folder: Folder, name: str) -> bytes:
    with folder.open(name) as file:
        return file.read()


def write_bytes(folder: Folder, name: str, data: bytes) -> None:
    folder.write(name, lambda file: shutil.copyfileobj(io.BytesIO(data), file))


def _make_durable(folder: Path) -> None:
    """Make a renaming in the folder durable, if the platform supports it."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
