"""Rewriting of graphs by rules, pairs of functions ``before`` and ``after``."""

from mithril.base.lazy_exports import lazy_exports

HOMES = {
    "matching": ("Match",),
    "rules": ("Explanation", "Rule", "RuleSet", "rewrite", "rule"),
}
__all__, __getattr__, __dir__ = lazy_exports(__name__, HOMES)
