"""Rewriting of graphs by rules, pairs of functions ``before`` and ``after``."""

from mithril.rewrite.matching import Match as Match
from mithril.rewrite.rules import (
    Explanation as Explanation,
    Rule as Rule,
    RuleSet as RuleSet,
    rewrite as rewrite,
    rule as rule,
)
