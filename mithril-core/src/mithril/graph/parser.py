"""Parser of graph text."""

from __future__ import annotations

import ast
import base64
import binascii
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from mithril.graph.attribute_types import parse_attributes
from mithril.graph.core import NOWHERE, Graph, Input, Node, Origin, Output, Value
from mithril.graph.dims import Shape, TensorType, parse_dim
from mithril.graph.dtypes import dtype as as_dtype
from mithril.graph.errors import MithrilError, ParseError
from mithril.graph.guards import Guard
from mithril.graph.limits import limit
from mithril.graph.registry import operation
from mithril.graph.result_names import PREFIXES, named_before_roles, result_name
from mithril.graph.verifier import verify

_NAME = r'(?:"(?:[^"\\]|\\.)*"|[^\s"]+)'  # in quotes, or without spaces
_HEAD = re.compile(rf"graph ({_NAME}) \{{$")
_DIM = re.compile(r"dim (\w+) in (\d+)\.\.(\d+|any)$")
_INPUT = re.compile(
    rf"(input|param|state|constant|cotangent)(?:\(({_NAME})\))? %({_NAME}): (\w+)\[([^\]]*)\]"
    r"(?: = (base64:\S*|\[[^\]]*\]))?(?: \{(.*)\})?$"
)
_GUARD = re.compile(r"guard (.+) (==|<=|divides) (.+?)(?:  # (.*))?$")
_ORIGIN = re.compile(r'^ *(?P<path>"(?:[^"\\]|\\.)*"|.*?)(?: ?@ (?P<file>.+):(?P<line>\d+))?$')
_RESULT = re.compile(rf"%({_NAME}): (\w+)\[([^\]]*)\]")
_OUTPUT = re.compile(rf"({_NAME})=%({_NAME})$")
_RESULT_OF = re.compile(rf"({'|'.join(PREFIXES)})\(({_NAME}?)\)(?: ({_NAME}))?=%({_NAME})$")
_OPNAME = re.compile(r" = ([\w.]+)\(")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_MARK = re.compile(r'"(?:[^"\\]|\\.)*"?|[()\[\]{},]|  # ')  # a string literal, or a mark
MAX_LINES = 5_000_000


def parse(text: str) -> Graph:
    """Parse and verify the text of a graph; raise ``ParseError`` with the line if it is malformed."""
    if not isinstance(text, str):
        raise ParseError(f"graph text is a str, not {type(text).__name__}")
    lines = text.splitlines()
    if len(lines) > MAX_LINES:
        raise ParseError(f"graph text of {len(lines)} lines is too long", facts=[f"at most {MAX_LINES}"])
    reader = _Reader(lines)
    graph = reader.graph(0)
    if reader.rest():
        raise reader.error("text after the end of the graph")
    verify(graph)
    return graph


class _Reader:
    def __init__(self, lines: list[str]) -> None:
        self.lines = lines
        self.at = 0

    def next(self) -> str:
        while self.at < len(self.lines):
            line = self.lines[self.at].strip()
            self.at += 1
            if line and not line.startswith("#"):
                return line
        raise ParseError("graph text ends too early", hint="a '}' is missing")

    def rest(self) -> bool:
        return any(line.strip() for line in self.lines[self.at :])

    def error(self, message: str, line: str = "") -> ParseError:
        return ParseError(message, facts=[f"line {self.at}: {line or self.lines[self.at - 1].strip()}"])

    def graph(self, depth: int, outer_limits: Mapping[str, tuple[int, int | None]] | None = None) -> Graph:
        if depth > limit("depth"):
            raise self.error("regions nested too deeply")
        head = self.next()
        match = _HEAD.match(head)
        if not match:
            raise self.error("expected 'graph NAME {'", head)
        name = _unquoted(match[1])
        self_values: dict[str, Value] = {}
        # A region may use symbols that only the enclosing graph declares.
        limits = dict(outer_limits or {})
        inputs: list[Input] = []
        guards: list[Guard] = []
        nodes: list[Node] = []
        while True:
            line = self.next()
            try:
                if line.startswith("dim "):
                    self._dim(line, limits)
                elif line.startswith("guard "):
                    guards.append(self._guard(line, limits))
                elif line.startswith(("input ", "param ", "state ", "constant ", "cotangent(")):
                    inputs.append(self._input(line, limits, self_values))
                elif line.startswith("return"):
                    results = self._results(line, self_values, {i.name for i in inputs if i.role == "state"})
                    if self.next() != "}":
                        raise self.error("expected '}' after return")
                    return Graph(tuple(inputs), tuple(nodes), results, name, tuple(guards))
                else:
                    nodes.append(self._node(line, limits, self_values, depth))
            except ParseError as error:
                raise error.with_facts(f"line {self.at}: {line}") from None
            except (MithrilError, ValueError, TypeError, KeyError, OverflowError) as error:
                raise ParseError(f"cannot read this line: {error}", facts=[f"line {self.at}: {line}"]) from error

    # -- one line each -----------------------------------------------------------------------------------------------
    def _dim(self, line: str, limits: dict[str, tuple[int, int | None]]) -> None:
        match = _DIM.match(line)
        if not match:
            raise self.error("expected 'dim NAME in LOW..HIGH'", line)
        limits[match[1]] = (int(match[2]), None if match[3] == "any" else int(match[3]))

    def _guard(self, line: str, limits: dict[str, tuple[int, int | None]]) -> Guard:
        match = _GUARD.match(line)
        if not match:
            raise self.error("expected 'guard SIZE == SIZE'", line)
        return Guard(parse_dim(match[1], limits), match[2], parse_dim(match[3], limits), match[4] or "")

    def _input(self, line: str, limits: dict[str, tuple[int, int | None]], values: dict[str, Value]) -> Input:
        match = _INPUT.match(line)
        if not match:
            raise self.error("cannot read this input", line)
        role, owner, name, dtype, shape, data, tags = match.groups()
        value = self._define(name, TensorType(as_dtype(dtype), self._shape(shape, limits)), values)
        array = None if data is None else self._data(data, value.type)
        if (array is None) == (role == "constant"):
            raise self.error("constants, and only they, have data", line)
        return Input(value, role, array, parse_attributes(tags or "", limits), _unquoted(owner or ""))

    def _shape(self, text: str, limits: dict[str, tuple[int, int | None]]) -> Shape:
        return tuple(parse_dim(part, limits) for part in _split(text)) if text.strip() else ()

    def _define(self, name: str, type: TensorType, values: dict[str, Value]) -> Value:
        name = _unquoted(name)
        if name in values:
            raise self.error(f"'%{name}' is defined twice")
        value = values[name] = Value(name, type)
        return value

    def _data(self, text: str, type: TensorType) -> np.ndarray[Any, Any]:
        if not type.is_static:
            raise self.error("a constant needs a static shape")
        if text.startswith("base64:"):
            try:
                raw = base64.b64decode(text[7:], validate=True)
            except binascii.Error:
                raise self.error("corrupt base64") from None
            array = np.frombuffer(raw, dtype=type.dtype.numpy)
        else:
            numbers = parse_attributes(f"data={text}", {})["data"]
            array = np.array(numbers, dtype=type.dtype.numpy)
        array = array.reshape(type.shape)
        array.setflags(write=False)
        return array

    def _results(self, line: str, values: dict[str, Value], states: set[str]) -> tuple[Output, ...]:
        outputs = []
        for part in _split(line[len("return") :]):
            if match := _RESULT_OF.match(part.strip()):
                role, owner = match[1], _unquoted(match[2])
                name = result_name(role, owner) if match[3] is None else _unquoted(match[3])
                outputs.append(Output(values[_unquoted(match[4])], name, role, owner))
            elif match := _OUTPUT.match(part.strip()):
                outputs.append(named_before_roles(_unquoted(match[1]), values[_unquoted(match[2])], states))
            else:
                raise self.error("expected 'return NAME=%VALUE, gradient(INPUT)=%VALUE, ...'", line)
        return tuple(outputs)

    def _node(self, line: str, limits: Any, values: dict[str, Value], depth: int) -> Node:
        text, origin = _origin(line)
        opens = text.endswith((") {", "} {"))
        if opens:
            text = text[:-2]
        match = _OPNAME.search(_STRING.sub(lambda found: "_" * len(found[0]), text))
        if not match:
            raise self.error("cannot read this node", line)
        end = _closing(text, match.end() - 1)
        tags = text[end + 1 :].strip()
        if tags and not (tags.startswith("{") and tags.endswith("}")):
            raise self.error("cannot read this node", line)
        parts = _split(text[match.end() : end])
        count = next(
            (k for k, p in enumerate(parts) if not p.strip().startswith("%") and p.strip() != "none"), len(parts)
        )
        operands = tuple(None if p.strip() == "none" else values[_unquoted(p.strip()[1:])] for p in parts[:count])
        op = operation(match[1])
        # An old text may lack optional operands that were added to the operation later.
        if not op.variadic:
            operands += tuple(None for name in op.operands[len(operands) :] if name in op.optional)
        attributes = op.complete(parse_attributes(",".join(parts[count:]), limits))
        regions: list[Graph] = []
        if opens:
            while not self._at_close():
                regions.append(self.graph(depth + 1, limits))
            self.next()
        heads = _RESULT.findall(text[: match.start()])
        results = tuple(self._define(n, TensorType(as_dtype(d), self._shape(s, limits)), values) for n, d, s in heads)
        return Node(op, operands, attributes, results, tuple(regions), origin, parse_attributes(tags[1:-1], limits))

    def _at_close(self) -> bool:
        while self.at < len(self.lines) and not self.lines[self.at].strip():
            self.at += 1
        return self.at >= len(self.lines) or self.lines[self.at].strip() == "}"


def _origin(line: str) -> tuple[str, Origin]:
    """Return the line without its trailing comment, and the origin in the comment."""
    start = next((k for k, mark in _marks(line) if mark == "  # "), -1)
    if start < 0:
        return line, NOWHERE
    match = _ORIGIN.match(line[start + 4 :])
    if match is None:
        return line[:start], NOWHERE
    return line[:start], Origin(_unquoted(match["path"]), match["file"] or "", int(match["line"] or 0))


def _unquoted(name: str) -> str:
    try:
        return str(ast.literal_eval(name)) if name.startswith('"') else name
    except (SyntaxError, ValueError):
        raise ParseError(f"{name[:100]} is not a quoted name") from None


def _marks(text: str, start: int = 0) -> Iterator[tuple[int, str]]:
    """Yield position and text of each bracket, comma and beginning of a comment outside of string literals."""
    return ((m.start(), m[0]) for m in _MARK.finditer(text, start) if not m[0].startswith('"'))


def _closing(text: str, start: int) -> int:
    """Return the position of the bracket that closes the one at ``start``."""
    depth = 0
    for k, mark in _marks(text, start):
        depth += (mark in "([{") - (mark in ")]}")
        if depth == 0:
            return k
    raise ParseError("a bracket is not closed")


def _split(text: str) -> list[str]:
    """Split at top-level commas."""
    parts, depth, start = [], 0, 0
    for k, mark in _marks(text):
        depth += (mark in "([{") - (mark in ")]}")
        if mark == "," and depth == 0:
            parts.append(text[start:k])
            start = k + 1
    last = text[start:]
    return [*parts, last] if last.strip() else parts
