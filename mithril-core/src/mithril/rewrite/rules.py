"""A rule: two functions and a condition; a rule set: rules that are applied together."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mithril.base.dims import Size, substitute, symbols
from mithril.base.dtypes import TensorType
from mithril.base.errors import MithrilError, RewriteError
from mithril.ir import Graph, Node, Origin, Value, trace
from mithril.ir.editor import Editor
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

    # -- applying ----------------------------------------------------------------------------------------------------
    def match(self, editor: Editor, node: Node) -> Match | str:
        """The match rooted at a node, or why there is none."""
        attempt = Attempt(editor, self.exact)
        found = attempt.find(self.pattern, node, shared=self.shared)
        if found is None:
            return attempt.reason
        if self.when is not None:
            said = self.when(*found.values.values(), **{n: found.captures[n] for n in self._when_takes})
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
        readers = editor.replace_value(old, new)
        editor.erase_dead(node)
        return new, readers

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
        flops: Any = getattr(node.op, "flops", None)
        types = [None if v is None else v.type for v in node.operands]
        count: Size = flops(types, [v.type for v in node.results], node.attributes) if flops is not None else 0
        return int(substitute(count, {s.name: 1 << 10 for s in symbols(count)}))

    origins = {node.origin for node in found.nodes}
    return found.root.origin if len(origins) == 1 else max(found.nodes, key=work).origin


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


class RuleSet:
    """Rules applied together until none matches: a pass, where one is wanted."""

    def __init__(self, name: str, rules: Iterable[Rule]) -> None:
        self.name = name
        self.rules = tuple(rules)

    @property
    def exact(self) -> bool:
        return all(r.exact for r in self.rules)

    def __call__(self, graph: Graph) -> Graph:
        from mithril.rewrite.driver import rewrite

        return rewrite(graph, self.rules)

    def explain(self, graph: Graph) -> Mapping[str, list[Explanation]]:
        """Every rule's explanation by its name."""
        return {r.name: r.explain(graph) for r in self.rules}

    def __repr__(self) -> str:
        return f"<rule set {self.name}: {', '.join(r.name for r in self.rules)}>"
