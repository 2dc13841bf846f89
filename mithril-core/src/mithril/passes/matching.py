"""Pattern matching in graphs, with the reason of the furthest mismatch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mithril.graph import Editor, MithrilError, Node, Value, attribute_text, attributes_key, types_of
from mithril.passes.pattern import Capture, Pattern, PatternOp, PatternResult, Variable

LARGEST_NUMBER = 1 << 16  # elements; constant folding makes no larger array
CLOSE = 1e-5  # relative; constants such as sqrt(2/pi) are written with various numbers of digits


@dataclass(frozen=True)
class Match:
    """A match: the bindings of the pattern's operands and keywords, and the nodes it covers."""

    root: Node
    values: Mapping[str, Value]
    captures: Mapping[str, Any]
    nodes: tuple[Node, ...]


@dataclass
class Attempt:
    """An attempt to match at one node. ``furthest`` and ``reason`` describe the best partial match."""

    editor: Editor
    exact: bool
    bound: dict[Any, Any] = field(default_factory=dict)  # names and operations of the pattern -> values, nodes
    furthest: int = -1
    reason: str = ""

    def find(self, pattern: Pattern, node: Node, *, shared: bool) -> Match | None:
        if not self._operation(pattern.root.applied, node, self._check_match(pattern, node, shared)):
            return None
        covered = tuple(n for key, n in self.bound.items() if isinstance(key, PatternOp))
        values = {name: self.bound["operand", name] for name in pattern.variables}
        captures = {name: self.bound["keyword", name] for name in pattern.captures if ("keyword", name) in self.bound}
        return Match(node, values, captures, covered)

    # Matching uses continuations: each step receives the remaining match as ``rest``, so that a commutative operation
    # can swap its operands if the remaining match fails.
    def _operation(self, pattern: PatternOp, node: Node, rest: Callable[[], bool]) -> bool:
        if node.op is not pattern.op:
            return self._fail(f"expected '{pattern.op.name}', found '{node.op.name}' (%{node.result.name})")
        if pattern in self.bound:
            return rest() if self.bound[pattern] is node else self._fail(f"'{pattern.op.name}' would match two nodes")
        mark = len(self.bound)
        self.bound[pattern] = node
        if self._attributes(pattern, node) and self._operands(pattern, node, rest):
            return True
        self._undo(mark)
        return False

    def _operands(self, pattern: PatternOp, node: Node, rest: Callable[[], bool]) -> bool:
        if len(pattern.operands) != len(node.operands):
            return self._fail(
                f"'{pattern.op.name}' has {len(node.operands)} operands, expected {len(pattern.operands)}"
            )
        orders = [node.operands]
        if pattern.op.commutative and len(node.operands) == 2:
            orders.append(node.operands[::-1])
        mark = len(self.bound)
        for order in orders:
            if self._each(pattern, node, order, 0, rest):
                return True
            self._undo(mark)
        return False

    def _each(
        self, pattern: PatternOp, node: Node, order: tuple[Value | None, ...], k: int, rest: Callable[[], bool]
    ) -> bool:
        if k == len(order):
            return rest()
        return self._operand(pattern.operands[k], node, order[k], lambda: self._each(pattern, node, order, k + 1, rest))

    def _operand(self, pattern: Any, user: Node, value: Value | None, rest: Callable[[], bool]) -> bool:
        if pattern is None or value is None:
            if pattern is None and value is None:
                return rest()
            return self._fail("an operand is missing" if value is None else f"unexpected operand {value!r}")
        if isinstance(pattern, Variable):
            return self._bind(("operand", pattern.name), value, value, rest)
        if isinstance(pattern, PatternResult):
            node = self.editor.producer(value)
            if node is None:
                return self._fail(f"expected '{pattern.applied.op.name}', found the input %{value.name}")
            if node.op is pattern.applied.op and node.results[pattern.index] is not value:
                return self._fail(f"%{value.name} is another result of '{node.op.name}'")
            return self._operation(pattern.applied, node, rest)
        number = self._number(value, user)
        if number is None:
            return self._fail(f"expected a number, found {value!r}")
        if isinstance(pattern, Capture):
            return self._bind(("keyword", pattern.name), number, number, rest)
        if not self._equal(pattern, number, value):
            return self._fail(f"expected the number {pattern}, found {number}")
        return rest()

    def _bind(self, key: tuple[str, str], value: Any, shown: Any, rest: Callable[[], bool]) -> bool:
        if key in self.bound:
            existing = self.bound[key]
            is_same = existing is value or (key[0] == "keyword" and attribute_text(existing) == attribute_text(value))
            return rest() if is_same else self._fail(f"'{key[1]}' would be both {existing!r} and {shown!r}")
        mark = len(self.bound)
        self.bound[key] = value
        if rest():
            return True
        self._undo(mark)
        return False

    def _attributes(self, pattern: PatternOp, node: Node) -> bool:
        """Compare attributes after canonicalizing those of the pattern for the operand types of the node."""
        raw = {}
        for name, written in pattern.attributes.items():
            if isinstance(written, Capture):
                raw[name] = node.attributes[name]
                if not self._bind(("keyword", written.name), raw[name], raw[name], lambda: True):
                    return False
            else:
                raw[name] = written
        types = types_of(node.operands)
        try:
            expected = pattern.op.canonical(types, pattern.op.complete(raw))
        except MithrilError as error:
            return self._fail(error.what)
        for name, value in expected.items():
            if attribute_text(value) != attribute_text(node.attributes[name]):
                return self._fail(f"{node.op.name}: expected {name}={value}, found {name}={node.attributes[name]}")
        return attributes_key(expected) == attributes_key(node.attributes)

    # -- check of a complete match -----------------------------------------------------------------------------------
    def _check_match(self, pattern: Pattern, root: Node, shared: bool) -> Callable[[], bool]:
        """Return the final check: no node outside the match uses a value that the rule removes."""

        def check() -> bool:
            if shared:
                return True
            covered = {id(n) for key, n in self.bound.items() if isinstance(key, PatternOp)}
            for key, node in self.bound.items():
                if not isinstance(key, PatternOp) or node is root:
                    continue
                for value in node.results:
                    if self.editor.is_output(value):
                        return self._fail(f"%{value.name} is an output of the graph")
                    other = next((u for u in self.editor.users(value) if id(u) not in covered), None)
                    if other is not None:
                        return self._fail(f"%{value.name} is also used by '{other.op.name}' (%{other.result.name})")
            return True

        return check

    def _fail(self, reason: str) -> bool:
        reached = sum(isinstance(key, PatternOp) for key in self.bound)
        if reached > self.furthest:
            self.furthest, self.reason = reached, reason
        return False

    def _undo(self, mark: int) -> None:
        while len(self.bound) > mark:
            self.bound.popitem()

    # -- numbers -----------------------------------------------------------------------------------------------------
    def _number(self, value: Value, user: Node) -> Any:
        """Return the number that a constant value holds, in every element if it is an array, or None.

        An array that broadcasts another operand does not count: a pattern would lose the size.
        """
        node = self.editor.producer(value)
        if node is not None:
            return node.attributes["value"] if node.is_constant else None
        data = self.editor.data_of(value)
        if data is None or not 0 < data.size <= LARGEST_NUMBER:
            return None
        shape = user.result.shape
        if data.ndim and not any(v is not None and v is not value and v.shape == shape for v in user.operands):
            return None
        elements = data.reshape(-1).view(f"u{data.itemsize}")  # bits: zeros have signs
        return data.flat[0].item() if (elements == elements[0]).all() else None

    def _equal(self, expected: Any, number: Any, value: Value) -> bool:
        if not value.dtype.is_float:
            return type(expected) is not float and bool(expected == number)
        a, b = (np.asarray(n, np.float64).astype(value.dtype.numpy).astype(np.float64) for n in (expected, number))
        if not self.exact and expected:
            return bool(np.isclose(a, b, rtol=CLOSE, atol=0.0))
        return bool(a == b) and bool(np.signbit(a) == np.signbit(b))
