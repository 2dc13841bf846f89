"""Translation of shared helpers to an array library: ``xp.name(...)`` in their source becomes a call of the library."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

ATOMS = (ast.Name, ast.Attribute, ast.Call, ast.Subscript)


class _Placeholder:
    """Placeholder of the array library in shared helpers, whose source is translated and never executed here."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"xp.{name} exists in generated files only")


xp: Any = _Placeholder()


class Dialect:
    """The translation of shared helpers to one array library.

    ``words`` maps names of ``xp`` to another name of the library, or to a template of the arguments such as
    ``{0}.to({1})``. ``functions`` are primitives of the backend, called for ``xp.<name>``; one with the name of a
    shared helper replaces it. Every other ``xp.<name>`` is the function ``<module>.<name>``.
    """

    def __init__(
        self,
        module: str = "xp",
        words: Mapping[str, str] = MappingProxyType({}),
        functions: Iterable[Callable[..., Any]] = (),
    ) -> None:
        self.module = module
        self.words = words
        self.functions = {function.__name__: function for function in functions}
        self._sources: WeakKeyDictionary[Callable[..., Any], tuple[str, list[Callable[..., Any]]]] = WeakKeyDictionary()

    def version(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the backend's replacement of a helper, or the helper itself."""
        return self.functions.get(function.__name__, function)

    def source(self, function: Callable[..., Any]) -> tuple[str, list[Callable[..., Any]]]:
        """Return the source of a helper in this dialect, and the primitives that it calls."""
        if function not in self._sources:
            text = textwrap.dedent(inspect.getsource(function)).strip()
            text = text[text.index("def ") :]
            called: dict[str, Callable[..., Any]] = {}
            if "xp." in text:
                starts = [0]
                for line in text.splitlines(keepends=True):
                    starts.append(starts[-1] + len(line))
                text = self._written(ast.parse(text), text, starts, called)
            self._sources[function] = text, list(called.values())
        return self._sources[function]

    def _written(self, node: ast.AST, text: str, starts: list[int], called: dict[str, Callable[..., Any]]) -> str:
        """Return the source of a node with its placeholders replaced."""
        begin, end = _span(node, starts) if hasattr(node, "lineno") else (0, len(text))
        parts, reached = [], begin
        for inner in _placeholders(node):
            low, high = _span(inner, starts)
            parts += [text[reached:low], self._replacement(inner, text, starts, called)]
            reached = high
        return "".join([*parts, text[reached:end]])

    def _replacement(self, node: ast.expr, text: str, starts: list[int], called: dict[str, Any]) -> str:
        placeholder = node.func if isinstance(node, ast.Call) else node
        assert isinstance(placeholder, ast.Attribute)
        name = placeholder.attr
        if name in self.functions:
            called[name] = self.functions[name]
            word = name
        else:
            word = self.words.get(name, f"{self.module}.{name}")
        if not isinstance(node, ast.Call):
            return word
        begin, end = _span(node, starts)
        arguments = [self._written(a, text, starts, called) for a in node.args]
        if "{" not in word:
            keywords = [f"{k.arg}={self._written(k.value, text, starts, called)}" for k in node.keywords]
            return f"{word}({', '.join([*arguments, *keywords])})"

        def argument(match: re.Match[str]) -> str:
            """Return an argument, in parentheses unless it is an atom or delimited by commas."""
            k = int(match[1])
            prefix = word[: match.start()] or text[:begin]
            suffix = word[match.end() :] or text[end:]
            is_delimited = prefix.endswith(("(", ", ", "= ")) and suffix.startswith((")", ",", "\n"))
            return arguments[k] if is_delimited or isinstance(node.args[k], ATOMS) else f"({arguments[k]})"

        return re.sub(r"\{(\d)\}", argument, word)


def _span(node: Any, starts: list[int]) -> tuple[int, int]:
    return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset


def _is_placeholder(node: Any) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "xp"


def _placeholders(node: ast.AST) -> Iterator[Any]:
    """Yield the outermost uses of ``xp`` in or at a node, in the order of the text."""
    if _is_placeholder(node) or (isinstance(node, ast.Call) and _is_placeholder(node.func)):
        yield node
        return
    nested = [inner for child in ast.iter_child_nodes(node) for inner in _placeholders(child)]
    yield from sorted(nested, key=lambda inner: (inner.lineno, inner.col_offset))


Function = TypeVar("Function", bound=Callable[..., Any])


def needs(*functions: Callable[..., Any], imports: tuple[str, ...] = ()) -> Callable[[Function], Function]:
    """Declare the helpers that a helper calls, and its import lines in addition to those of the backend."""

    def mark(function: Function) -> Function:
        function.__dict__.update(needs=functions, imports=imports)
        return function

    return mark
