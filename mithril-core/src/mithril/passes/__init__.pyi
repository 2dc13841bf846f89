"""Rewriting of graphs by rules; declaration and order of passes, and the pass manager."""

from mithril.passes.declare import (
    Pass as Pass,
    PassContext as PassContext,
    as_pass as as_pass,
    pass_ as pass_,
    pass_text as pass_text,
    placement_of as placement_of,
)
from mithril.passes.manager import (
    PassManager as PassManager,
    PassRecord as PassRecord,
    PipelineReport as PipelineReport,
)
from mithril.passes.matching import Match as Match
from mithril.passes.numeric import random_arguments as random_arguments
from mithril.passes.order import (
    parse_pipeline as parse_pipeline,
    pipeline_text as pipeline_text,
    sort_passes as sort_passes,
)
from mithril.passes.rules import (
    Explanation as Explanation,
    Rule as Rule,
    RuleSet as RuleSet,
    rewrite as rewrite,
    rule as rule,
)
