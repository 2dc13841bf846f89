"""Rewriting graphs by rules: a rule is a pair of functions, ``before`` and ``after``."""

from mithril.rewrite.matching import Match
from mithril.rewrite.rules import Explanation, Rule, RuleSet, rewrite, rule

__all__ = ["Explanation", "Match", "Rule", "RuleSet", "rewrite", "rule"]
