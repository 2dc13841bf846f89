"""Run programs of the predecessor: their imports of ``mithril`` get ``mithril_compat``."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import FileFinder, ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

SCRIPT = "MITHRIL_COMPAT_SCRIPT"  # the program that other processes of a mesh run
OLD, NEW = "mithril", "mithril_compat"


class Redirected(ast.NodeTransformer):
    """Imports of ``mithril`` and of modules in it, from ``mithril_compat``; lines stay."""

    def visit_Import(self, node: ast.Import) -> ast.AST | list[ast.AST]:
        statements: list[ast.AST] = []
        for alias in node.names:
            if not _is_old(alias.name):
                statements.append(ast.Import([alias]))
            elif alias.asname is None:  # import mithril.models binds mithril
                statements += [ast.Import([ast.alias(_new(alias.name))]), ast.Import([ast.alias(NEW, OLD)])]
            else:
                statements.append(ast.Import([ast.alias(_new(alias.name), alias.asname)]))
        return [ast.copy_location(s, node) for s in statements]

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST:
        if node.level == 0 and node.module is not None and _is_old(node.module):
            node.module = _new(node.module)
        return node


def _is_old(module: str) -> bool:
    return module == OLD or module.startswith(f"{OLD}.")


def _new(module: str) -> str:
    return NEW + module[len(OLD) :]


def redirected(source: bytes | str, path: str) -> CodeType:
    """Return the code of a program whose imports are redirected."""
    tree = ast.fix_missing_locations(Redirected().visit(ast.parse(source, path)))
    return compile(tree, path, "exec")


class Loader(SourceFileLoader):
    """Loads a module of the program, and writes no bytecode: the file may also be run without this package."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return redirected(self.get_data(path), path)


class Finder(MetaPathFinder):
    """Finds the modules next to the script; those of installed packages are left to Python."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name.partition(".")[0].startswith(OLD):
            return None
        for folder in path if path is not None else [self.folder]:
            directory = Path(folder or os.getcwd()).absolute()
            if not directory.is_relative_to(self.folder) or "site-packages" in directory.parts:
                continue
            spec: Any = FileFinder(str(directory), (Loader, [".py"])).find_spec(name)
            if spec is not None and isinstance(spec.loader, Loader):
                return spec_from_file_location(
                    name, spec.origin, loader=spec.loader, submodule_search_locations=spec.submodule_search_locations
                )
        return None


def redirect(folder: str) -> None:
    """Let the modules in a folder import the predecessor's names, also from where they import each other."""
    sys.path.insert(0, folder)
    sys.meta_path.insert(sys.meta_path.index(PathFinder), Finder(folder))  # after the built-in modules


def run(script: str, arguments: Sequence[str] = ()) -> dict[str, Any]:
    """Run a script as ``__main__``, and return its names."""
    path = os.path.abspath(script)
    folder = os.path.dirname(path)
    sys.argv = [script, *arguments]
    redirect(folder)
    main = ModuleType("__main__")
    main.__file__ = path
    os.environ[SCRIPT] = path
    main.__spec__ = ModuleSpec("mithril_compat.script", None, origin=path)  # by which a mesh starts other processes
    sys.modules["__main__"] = main
    with open(path, "rb") as file:
        exec(redirected(file.read(), path), main.__dict__)
    return main.__dict__
