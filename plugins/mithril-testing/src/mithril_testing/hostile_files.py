"""Hostile files of every format, and a watch over readers: the first effect, foreign error or hang is reported."""

from __future__ import annotations

import json
import os
import pickle
import signal
import struct
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mithril.graph import MithrilError

SECONDS = 30  # for one file
MARK = "hostile_mark"  # in each text and name that must not run
POLYNOMIAL = "*".join(["(" + "+".join("abcdefghijkl") + ")"] * 10)
DEEP = "[" * 100_000
PROCESSES = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "pty.spawn")
CANARIES = ("/etc/passwd", "outside")


class _Call:
    """An object whose pickle calls a function."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.function, self.arguments


def pickles() -> dict[str, bytes]:
    """Return pickles that start a program, run text, or exhaust who reads them."""
    return {
        "program": pickle.dumps(_Call(os.system, f"touch {MARK}")),
        "text": pickle.dumps(_Call(exec, f"open('{MARK}', 'w')")),
        "import": f"c{MARK}\nvalue\n.".encode(),
        "memo": b"\x80\x04]r\xff\xff\xff\xff.",
        "size": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b".",
        "tuples": b"\x80\x04)" + b"\x94h\x00\x86" * 1 + b"".join(b"2\x86" for _ in range(60)) + b"}\x8c\x01a\x86.",
        "empty": b"",
    }


def gguf(pairs: bytes, count: int = 1, tensors: int = 0) -> bytes:
    content = b"GGUF" + struct.pack("<IQQ", 3, tensors, count) + pairs
    return content + bytes(-len(content) % 32)


def safetensors(header: Any, data: bytes = b"") -> bytes:
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    return struct.pack("<Q", len(text)) + text + data


def zipped(path: Path, members: Mapping[str, bytes]) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)


def checkpoint(folder: Path, library: str = "", headers: Mapping[str, bytes] | None = None, **changes: Any) -> Path:
    """Write a folder in the format of ``ml.save_sharded``, with ``headers`` of its files by name."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, header in (headers or {}).items():
        (folder / name).write_bytes(struct.pack("<Q", len(header)) + header)
    commit: dict[str, Any] = {"format": "mithril-sharded-2", "id": "x", "metadata": {}, "shared": True}
    commit["parts"] = {name: zlib.crc32(header) for name, header in (headers or {}).items()}
    commit |= {"library": library, "checksums": {}} if library else {}
    (folder / "commit.json").write_text(json.dumps(commit | changes))
    return folder


class Watch:
    """The effects of readers: ``events`` has programs, imports, pickled classes, run text, files outside."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.armed = False
        sys.addaudithook(self._hook)  # hooks cannot be removed, so there is one for each process

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.armed:
            return
        self.armed = False
        try:
            if event in PROCESSES or (event == "pickle.find_class" and arguments[0] != "torch"):
                self.events.append(f"{event} {arguments[:2]!r:.200}")
            elif (event == "import" and MARK in arguments[0]) or (
                event == "exec" and MARK in f"{arguments[0].co_names} {arguments[0].co_consts}"
            ):
                self.events.append(f"{event} {MARK}")
            elif event == "open" and isinstance(arguments[0], (str, bytes)):
                name = os.path.realpath(os.fsdecode(arguments[0]))
                if name == CANARIES[0] or CANARIES[1] in Path(name).parts or MARK in name:
                    self.events.append(f"open {name}")
        finally:
            self.armed = True

    @contextmanager
    def watching(self) -> Iterator[None]:
        self.events, self.armed = [], True
        try:
            yield
        finally:
            self.armed = False

    def outcome(self, read: Callable[[], Any]) -> str:
        """Read a file and return "" if it is refused or read without an effect, else the problem."""

        def late(*_: Any) -> None:
            raise TimeoutError(f"not finished in {SECONDS} s")

        problem = ""
        signal.signal(signal.SIGALRM, late)
        signal.alarm(SECONDS)
        try:
            with self.watching(), suppress(MithrilError):
                read()
        except BaseException as error:  # a panic of Rust is a BaseException
            problem = f"{type(error).__name__}: {error}"[:300]
        finally:
            signal.alarm(0)
        return "; ".join([*self.events[:3], *([problem] if problem else [])])
