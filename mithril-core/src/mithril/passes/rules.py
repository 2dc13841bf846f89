"""Rewrite rules: two functions and a condition; rule sets: rules that are applied together."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from mithril.graph import (
    Editor,
    Graph,
    MithrilError,
    Node,
    Origin,
    RewriteError,
    TensorType,
    Value,
    substitute,
    symbols,
    trace,
    types_of,
)
from mithril.passes.matching import Attempt, Match
from mithril.passes.pattern import Pattern


@dataclass(frozen=True)
class Explanation:
    """The outcome of a rule at a node: whether it matches, and if not, the furthest partial match and the reason."""

    node: Node
    matches: bool
    reached: int
    size: int
    reason: str = ""

    def __str__(self) -> str:
        origin = f" ({self.node.origin})" if str(self.node.origin) else ""
        prefix = f"%{self.node.result.name} = {self.node.op.name}{origin}: "
        if self.matches:
            return prefix + "matches"
        return prefix + f"{self.reached} of {self.size} operations match; {self.reason}"


class Rule:
    """A rewrite of subgraphs that ``before`` describes to those that ``after`` builds.

    Positional parameters are operands and match any value. Keyword-only parameters capture attributes, or constant
    scalars if used as operands; tests of the rule use their defaults. Both functions are ordinary code on values.
    """

    def __init__(
        self,
        before: Callable[..., Any],
        after: Callable[..., Any],
        *,
        exact: bool,
        name: str,
        when: Callable[..., Any] | None = None,
        shared: bool = False,
    ) -> None:
        self.before = before
        self.after = after
        self.when = when
        self.exact = exact
        self.name = name
        self.origin = _source_location(before)
        self.shared = shared  # whether inner values can have other users, which keep the nodes alive
        self.pattern = Pattern(before, name)
        self._after_takes = self._keywords(after)
        self._when_takes = self._keywords(when) if when is not None else ()

    def _keywords(self, function: Callable[..., Any]) -> tuple[str, ...]:
        """Return the captured keywords that a function takes; check that it takes all operands."""
        positional, keywords, everything = 0, [], False
        for p in inspect.signature(function).parameters.values():
            if p.kind is p.VAR_KEYWORD:
                everything = True
            elif p.kind is p.KEYWORD_ONLY:
                keywords.append(p.name)
            else:
                positional = len(self.pattern.variables) if p.kind is p.VAR_POSITIONAL else positional + 1
        foreign = [k for k in keywords if k not in self.pattern.captures]
        if positional != len(self.pattern.variables) or foreign:
            raise RewriteError(
                f"rule '{self.name}': its functions do not take the same operands",
                facts=[f"before{inspect.signature(self.before)}", f"{function.__name__}{inspect.signature(function)}"],
            )
        return tuple(self.pattern.captures) if everything else tuple(keywords)

    def restricted(self, condition: Callable[..., bool]) -> Rule:
        """Return the rule for operands and captured keywords that also satisfy another condition."""

        def both(*operands: Any, **captured: Any) -> Any:
            if not condition(*operands, **captured):
                return "its condition does not hold"
            return self.when is None or self.when(*operands, **{n: captured[n] for n in self._when_takes})

        return Rule(self.before, self.after, exact=self.exact, name=self.name, when=both, shared=self.shared)

    # -- applying ----------------------------------------------------------------------------------------------------
    def match(self, editor: Editor, node: Node) -> Match | str:
        """Return the match rooted at a node, or the reason why there is none."""
        attempt = Attempt(editor, self.exact)
        match = attempt.find(self.pattern, node, shared=self.shared)
        if match is None:
            return attempt.reason
        if self.when is not None:
            try:
                verdict = self.when(*match.values.values(), **{n: match.captures[n] for n in self._when_takes})
            except MithrilError:
                raise
            except Exception as cause:
                raise self._error("when()", cause) from cause
            if verdict is not True:
                return verdict if isinstance(verdict, str) else "its condition does not hold"
        return match

    def apply(self, editor: Editor, node: Node) -> tuple[Value, list[Node]] | str:
        """Replace the match rooted at a node; return the new value and its users, or the reason for no change."""
        match = self.match(editor, node)
        if isinstance(match, str):
            return match
        # One node cannot run on two backends, and a rule does not know which of them the user wants.
        if len({n.tags.get("backend") for n in match.nodes}) > 1:
            return "its operations are assigned to different backends"
        old = node.result
        try:
            with editor.before(node) as builder, builder.at(_origin(match), node.tags):
                new = self.after(*match.values.values(), **{n: match.captures[n] for n in self._after_takes})
                _check_replacement(new, old)
        except MithrilError as error:
            return f"after() is not applicable: {error.what}"
        except Exception as cause:
            raise self._error("after()", cause) from cause
        readers = editor.replace_value(old, new)
        editor.erase_dead(node)
        return new, readers

    def _error(self, function: str, cause: Exception) -> RewriteError:
        """Return the error for an exception in one of the rule's functions."""
        return RewriteError(
            f"{function} of rule '{self.name}' failed: {type(cause).__name__}: {cause}", facts=[f"from {self.origin}"]
        )

    def __call__(self, graph: Graph) -> Graph:
        """Apply only this rule, as a pass."""
        return RuleSet(self.name, [self])(graph)

    def explain(self, graph: Graph) -> list[Explanation]:
        """Explain the outcome at each node with the root operation, the furthest partial match first."""
        out = []
        editor = graph.edit()
        for node in editor.nodes():
            if node.op is not self.pattern.root.applied.op:
                continue
            attempt = Attempt(editor, self.exact)
            complete = attempt.find(self.pattern, node, shared=self.shared) is not None
            outcome = self.match(editor, node)
            if isinstance(outcome, Match):
                outcome = self._operand_mismatch(outcome)
            matches = not outcome
            reached = self.pattern.size if complete else attempt.furthest
            out.append(Explanation(node, matches, reached, self.pattern.size, str(outcome)))
        return sorted(out, key=lambda e: (not e.matches, -e.reached))

    def _operand_mismatch(self, match: Match) -> str:
        """Return the reason why after() rejects the operands of a match; empty if it accepts them."""
        captures = {n: match.captures[n] for n in self._after_takes}
        types = [v.type for v in match.values.values()]
        try:
            graph = trace(lambda *values: self.after(*values, **captures), types, list(match.values))
            _check_replacement(graph.outputs[0], match.root.result)
        except MithrilError as error:
            return f"after() is not applicable: {error.what}"
        return ""

    def both_graphs(self, types: Sequence[TensorType]) -> tuple[Graph, Graph]:
        """Trace both functions for operands of these types; captured keywords have the defaults of before()."""
        missing = [n for n, v in self.pattern.captures.items() if v is None]
        if missing:
            raise RewriteError(
                f"rule '{self.name}': '{missing[0]}' has no default, which tests of the rule require",
                hint=f"before(..., *, {missing[0]}=...)",
            )
        names = list(self.pattern.variables)
        tried = self.pattern.captures

        def after(*values: Value) -> Any:
            return self.after(*values, **{n: tried[n] for n in self._after_takes})

        return trace(lambda *v: self.before(*v, **tried), types, names, "before"), trace(after, types, names, "after")

    def __repr__(self) -> str:
        return f"<rule {self.name}>"


def _origin(match: Match) -> Origin:
    """Return the origin of the costliest node: a product fused with an activation keeps the origin of the product."""

    def work(node: Node) -> float:
        op = node.op
        if not op.cost and not op.moves and len(node.operands) > 1:
            return inf  # a product that leaves its cost to its axes
        types = types_of(node.operands)
        count = op.declared_flops(types, [v.type for v in node.results], node.attributes)
        # Only the order of costs matters; any large size may replace a symbolic one.
        return int(substitute(count, {s.name: 1 << 10 for s in symbols(count)}))

    origins = {node.origin for node in match.nodes}
    return match.root.origin if len(origins) == 1 else max(match.nodes, key=work).origin


def _source_location(function: Callable[..., Any]) -> str:
    """Return file and line of the function."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else ""


def _check_replacement(new: Any, old: Value) -> None:
    if not isinstance(new, Value):
        raise RewriteError(f"after() must return a value, got a {type(new).__name__}")
    if new.type != old.type:
        raise RewriteError(f"after() returns {new.type}, but before() returns {old.type}")


def rule(
    before: Callable[..., Any],
    after: Callable[..., Any],
    *,
    exact: bool,
    name: str | None = None,
    when: Callable[..., Any] | None = None,
    shared: bool = False,
) -> Rule:
    """Create a rewrite rule. ``exact`` asserts bit-identical results, including signed zeros and infinities.

    Positional parameters of ``before`` are operands and match any value. Its keyword-only parameters capture: an
    attribute where they are passed as one, a constant scalar where they are used as an operand. ``after`` and ``when``
    take the operands, and by name those of the captured values that they need; tests of the rule use the defaults.
    ``when`` returns True, or else False or the reason why the rule is not applicable.
    """
    rule_name = name if name is not None else str(getattr(after, "__name__", "rule"))
    if rule_name == "<lambda>":
        rule_name = f"rule at line {after.__code__.co_firstlineno}"
    return Rule(before, after, exact=exact, name=rule_name, when=when, shared=shared)


# -- application until a fixed point: a worklist with users before their operands, so that the largest match wins ----
Observer = Callable[[Rule, Node, Value], None]
FUEL = 8  # applications per node of the graph, beyond which rules are assumed to oscillate


def rewrite(graph: Graph, rules: Sequence[Rule], observe: Observer | None = None) -> Graph:
    """Apply ``rules`` wherever they match, including regions of control flow, and return the new graph."""
    if not rules:
        return graph
    by_op: dict[str, list[Rule]] = {}
    reach = 0
    for one in rules:
        by_op.setdefault(one.pattern.op, []).append(one)
        reach = max(reach, one.pattern.depth)
    rewritten: dict[int, Graph] = {}
    for current in _inner_first(graph):
        rewritten[id(current)] = _Worklist(_with_bodies(current, rewritten), by_op, reach, observe).run()
    return rewritten[id(graph)]


def _inner_first(graph: Graph) -> list[Graph]:
    """Return a graph and all its nested regions, inner regions first."""
    graphs, pending = [], [graph]
    while pending:
        current = pending.pop()
        graphs.append(current)
        pending.extend(region for node in current.nodes for region in node.regions)
    return graphs[::-1]


def _with_bodies(graph: Graph, rewritten: dict[int, Graph]) -> Graph:
    """Return the graph with the regions of its nodes replaced by the rewritten ones."""
    changed = False
    nodes: list[Node] = []
    for node in graph.nodes:
        if node.regions:
            regions = tuple(rewritten[id(r)] for r in node.regions)
            if any(new is not old for new, old in zip(regions, node.regions, strict=True)):
                node = node.replaced(regions=regions)
                changed = True
        nodes.append(node)
    return graph.replaced(nodes=tuple(nodes)) if changed else graph


class _Worklist:
    def __init__(self, graph: Graph, by_op: dict[str, list[Rule]], reach: int, observe: Observer | None) -> None:
        self.graph = graph
        self.by_op = by_op
        self.reach = reach
        self.observe = observe
        # 64 more for small graphs, whose replacements may be rewritten in turn.
        self.fuel = FUEL * len(graph.nodes) + 64
        self.recent: deque[str] = deque(maxlen=6)

    def run(self) -> Graph:
        # A dictionary is an ordered set: values come once, and the last one is removed in constant
        # time.
        pending = {node.result: None for node in self.graph.nodes if node.op.name in self.by_op}
        if not pending:
            return self.graph
        editor: Editor = self.graph.edit()
        while pending:
            value, _ = pending.popitem()  # the last one, so that users come first
            node = editor.producer(value)
            if node is None or node.result is not value:
                continue  # removed by an earlier match
            change = self._apply_one(editor, node)
            if change is not None:
                pending.update(self._affected(editor, *change))
        return editor.freeze()

    def _apply_one(self, editor: Editor, node: Node) -> tuple[Value, list[Node]] | None:
        for one in self.by_op.get(node.op.name, ()):
            change = one.apply(editor, node)
            if isinstance(change, str):
                continue
            self.recent.append(one.name)
            self.fuel -= 1
            if self.fuel < 0:
                raise RewriteError(
                    "rewriting did not converge: two rules undo each other, or a rule matches its own output",
                    facts=[f"last rules applied: {', '.join(self.recent)}"],
                )
            if self.observe is not None:
                self.observe(one, node, change[0])
            return change
        return None

    def _affected(self, editor: Editor, new: Value, readers: list[Node]) -> dict[Value, None]:
        """Return the values whose match may have changed: the new ones, and users and operands within reach."""
        values: dict[Value, None] = {}
        above = readers
        # A pattern of depth d that is rooted above the new value may contain it up to d - 1 users away.
        for step in range(self.reach - 1):
            results = [v for node in above for v in node.results]
            values.update(dict.fromkeys(results))
            if step + 2 < self.reach:
                above = [user for v in results for user in editor.users(v)]
        below = [new]
        for _ in range(self.reach):
            nodes = [n for n in map(editor.producer, below) if n is not None]
            values.update(dict.fromkeys(n.result for n in nodes))
            below = [v for n in nodes for v in n.operands if v is not None]
        return {
            v: None
            for v in reversed(values)
            if (node := editor.producer(v)) is not None and node.result is v and node.op.name in self.by_op
        }


class RuleSet:
    """Rules applied together until none matches; a rule set is also a pass."""

    def __init__(self, name: str, rules: Iterable[Rule]) -> None:
        self.name = name
        self.rules = tuple(rules)
        self.exact = all(rule.exact for rule in self.rules)

    @property
    def origin(self) -> str:
        """File and line of the first rule."""
        return self.rules[0].origin if self.rules else ""

    def __call__(self, graph: Graph) -> Graph:
        return rewrite(graph, self.rules)

    def explain(self, graph: Graph) -> Mapping[str, list[Explanation]]:
        """Return the explanations of each rule, by its name."""
        return {r.name: r.explain(graph) for r in self.rules}

    def __repr__(self) -> str:
        return f"<rule set {self.name}: {', '.join(r.name for r in self.rules)}>"
