"""Rewriting of graphs by rules; declaration and order of passes, and the pass manager."""

from mithril.graph.lazy_exports import lazy_exports

HOMES = {
    "declare": ("Pass", "PassContext", "as_pass", "pass_", "placement_of"),
    "manager": ("PassManager", "PassRecord", "PipelineReport"),
    "matching": ("Match",),
    "numeric": ("random_arguments",),
    "order": ("sort_passes", "parse_pipeline", "pipeline_text"),
    "repeats": ("Repeats", "repeated_segments"),
    "rules": ("Explanation", "Rule", "RuleSet", "rewrite", "rule"),
    "two_dtypes": ("TwoDtypes",),
}
__all__, __getattr__, __dir__ = lazy_exports(__name__, HOMES)
