"""Passes: declaration, order, and the pass manager."""

from mithril.base.lazy_exports import lazy_exports

HOMES = {
    "declare": ("Pass", "PassContext", "as_pass", "pass_", "pass_text", "placement_of"),
    "manager": ("PassManager", "PassRecord", "PipelineReport"),
    "numeric": ("random_arguments",),
    "order": ("sort_passes", "parse_pipeline", "pipeline_text"),
}
__all__, __getattr__, __dir__ = lazy_exports(__name__, HOMES)
