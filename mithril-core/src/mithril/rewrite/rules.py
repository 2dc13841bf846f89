"""A rule: two functions and a condition; a rule set: rules that are applied together."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mithril.base import MithrilError, RewriteError, Size, TensorType, substitute, symbols
from mithril.ir import Editor, Graph, Node, Origin, Value, trace
from mithril.rewrite.matching import Attempt, Match
from mithril.rewrite.pattern import Pattern


@dataclass(frozen=True)
class Explanation:
    """Whether a rule matches at a node, and if not, how far it got and what stopped it."""

    node: Node
    matches: bool
    reached: int
    size: int
    reason: str = ""

    def __str__(self) -> str:
        where = f" ({self.node.origin})" if str(self.node.origin) else ""
        at = f"%{self.node.result.name} = {self.node.op.name}{where}: "
        if self.matches:
            return at + "matches"
        return at + f"{self.reached} of {self.size} operations match; {self.reason}"


class Rule:
    """Where ``before`` describes a part of the graph, ``after`` may stand instead.

    Positional parameters are operands: any values. Keyword-only parameters capture attributes, or numbers where they
    stand as operands; their defaults are what the rule is tested with. Both functions are ordinary code on values.
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
        self.origin = _place(before)
        self.shared = shared  # whether inner values may have other readers, who keep their nodes
        self.pattern = Pattern(before, name)
        self._after_takes = self._keywords(after)
        self._when_takes = self._keywords(when) if when is not None else ()

    def _keywords(self, function: Callable[..., Any]) -> tuple[str, ...]:
        """The captured keywords a function wants; it must take all operands."""
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
        """The match rooted at a node, or why there is none."""
        attempt = Attempt(editor, self.exact)
        found = attempt.find(self.pattern, node, shared=self.shared)
        if found is None:
            return attempt.reason
        if self.when is not None:
            try:
                said = self.when(*found.values.values(), **{n: found.captures[n] for n in self._when_takes})
            except MithrilError:
                raise
            except Exception as cause:
                raise self._error("when()", cause) from cause
            if said is not True:
                return said if isinstance(said, str) else "its condition does not hold"
        return found

    def apply(self, editor: Editor, node: Node) -> tuple[Value, list[Node]] | str:
        """Replace the match rooted at a node: the new value and its new readers, or why nothing was done."""
        found = self.match(editor, node)
        if isinstance(found, str):
            return found
        if len({n.tags.get("backend") for n in found.nodes}) > 1:
            return "its operations are to run on different backends"
        old = node.result
        try:
            with editor.before(node) as builder, builder.at(_origin(found), node.tags):
                new = self.after(*found.values.values(), **{n: found.captures[n] for n in self._after_takes})
                _fits(new, old)
        except MithrilError as error:
            return f"after() does not fit: {error.what}"
        except Exception as cause:
            raise self._error("after()", cause) from cause
        readers = editor.replace_value(old, new)
        editor.erase_dead(node)
        return new, readers

    def _error(self, function: str, cause: Exception) -> RewriteError:
        """The author's mistake in one of the rule's functions."""
        return RewriteError(
            f"{function} of rule '{self.name}' failed: {type(cause).__name__}: {cause}", facts=[f"from {self.origin}"]
        )

    def __call__(self, graph: Graph) -> Graph:
        """The rule alone as a pass."""
        return RuleSet(self.name, [self])(graph)

    def explain(self, graph: Graph) -> list[Explanation]:
        """For each place where a match could begin, the furthest first: does it match, and if not, why."""
        out = []
        editor = graph.edit()
        for node in editor.nodes():
            if node.op is not self.pattern.root.applied.op:
                continue
            attempt = Attempt(editor, self.exact)
            attempt.find(self.pattern, node, shared=self.shared)
            said = self.match(editor, node)
            if isinstance(said, Match):
                said = self._misfit(said)
            matches = not said
            reached = self.pattern.size if attempt.furthest < 0 else attempt.furthest
            out.append(Explanation(node, matches, reached, self.pattern.size, str(said)))
        return sorted(out, key=lambda e: (not e.matches, -e.reached))

    def _misfit(self, found: Match) -> str:
        """What after() has against the operands of a match; empty where it takes them."""
        given = {n: found.captures[n] for n in self._after_takes}
        types = [v.type for v in found.values.values()]
        try:
            made = trace(lambda *values: self.after(*values, **given), types, list(found.values))
            _fits(made.outputs[0], found.root.result)
        except MithrilError as error:
            return f"after() does not fit: {error.what}"
        return ""

    def sides(self, types: Sequence[TensorType]) -> tuple[Graph, Graph]:
        """Both functions as graphs for operands of these types; captured keywords take before()'s defaults."""
        missing = [n for n, v in self.pattern.captures.items() if v is None]
        if missing:
            raise RewriteError(
                f"rule '{self.name}': '{missing[0]}' has no default to try the rule with",
                hint=f"before(..., *, {missing[0]}=...)",
            )
        names = list(self.pattern.variables)
        tried = self.pattern.captures

        def after(*values: Value) -> Any:
            return self.after(*values, **{n: tried[n] for n in self._after_takes})

        return trace(lambda *v: self.before(*v, **tried), types, names, "before"), trace(after, types, names, "after")

    def __repr__(self) -> str:
        return f"<rule {self.name}>"


def _origin(found: Match) -> Origin:
    """Of the operation that did most of the work: merged with an activation, a product is still its own layer's."""

    def work(node: Node) -> int:
        flops: Any = node.op.flops
        types = [None if v is None else v.type for v in node.operands]
        count: Size = flops(types, [v.type for v in node.results], node.attributes) if flops is not None else 0
        return int(substitute(count, {s.name: 1 << 10 for s in symbols(count)}))

    origins = {node.origin for node in found.nodes}
    return found.root.origin if len(origins) == 1 else max(found.nodes, key=work).origin


def _place(function: Callable[..., Any]) -> str:
    """The author's file and line."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else ""


def _fits(new: Any, old: Value) -> None:
    if not isinstance(new, Value):
        raise RewriteError(f"after() returned a {type(new).__name__}, no value")
    if new.type != old.type:
        raise RewriteError(f"after() gives {new.type}, before() gives {old.type}")


def rule(
    before: Callable[..., Any],
    after: Callable[..., Any],
    *,
    exact: bool,
    name: str | None = None,
    when: Callable[..., Any] | None = None,
    shared: bool = False,
) -> Rule:
    """A rewrite rule. ``exact`` promises equal results bit for bit, signed zeros and infinities included.

    ``when(operands..., captured keywords)`` returns True, or False or the reason why the rule must not be applied.
    """
    chosen = name if name is not None else str(getattr(after, "__name__", "rule"))
    if chosen == "<lambda>":
        chosen = f"rule at line {after.__code__.co_firstlineno}"
    return Rule(before, after, exact=exact, name=chosen, when=when, shared=shared)


# -- applying rules until none matches: a worklist, readers before what they read, so that the largest match wins ----
Observer = Callable[[Rule, Node, Value], None]
FUEL = 8  # applications per node of the graph before rules are taken to undo each other


def rewrite(graph: Graph, rules: Sequence[Rule], observe: Observer | None = None) -> Graph:
    """The graph with ``rules`` applied wherever they match, bodies of control flow included."""
    by_op: dict[str, list[Rule]] = {}
    for one in rules:
        by_op.setdefault(one.pattern.op, []).append(one)
    reach = max((one.pattern.depth for one in rules), default=1)
    made: dict[int, Graph] = {}
    for current in _inner_first(graph):
        made[id(current)] = _Worklist(_with_bodies(current, made), by_op, reach, observe).run()
    return made[id(graph)]


def _inner_first(graph: Graph) -> list[Graph]:
    """A graph and all bodies within it, each after those it holds."""
    found, pending = [], [graph]
    while pending:
        current = pending.pop()
        found.append(current)
        pending.extend(region for node in current.nodes for region in node.regions)
    return found[::-1]


def _with_bodies(graph: Graph, made: dict[int, Graph]) -> Graph:
    """The graph with its nodes' bodies exchanged for those already rewritten."""
    changed = False
    nodes: list[Node] = []
    for node in graph.nodes:
        if node.regions:
            regions = tuple(made[id(r)] for r in node.regions)
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
        self.fuel = FUEL * len(graph.nodes) + 64
        self.recent: deque[str] = deque(maxlen=6)

    def run(self) -> Graph:
        if not any(node.op.name in self.by_op for node in self.graph.nodes):
            return self.graph
        editor: Editor = self.graph.edit()
        pending = {node.result: None for node in self.graph.nodes if node.op.name in self.by_op}
        while pending:
            value, _ = pending.popitem()  # the last: readers first
            node = editor.producer(value)
            if node is None or node.result is not value:
                continue  # gone with an earlier match
            done = self._apply_one(editor, node)
            if done is not None:
                pending.update(self._affected(editor, *done))
        return editor.freeze()

    def _apply_one(self, editor: Editor, node: Node) -> tuple[Value, list[Node]] | None:
        for one in self.by_op.get(node.op.name, ()):
            done = one.apply(editor, node)
            if isinstance(done, str):
                continue
            self.recent.append(one.name)
            self.fuel -= 1
            if self.fuel < 0:
                raise RewriteError(
                    "rewriting does not come to an end: rules undo each other, or one makes what it matches",
                    facts=[f"the last ones applied: {', '.join(self.recent)}"],
                )
            if self.observe is not None:
                self.observe(one, node, done[0])
            return done
        return None

    def _affected(self, editor: Editor, new: Value, readers: list[Node]) -> dict[Value, None]:
        """Nodes whose match may have changed: what was made, what reads it within reach, and what lies below it."""
        found: dict[Value, None] = {}
        above = readers
        for step in range(self.reach - 1):
            results = [v for node in above for v in node.results]
            found.update(dict.fromkeys(results))
            if step + 2 < self.reach:
                above = [user for v in results for user in editor.users(v)]
        below = [new]
        for _ in range(self.reach):
            nodes = [n for n in map(editor.producer, below) if n is not None]
            found.update(dict.fromkeys(n.result for n in nodes))
            below = [v for n in nodes for v in n.operands if v is not None]
        return {
            v: None
            for v in reversed(found)
            if (node := editor.producer(v)) is not None and node.result is v and node.op.name in self.by_op
        }


class RuleSet:
    """Rules applied together until none matches: a pass, where one is wanted."""

    def __init__(self, name: str, rules: Iterable[Rule]) -> None:
        self.name = name
        self.rules = tuple(rules)

    @property
    def origin(self) -> str:
        """The first rule's place."""
        return self.rules[0].origin if self.rules else ""

    @property
    def exact(self) -> bool:
        return all(r.exact for r in self.rules)

    def __call__(self, graph: Graph) -> Graph:
        return rewrite(graph, self.rules)

    def explain(self, graph: Graph) -> Mapping[str, list[Explanation]]:
        """Every rule's explanation by its name."""
        return {r.name: r.explain(graph) for r in self.rules}

    def __repr__(self) -> str:
        return f"<rule set {self.name}: {', '.join(r.name for r in self.rules)}>"
