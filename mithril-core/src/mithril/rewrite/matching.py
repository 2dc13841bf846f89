"""Finding a pattern in a graph, and saying how far it got where it is not there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mithril.base import MithrilError
from mithril.ir import Editor, Node, Value, attribute_text, attributes_key
from mithril.rewrite.pattern import Applied, Capture, Made, Pattern, Variable

CLOSE = 1e-5  # people write sqrt(2/pi) with more or fewer digits


@dataclass(frozen=True)
class Match:
    """A pattern found: what its operands and keywords stand for, and which nodes it covers."""

    root: Node
    values: Mapping[str, Value]
    captures: Mapping[str, Any]
    nodes: tuple[Node, ...]


@dataclass
class Attempt:
    """One try at one node. ``furthest`` and ``reason`` tell about the best partial match."""

    editor: Editor
    exact: bool
    bound: dict[Any, Any] = field(default_factory=dict)  # names and operations of the pattern -> what they stand for
    furthest: int = -1
    reason: str = ""

    def find(self, pattern: Pattern, node: Node, *, shared: bool) -> Match | None:
        if not self._operation(pattern.root.applied, node, self._done(pattern, node, shared)):
            return None
        covered = tuple(n for key, n in self.bound.items() if isinstance(key, Applied))
        values = {name: self.bound["operand", name] for name in pattern.variables}
        captures = {name: self.bound["keyword", name] for name in pattern.captures if ("keyword", name) in self.bound}
        return Match(node, values, captures, covered)

    # Matching is written in continuations: every step is given what remains to be matched, so that a commutative
    # operation can try its operands the other way round when something further on does not fit.
    def _operation(self, wanted: Applied, node: Node, rest: Callable[[], bool]) -> bool:
        if node.op is not wanted.op:
            return self._fail(f"expected '{wanted.op.name}', found '{node.op.name}' (%{node.result.name})")
        if wanted in self.bound:
            return rest() if self.bound[wanted] is node else self._fail(f"'{wanted.op.name}' stands for two nodes")
        mark = len(self.bound)
        self.bound[wanted] = node
        if self._attributes(wanted, node) and self._operands(wanted, node, rest):
            return True
        self._undo(mark)
        return False

    def _operands(self, wanted: Applied, node: Node, rest: Callable[[], bool]) -> bool:
        if len(wanted.operands) != len(node.operands):
            return self._fail(f"'{wanted.op.name}' has {len(node.operands)} operands, expected {len(wanted.operands)}")
        orders = [node.operands]
        if wanted.op.commutative and len(node.operands) == 2:
            orders.append(node.operands[::-1])
        mark = len(self.bound)
        for order in orders:
            if self._each(wanted, order, 0, rest):
                return True
            self._undo(mark)
        return False

    def _each(self, wanted: Applied, order: tuple[Value | None, ...], at: int, rest: Callable[[], bool]) -> bool:
        if at == len(order):
            return rest()
        return self._operand(wanted.operands[at], order[at], lambda: self._each(wanted, order, at + 1, rest))

    def _operand(self, wanted: Any, value: Value | None, rest: Callable[[], bool]) -> bool:
        if wanted is None or value is None:
            if wanted is None and value is None:
                return rest()
            return self._fail("an operand is missing" if value is None else f"an operand more than expected: {value!r}")
        if isinstance(wanted, Variable):
            return self._bind(("operand", wanted.name), value, value, rest)
        if isinstance(wanted, Made):
            node = self.editor.producer(value)
            if node is None:
                return self._fail(f"expected '{wanted.applied.op.name}', found the input %{value.name}")
            if node.op is wanted.applied.op and node.results[wanted.index] is not value:
                return self._fail(f"%{value.name} is another result of '{node.op.name}'")
            return self._operation(wanted.applied, node, rest)
        number = self._number(value)
        if number is None:
            return self._fail(f"expected a number, found {value!r}")
        if isinstance(wanted, Capture):
            return self._bind(("keyword", wanted.name), number, number, rest)
        if not self._equal(wanted, number, value):
            return self._fail(f"expected the number {wanted}, found {number}")
        return rest()

    def _bind(self, key: tuple[str, str], value: Any, shown: Any, rest: Callable[[], bool]) -> bool:
        if key in self.bound:
            known = self.bound[key]
            same = known is value or (key[0] == "keyword" and attribute_text(known) == attribute_text(value))
            return rest() if same else self._fail(f"'{key[1]}' would be both {known!r} and {shown!r}")
        mark = len(self.bound)
        self.bound[key] = value
        if rest():
            return True
        self._undo(mark)
        return False

    def _attributes(self, wanted: Applied, node: Node) -> bool:
        """The pattern's attributes, brought to the form they have on operands like these."""
        raw = {}
        for name, written in wanted.attributes.items():
            if isinstance(written, Capture):
                raw[name] = node.attributes[name]
                if not self._bind(("keyword", written.name), raw[name], raw[name], lambda: True):
                    return False
            else:
                raw[name] = written
        types = [None if v is None else v.type for v in node.operands]
        try:
            expected = wanted.op.canonical(types, wanted.op.complete(raw))
        except MithrilError as error:
            return self._fail(error.what)
        for name, value in expected.items():
            if attribute_text(value) != attribute_text(node.attributes[name]):
                return self._fail(f"{node.op.name}: expected {name}={value}, found {name}={node.attributes[name]}")
        return attributes_key(expected) == attributes_key(node.attributes)

    # -- the end -----------------------------------------------------------------------------------------------------
    def _done(self, pattern: Pattern, root: Node, shared: bool) -> Callable[[], bool]:
        """What must hold of a complete match: nobody else reads what the rule would make superfluous."""

        def check() -> bool:
            if shared:
                return True
            covered = {id(n) for key, n in self.bound.items() if isinstance(key, Applied)}
            for key, node in self.bound.items():
                if not isinstance(key, Applied) or node is root:
                    continue
                for value in node.results:
                    if self.editor.is_output(value):
                        return self._fail(f"%{value.name} is an output of the graph")
                    other = next((u for u in self.editor.users(value) if id(u) not in covered), None)
                    if other is not None:
                        return self._fail(f"%{value.name} is also read by '{other.op.name}' (%{other.result.name})")
            return True

        return check

    def _fail(self, reason: str) -> bool:
        reached = sum(isinstance(key, Applied) for key in self.bound)
        if reached > self.furthest:
            self.furthest, self.reason = reached, reason
        return False

    def _undo(self, mark: int) -> None:
        while len(self.bound) > mark:
            self.bound.popitem()

    # -- numbers -----------------------------------------------------------------------------------------------------
    def _number(self, value: Value) -> Any:
        """The number a value is known to be."""
        node = self.editor.producer(value)
        if node is not None:
            return node.attributes["value"] if node.is_constant else None
        data = self.editor.data_of(value)
        return data.item() if data is not None and data.ndim == 0 else None

    def _equal(self, wanted: Any, number: Any, value: Value) -> bool:
        if not value.dtype.is_float:
            return type(wanted) is not float and bool(wanted == number)
        a, b = (np.asarray(n, np.float64).astype(value.dtype.numpy).astype(np.float64) for n in (wanted, number))
        if not self.exact and wanted:
            return bool(np.isclose(a, b, rtol=CLOSE, atol=0.0))
        return bool(a == b) and bool(np.signbit(a) == np.signbit(b))
