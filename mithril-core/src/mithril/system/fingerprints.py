"""Fingerprints: content hashes of models, functions and packages. Equal fingerprints imply equal behavior.

A class defines its content by ``__fingerprint__``, a tuple of parts. An object of an unknown class without this method,
and a function that closes over such an object, have no fingerprint.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import os
import types
from collections.abc import Collection, Mapping, Set
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from mithril.graph import registry

PLAIN = (bool, int, float, complex, str, bytes, type(None))


class UnhashableObject(Exception):
    """An object has no fingerprint; the message names it."""


def fingerprint(*things: Any) -> str:
    """Return a hash of all objects together."""
    writer = _Writer()
    for thing in things:
        writer.add(thing)
    return writer.digest()


class _Writer:
    """Serializer of objects to a canonical list of words. A repeated object is written as its number."""

    def __init__(self) -> None:
        self.words: list[str] = []
        self.numbers: dict[int, int] = {}  # id -> number
        self.references: list[Any] = []  # keep the objects alive, so that ids stay unique

    def digest(self) -> str:
        return hashlib.sha256("\n".join(self.words).encode()).hexdigest()

    def text(self, *words: str) -> None:
        self.words += words

    def add(self, thing: Any) -> None:
        if isinstance(thing, PLAIN):
            self.words.append(repr(thing))
            return
        # A repeated object is a reference: shared layers differ from equal ones, and cycles end.
        number = self.numbers.get(id(thing))
        if number is not None:
            self.words.append(f"#{number}")
            return
        self.numbers[id(thing)] = len(self.numbers)
        self.references.append(thing)
        self._object(thing)

    def _object(self, thing: Any) -> None:
        kind = type(thing)
        parts = getattr(kind, "__fingerprint__", None)
        if parts is not None:
            self.text(kind.__name__)
            self.add(parts(thing))
        elif isinstance(thing, (tuple, list)):
            self.text(kind.__name__, str(len(thing)))
            for item in thing:
                self.add(item)
        elif isinstance(thing, Mapping):
            self.text("mapping", str(len(thing)))
            for key, value in thing.items():
                self.add(key)
                self.add(value)
        elif isinstance(thing, Set):
            # Sets of strings have another order in each process.
            self.text("set", *sorted(map(repr, thing)))
        elif isinstance(thing, np.ndarray):
            self.text("array", thing.dtype.name, str(thing.shape))
            self.text(hashlib.sha256(np.asarray(thing, order="C").reshape(-1).view(np.uint8).data).hexdigest())
        elif isinstance(thing, (np.generic, Path)):
            self.text(kind.__name__, repr(str(thing)))
        elif isinstance(thing, ast.AST):
            self.text("expression", repr(ast.dump(thing)))
        elif isinstance(thing, types.FunctionType):
            self._function(thing)
        elif isinstance(thing, types.MethodType):
            self.text("method")
            self._function(thing.__func__)
            self.add(thing.__self__)
        elif isinstance(thing, types.BuiltinFunctionType):
            self.text("builtin", str(thing.__module__), thing.__qualname__)
        elif isinstance(thing, type):
            self._class(thing)
        elif _is_record(kind):
            self.text("object")
            self.add(fields(thing))
        else:
            raise UnhashableObject(f"an object of the class '{kind.__module__}.{kind.__qualname__}'")

    def _class(self, kind: type) -> None:
        """Write the name of a class and, for classes of users, its methods and constants."""
        self.text("class", kind.__module__, kind.__qualname__)
        for base in kind.__mro__[:-1]:
            if _of_this_project(base) or base.__module__ in ("builtins", "typing", "abc"):
                continue
            for name, value in sorted(vars(base).items()):
                function = getattr(value, "__func__", getattr(value, "fget", value))
                if isinstance(function, types.FunctionType):
                    self.text(name)
                    self._function(function)
                elif isinstance(value, (*PLAIN, tuple)) and not name.startswith("__"):
                    self.text(name)
                    self.add(value)

    def _function(self, function: Any) -> None:
        # The bytecode, not the source: comments and positions of a function do not change a program.
        self.text("function", function.__module__ or "", function.__qualname__, code_text(function.__code__))
        self.add(function.__defaults__)
        self.add(function.__kwdefaults__)
        for cell in function.__closure__ or ():
            self.add(cell.cell_contents)
        if _of_this_project(function):
            return
        for name in sorted(_names(function.__code__) & function.__globals__.keys()):  # globals that it uses
            value = function.__globals__[name]
            if isinstance(value, (types.FunctionType, *PLAIN, tuple, list, dict, np.ndarray)):
                self.text(name)
                self.add(value)
            elif isinstance(value, types.ModuleType):
                self.text(name, value.__name__, _file_stamp(getattr(value, "__file__", None)))


def _is_record(kind: type) -> bool:
    """Whether the fields of an object define its content: dataclasses, and classes of this project."""
    return hasattr(kind, "__dataclass_fields__") or _of_this_project(kind)


def _of_this_project(thing: type | types.FunctionType) -> bool:
    """Whether a class or function belongs to a package of this project, whose stamp is in every cache key."""
    return (thing.__module__ or "").partition(".")[0] in registry.host.project_packages()


def fields(thing: Any, skip: Collection[str] = ()) -> tuple[Any, ...]:
    """Return the class of an object and its fields by name, without those named in ``skip``."""
    try:
        values = dict(object.__getattribute__(thing, "__dict__"))
    # Classes that only have slots.
    except AttributeError:
        values = {}
    slots = (name for base in type(thing).__mro__ for name in base.__dict__.get("__slots__", ()))
    for name in slots:
        with contextlib.suppress(AttributeError):  # an unset slot
            values[name] = object.__getattribute__(thing, name)
    return (type(thing), *((name, values[name]) for name in sorted(values) if name not in skip))


def _names(code: types.CodeType) -> set[str]:
    """Return every global or attribute name used by a function or its inner functions."""
    inner = [_names(c) for c in code.co_consts if isinstance(c, types.CodeType)]
    return set(code.co_names).union(*inner)


@cache
def code_text(code: types.CodeType) -> str:
    """Return a hash of the bytecode, constants and names of a function, without its source location."""
    inner = [code_text(c) if isinstance(c, types.CodeType) else repr(c) for c in code.co_consts]
    parts = [code.co_code.hex(), *inner, *code.co_names, *code.co_varnames, *code.co_freevars]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _file_stamp(path: str | None) -> str:
    """Return the size and modification time of a file, or an empty text for modules without a file."""
    if path is None or not os.path.isfile(path):
        return ""
    status = os.stat(path)
    return f"{status.st_size} {status.st_mtime_ns}"


@cache
def package_version_key(name: str) -> str:
    """Return a hash of the sizes and modification times of a package's files, which changes on edit or reinstall."""
    stamps = [f"{path} {_file_stamp(file)}" for path, file in _package_files(name)]
    return hashlib.sha256("\n".join(stamps).encode()).hexdigest()


@cache
def package_content(name: str) -> str:
    """Return a hash of the contents of a package's files."""
    digest = hashlib.sha256()
    for path, file in _package_files(name):
        digest.update(f"{path}\n".encode() + Path(file).read_bytes())
    return digest.hexdigest()


def _package_files(name: str) -> list[tuple[str, str]]:
    """Return the files of a package, or the only file of a module, with their relative paths."""
    spec = find_spec(name)
    if spec is None or (not spec.has_location and not spec.submodule_search_locations):
        return []
    if not spec.submodule_search_locations:
        return [("", str(spec.origin))]
    files = []
    for root in spec.submodule_search_locations:
        pending = [root]
        while pending:
            with os.scandir(pending.pop()) as entries:
                for entry in entries:
                    if entry.is_dir():
                        if entry.name != "__pycache__":
                            pending.append(entry.path)
                    elif entry.name.endswith((".py", ".so", ".j2")):
                        files.append((os.path.relpath(entry.path, root), entry.path))
    return sorted(files)
